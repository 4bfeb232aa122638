"""Vision models in the megatron backend on the CPU, in every way of cutting a model, against transformers alone."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from benchmarks.tiny.vision import png, save_vision
from rayhelper import ConfigError
from tests import megatron_on_cpu
from tests.backends.batches import mean_loss
from tests.backends.ranks import run_ranks
from tests.backends.test_megatron import CP, EP, FIRST, FULL, PLAIN, PP, SP, TP, VPP, WHOLE, Layout, told
from tests.e2e import runs
from tests.e2e.test_megatron import assert_same_run, process
from tests.images.test_pairs import PAIRS
from tests.images.test_sft import ROWS, transformers_gradients, transformers_logps, transpose_experts, whole_of
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.megatron.settings import MegatronSettings
from trainers.backends.megatron.tensors.names import SIGHT, canonical
from trainers.backends.megatron.tensors.stacks import stack_shapes, stacking
from trainers.batch import Sequences
from trainers.configuration.megatron_checks import check_model
from trainers.data.images.processor import ImageReader
from trainers.data.rows import pack, tokenize_sft

megatron_on_cpu.take_back()

MARGIN = 1e-5
STEPS, MICRO = 2, 2
TRAINING: dict[str, Any] = {
    "vision": {"frozen": []},
    "learning_rate": 1e-2,
    "num_training_steps": 10,
    "weight_decay": 0.1,
    "adam_epsilon": 1e-3,
    "max_grad_norm": 0.5,
}


def batch_of(model: str, rows: list[dict[str, Any]] = ROWS) -> Sequences:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return tokenize_sft(Dataset.from_list(rows), tokenizer, max_length=None, images=ImageReader(tokenizer, model))


def one(folder: str, batch: Sequences, layout: Layout, *, exports: bool, **settings: Any) -> dict[str, Any]:
    """Log-probabilities, steps, the gradients of the first and weights, as a rank has them.

    ``exports``: the model is first written as it came, into a folder beside it.
    """
    from trainers.backends.megatron.backend import MegatronBackend
    from trainers.backends.megatron.settings import MegatronSettings

    backend: Any = MegatronBackend(folder, settings=MegatronSettings(**layout), **TRAINING | settings)
    if exports:
        backend.weights.export(Path(folder, EXPORTED), dtype=torch.float32)
    index, count, leader = backend.shard
    mine = batch[np.array_split(np.arange(len(batch)), count)[index]]
    logps = backend.token_logps(mine, micro_batch_size=MICRO).values
    gradients: dict[str, torch.Tensor] = {}
    step = backend.optimizer.step

    def watched() -> Any:
        if not gradients and layout.get("use_distributed_optimizer") is False:
            found = backend.weights.named_weights(of=lambda weight: weight.main_grad)
            gradients.update((name, value.clone()) for name, value in found)
        return step()

    backend.optimizer.step = watched
    loss = partial(mean_loss, float(batch.target_mask.values.sum()))
    taken = [backend.step(mine, loss, micro_batch_size=MICRO).values() for _ in range(STEPS)]
    return {
        "index": index,
        "leader": leader,
        "logps": logps,
        "losses": [step["loss"] for step in taken if leader],
        "norms": [step["grad_norm"] for step in taken],
        "gradients": gradients,
        "weights": {name: weight.clone() for name, weight in backend.named_weights()},
    }


def of_layouts(rank: int, folder: str, batch: Sequences, layouts: list[Layout]) -> list[dict[str, Any]]:
    megatron_on_cpu.install()
    found = []
    for layout in layouts:
        given = batch
        if PACKED in layout:
            given = pack(batch, max_length=2 * int(batch.input_ids.lengths.max()))
            assert len(given) < len(batch)
        settings = {key: value for key, value in layout.items() if key not in (PACKED, EXPORTED)}
        found.append(one(folder, given, settings, exports=EXPORTED in layout))
        megatron_on_cpu.end_groups()
    return found


def in_memory(name: str) -> str:
    """What transformers calls the weight in memory."""
    name = canonical(name)
    is_language = name.startswith("model.") and not name.startswith(SIGHT)
    return name.replace("model.", "model.language_model.", 1) if is_language else name


def stacked(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with the experts of a layer in one, as transformers has them in memory."""
    return dict(stacking(iter(weights.items()), stack_shapes({key: value.shape for key, value in weights.items()})))


def wanted(folder: str, batch: Sequences) -> dict[str, Any]:
    """The same from transformers in one process."""
    backend = FsdpBackend(folder, **TRAINING)
    logps = backend.token_logps(batch, micro_batch_size=MICRO).values
    loss = partial(mean_loss, float(batch.target_mask.values.sum()))
    taken = [backend.step(batch, loss, micro_batch_size=MICRO).values() for _ in range(STEPS)]
    return {
        "logps": logps,
        "losses": [step["loss"] for step in taken],
        "norms": [step["grad_norm"] for step in taken],
        "weights": {name: weight.clone() for name, weight in backend.named_weights()},
    }


PACKED, EXPORTED = "packed rows", "exported"
CASES: dict[str, dict[int, list[Layout]]] = {
    "qwen2_vl": {1: [PLAIN]},
    "qwen2_5_vl": {1: [PLAIN], 2: [{TP: 2} | WHOLE | PLAIN, {PP: 2} | PLAIN]},
    "qwen3_vl": {2: [{TP: 2} | SP | PLAIN | FULL | {PACKED: True}, {PP: 2}, {CP: 2}]},
    "qwen3_vl_moe": {1: [PLAIN | FULL | {EXPORTED: True}], 2: [{EP: 2}]},
    "qwen3_5": {2: [{TP: 2} | SP | PLAIN | {PACKED: True}, {PP: 2}]},
    "qwen3_5_moe": {2: [{EP: 2} | PLAIN]},
    "internvl": {2: [{TP: 2} | SP | PLAIN | {EXPORTED: True}]},
}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
RATES = {"vit": 2e-2, "aligner": 5e-3}


@pytest.mark.parametrize("name", CASES)
def test_numbers_and_weights_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = save_vision(tmp_path / "model", name)
    if name == "qwen3_vl_moe":
        transpose_experts(folder)
    batch = batch_of(folder)
    right = wanted(folder, batch)
    loss, gradients = transformers_gradients(folder)
    assert right["losses"][0] == pytest.approx(loss, abs=MARGIN)
    largest = max(1.0, *(float(gradient.abs().max()) for gradient in gradients.values()))
    for num_ranks, layouts in CASES[name].items():
        ranks = run_ranks(num_ranks, of_layouts, folder, batch, layouts, folder=tmp_path)
        for k, layout in enumerate(layouts):
            found = [rank[k] for rank in ranks]
            leaders = sorted((one for one in found if one["leader"]), key=lambda one: one["index"])
            words = told(layout)
            logps = np.concatenate([one["logps"] for one in leaders])
            given, expected = (np.sort(one) if PACKED in layout else one for one in (logps, right["logps"]))
            np.testing.assert_allclose(given, expected, atol=MARGIN, rtol=5e-6, err_msg=words)
            losses = np.sum([one["losses"] for one in leaders], axis=0)
            np.testing.assert_allclose(losses, right["losses"], atol=MARGIN, err_msg=words)
            for one in found:
                np.testing.assert_allclose(one["norms"], right["norms"], atol=MARGIN, err_msg=words)
                assert one["weights"].keys() == right["weights"].keys()
                for key, weight in right["weights"].items():
                    torch.testing.assert_close(one["weights"][key], weight, atol=5e-5, rtol=0, msg=f"{words} {key}")
                for key, gradient in stacked(one["gradients"]).items():
                    wide = {"atol": MARGIN * largest, "rtol": 0.0}
                    torch.testing.assert_close(gradient, gradients[in_memory(key)], **wide, msg=f"{words} {key}")
            if EXPORTED in layout:
                assert_written_as_it_came(folder)


SPEAKING: dict[str, dict[int, list[Layout]]] = {
    "qwen2_5_omni": {2: [{TP: 2} | SP | PLAIN | {EXPORTED: True}]},
    "qwen3_omni_moe": {1: [PLAIN], 2: [{EP: 2} | PLAIN | {EXPORTED: True}]},
}


@pytest.mark.parametrize("name", SPEAKING)
def test_of_a_model_that_speaks_the_thinker_learns_and_the_rest_stays(name: str, tmp_path: Path) -> None:
    folder = save_vision(tmp_path / "model", name)
    file = Path(folder) / "model.safetensors"
    save_file(load_file(file) | {"talker.lm_head.weight": torch.randn(3, 4).bfloat16()}, file, {"format": "pt"})
    (Path(folder) / "spk_dict.pt").write_bytes(b"voices")
    batch = batch_of(folder)
    with torch.no_grad():
        logps = torch.cat(transformers_logps(whole_of(folder), folder)).numpy()
    loss, gradients = transformers_gradients(folder)
    norm = float(torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt())
    wide = {"atol": MARGIN * max(1.0, *(float(gradient.abs().max()) for gradient in gradients.values())), "rtol": 0.0}
    for num_ranks, layouts in SPEAKING[name].items():
        found = [rank[0] for rank in run_ranks(num_ranks, of_layouts, folder, batch, layouts, folder=tmp_path)]
        leaders = sorted((one for one in found if one["leader"]), key=lambda one: one["index"])
        np.testing.assert_allclose(np.concatenate([one["logps"] for one in leaders]), logps, atol=MARGIN, rtol=5e-6)
        assert sum(one["losses"][0] for one in leaders) == pytest.approx(loss, abs=MARGIN)
        for one in found:
            assert one["norms"][0] == pytest.approx(norm, abs=MARGIN)
            named = {canonical(key): value for key, value in stacked(one["gradients"]).items()}
            in_thinker = {key.replace("model.visual.", "visual.", 1): value for key, value in named.items()}
            assert in_thinker.keys() == gradients.keys()
            for key, gradient in in_thinker.items():
                torch.testing.assert_close(gradient, gradients[key], **wide, msg=key)
    assert_written_as_it_came(folder)
    assert Path(folder, EXPORTED, "spk_dict.pt").read_bytes() == b"voices"


def assert_written_as_it_came(folder: str) -> None:
    before, after = (load_file(path / "model.safetensors") for path in (Path(folder), Path(folder, EXPORTED)))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    kinds = [AutoConfig.from_pretrained(path).architectures for path in (Path(folder), Path(folder, EXPORTED))]
    assert kinds[0] == kinds[1]


def in_parts(rank: int, folder: str, batch: Sequences, out: Path) -> dict[str, Any]:
    """Runs of which parts alone learn, one that is written after a step and goes on in another layout."""
    from trainers.backends.megatron.backend import MegatronBackend
    from trainers.backends.megatron.settings import MegatronSettings

    megatron_on_cpu.install()
    loss = partial(mean_loss, float(batch.target_mask.values.sum()))
    found: dict[str, Any] = {}

    def stepped(settings: dict[str, Any], layout: Layout, read: Path | None = None, write: Path | None = None) -> Any:
        backend: Any = MegatronBackend(folder, settings=MegatronSettings(**layout), **TRAINING | settings)
        if read is not None:
            backend.load(read)
        value = backend.step(batch, loss, micro_batch_size=MICRO).values()
        if write is not None:
            backend.save(write)
            backend.export(write / "model")
        return value["grad_norm"], {name: weight.clone() for name, weight in backend.named_weights()}

    for name, settings in PARTS.items():
        found[name] = stepped(settings, {TP: 2} | SP, write=out / name)
        megatron_on_cpu.end_groups()
    found["goes on"] = stepped(PARTS["frozen tower"], {PP: 2}, read=out / "frozen tower")
    return found


PARTS: dict[str, dict[str, Any]] = {
    "frozen tower": {"vision": {"frozen": ["vit"]}},
    "frozen language": {"vision": {"frozen": ["llm"], "rates": RATES}},
    "adapter": {"vision": {"frozen": ["vit", "aligner"]}, "lora": LORA},
    "adapter on both": {"vision": {"frozen": ["aligner"], "rates": RATES}, "lora": LORA},
    "adapter and tower": {"vision": {"rates": RATES}, "lora": LORA | {"modules_to_save": ["vit", "aligner"]}},
}


def test_parts_that_are_frozen_stay_and_others_learn_as_in_transformers(tmp_path: Path) -> None:
    folder = save_vision(tmp_path / "model", "qwen3_vl")
    batch = batch_of(folder)
    loss = partial(mean_loss, float(batch.target_mask.values.sum()))
    ranks = run_ranks(2, in_parts, folder, batch, tmp_path / "out", folder=tmp_path)
    for name, settings in PARTS.items():
        backend = FsdpBackend(folder, **TRAINING | settings)
        backend.token_logps(batch, micro_batch_size=MICRO)
        norm = backend.step(batch, loss, micro_batch_size=MICRO).values()["grad_norm"]
        expected = {key: weight.clone() for key, weight in backend.named_weights()}
        again = backend.step(batch, loss, micro_batch_size=MICRO).values()["grad_norm"]
        then = {key: weight.clone() for key, weight in backend.named_weights()}
        for rank in ranks:
            wanted_of = {name: (norm, expected)}
            if name == "frozen tower":
                wanted_of["goes on"] = (again, then)
            for key, (right, weights) in wanted_of.items():
                told_norm, found = rank[key]
                assert told_norm == pytest.approx(right, abs=MARGIN), key
                for weight, value in found.items():
                    torch.testing.assert_close(value, weights[weight], atol=2e-5, rtol=0, msg=f"{key} {weight}")
        if name == "adapter and tower":
            patches = "model.visual.patch_embed.proj.weight"
            assert not torch.equal(expected[patches], load_file(Path(folder) / "model.safetensors")[patches])
        if name.startswith("adapter"):
            whole = AutoModelForImageTextToText.from_pretrained(folder)
            read: Any = PeftModel.from_pretrained(whole, str(tmp_path / "out" / name / "model" / "adapter"))
            of_layers = {in_memory(key): value for key, value in expected.items()}
            merged = read.merge_and_unload().state_dict()
            for key, value in of_layers.items():
                torch.testing.assert_close(merged[key], value, atol=2e-5, rtol=0, msg=key)
    out = tmp_path / "out" / "frozen tower" / "model"
    before, after = (load_file(Path(one) / "model.safetensors") for one in (folder, out))
    assert before.keys() == after.keys()
    stays = {name for name in before if "visual" in name and "merger" not in name}
    assert {name for name, weight in before.items() if torch.equal(weight, after[name])} == stays
    AutoModelForImageTextToText.from_pretrained(out)
    assert (out / "preprocessor_config.json").is_file()


ASKED: dict[str, Any] = {"role": "user", "content": "<image>How many?"}
SEEN: list[dict[str, Any]] = [{"prompt": [ASKED], "images": [png(k)]} for k in range(4)]
RUNS: dict[str, dict[str, Any]] = {
    "sft": {"dataset": ROWS, "max_length": None, "shuffle_dataset": False},
    "dpo": {"dataset": PAIRS, "max_length": None, "eval_dataset": None},
    "classification": {
        "dataset": [{"messages": [ASKED], "images": [png(k)], "label": k % 3} for k in range(4)],
        "eval_dataset": None,
        "max_length": None,
        "num_labels": 3,
        "use_chat_template": True,
    },
    "grpo": {"dataset": SEEN, "eval_dataset": None, "rollout_engine": "hf", "num_iterations": 1},
    "gkd": {
        "dataset": [row | {"completion": [{"role": "assistant", "content": "one"}]} for row in SEEN],
        "eval_dataset": None,
        "rollout_engine": "hf",
    },
}


def test_trainers_show_pictures_to_all_models_and_give_the_numbers_of_fsdp(tmp_path: Path) -> None:
    folder, teacher = (save_vision(tmp_path / name, "qwen2_5_vl", seed) for seed, name in enumerate(("one", "two")))
    keys: dict[str, Any] = {"max_steps": 2, "warmup_steps": 0, "adam_epsilon": 1e-3, "freeze_vit": True}
    jobs = []
    for backend, own in (("fsdp", {}), ("megatron", {TP: 2})):
        for name, settings in RUNS.items():
            further = {"teacher_model": teacher} if name == "gkd" else {}
            given = keys | settings | own | further | {"backend": backend, "freeze_aligner": False}
            jobs.append((name, getattr(runs, f"{name}_config")(folder, tmp_path / f"{name} {backend}", **given)))
    for num_processes, part in ((1, jobs[: len(RUNS)]), (2, jobs[len(RUNS) :])):
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        run_ranks(num_processes, process, num_processes, store.port, part, folder=tmp_path, joined=False)
    for name in RUNS:
        assert_same_run(tmp_path / f"{name} megatron", tmp_path / f"{name} fsdp")


def test_a_first_stage_has_the_layers_that_features_are_added_behind(tmp_path: Path) -> None:
    folder = Path(save_vision(tmp_path, "qwen3_vl", num_hidden_layers=8))
    fields = json.loads((folder / "config.json").read_text())
    fields["vision_config"]["deepstack_visual_indexes"] = [0, 1, 2]
    (folder / "config.json").write_text(json.dumps(fields))
    config: Any = SimpleNamespace(trust_remote_code=False, dtype="float32")
    words = (
        "adds features after the first 3 layers, but the first pipeline stage has 2.*decoder_first_pipeline_num_layers"
    )
    for layout, is_right in (({PP: 4}, False), ({PP: 2}, True), ({PP: 2, VPP: 2}, False), ({PP: 2, FIRST: 3}, True)):
        refused: Any = contextlib.nullcontext() if is_right else pytest.raises(ConfigError, match=words)
        with refused:
            check_model(config, "default", str(folder), MegatronSettings(**layout), None)
