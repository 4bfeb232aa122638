"""LoRA on the megatron backend, in every way of cutting a model, against peft's on the model in one process."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rayhelper import ConfigError
from tests import megatron_on_cpu
from tests.backends.batches import samples_of, weighted_loss
from tests.backends.ranks import run_ranks
from tests.backends.test_megatron import (
    CP,
    EP,
    ETP,
    FAMILIES,
    FIRST,
    FULL,
    GROUPED,
    IDLE,
    MICRO,
    MOE_ACT,
    OVERLAP,
    PLAIN,
    PP,
    SP,
    STEPS,
    TP,
    TRAINING,
    VPP,
    WHOLE,
    Layout,
    save,
    told,
    with_idle_experts,
)
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.megatron.adapter_targets import STACKS, chosen_targets

Lora = dict[str, Any]
FILE = "adapter_model.safetensors"
ALL: Lora = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
SOME: Lora = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}
SOME |= {"use_rslora": True, "modules_to_save": ["embed_tokens", "lm_head"]}
ATTENTION: Lora = {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
ATTENTION |= {"target_parameters": ["mlp.gate.weight"]}
SHARED: Lora = {"r": 4, "target_modules": ["k_proj", *(f"shared_expert.{x}_proj" for x in ("gate", "up", "down"))]}
NAMED: Lora = {"r": 3, "lora_alpha": 6, "use_rslora": True}
NAMED |= {"target_modules": ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}
STACKED: Lora = {"r": 4, "target_modules": [], "target_parameters": list(STACKS)}
# By family, adapter and number of ranks, which start once for all layouts
CASES: list[tuple[str, Lora, int, list[Layout]]] = [
    ("qwen2", ALL, 1, [{}]),
    ("qwen2", ALL, 2, [{TP: 2} | WHOLE | PLAIN, {PP: 2, FIRST: 3}, OVERLAP]),
    ("qwen3", SOME, 2, [{TP: 2} | SP | PLAIN, {PP: 2, VPP: 2} | FULL, {CP: 2} | PLAIN]),
    ("qwen3", ALL, 4, [{TP: 2} | SP | OVERLAP]),
    ("qwen3_moe", ATTENTION, 2, [{EP: 2}, {TP: 2} | SP | PLAIN]),
    ("qwen2_moe", SHARED, 2, [{EP: 2}, {TP: 2} | SP | PLAIN]),
    ("qwen3_moe", STACKED, 2, [{EP: 2} | FULL, {CP: 2} | PLAIN]),
    ("qwen3_moe", NAMED, 2, [{EP: 2} | GROUPED, {PP: 2} | PLAIN, {TP: 2} | SP]),
    (
        "qwen2_moe",
        STACKED | {"target_modules": ["k_proj", "shared_expert.up_proj"], "use_rslora": True},
        4,
        [
            {CP: 2, EP: 2, "moe_layer_recompute": True} | PLAIN,
            {TP: 2, EP: 2, ETP: 1} | SP | GROUPED | MOE_ACT | OVERLAP,
        ],
    ),
]


def begin(folder: Path, lora: Lora) -> tuple[FsdpBackend, Path]:
    """A backend with peft's adapter, whose B is not zero, and the checkpoint of it."""
    backend = FsdpBackend(folder, lora=lora, **TRAINING)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in backend.module.named_parameters():
            if ".lora_B." in name:
                weight.add_(0.1 * torch.randn_like(weight))
    start = folder / f"start-{len(list(folder.iterdir()))}"
    backend.save(start)
    return backend, start


def found_by(backend: Any, samples: Any) -> dict[str, Any]:
    """What the backend finds, and how it learns from ``samples``."""
    without = {"micro_batch_size": len(samples_of()), "adapter": False}
    logps, entropies = backend.token_scores(samples, **without)
    scores = {
        "logps": backend.token_logps(samples, micro_batch_size=4).values,
        "logps without": logps.values,
        "entropies without": entropies.values,
        "top logps without": backend.top_logps(samples, 3, **without)[1].values,
    }
    features = backend.target_features(samples, adapter=False).numpy()
    loss = partial(weighted_loss, float(samples_of().target_mask.values.sum()))
    steps = [backend.step(samples, loss, micro_batch_size=MICRO).values() for _ in range(STEPS)]
    again = backend.token_logps(samples, **without).values
    return {
        "scores": scores,
        "features without": features,
        "moved": float(np.abs(again - scores["logps without"]).max(initial=0.0)),
        "losses": [step.get("loss", 0.0) for step in steps],
        "norms": [step["grad_norm"] for step in steps],
        "adapter": {name: weight.clone() for name, weight in backend.adapter_weights()},
        "weights": {name: weight.clone() for name, weight in backend.named_weights()},
        "trained": {name for name, _ in backend.named_weights(trained_only=True)},
    }


def built(folder: Path, lora: Lora, layout: Layout, **settings: Any) -> Any:
    from trainers.backends.megatron.backend import MegatronBackend
    from trainers.backends.megatron.settings import MegatronSettings

    return MegatronBackend(folder, settings=MegatronSettings(**layout), lora=lora, **TRAINING | settings)


def largest_spread(backend: Any) -> float:
    """How far workers are apart in those weights of which all of them have the same ones."""
    from megatron.core import parallel_state

    spread = 0.0
    tensor = parallel_state.get_tensor_model_parallel_group()
    data = parallel_state.get_data_parallel_group(with_context_parallel=True)
    of_experts = parallel_state.get_expert_data_parallel_group()
    for weight in (weight for stage in backend.stages for weight in stage.parameters() if weight.requires_grad):
        groups = {"data": data if getattr(weight, "allreduce", True) else of_experts, "tensor": tensor}
        groups["expert"] = parallel_state.get_expert_tensor_parallel_group()
        has_same = {"data"} if getattr(weight, "tensor_model_parallel", False) else {"data", "tensor"}
        if hasattr(weight, "shared"):
            has_same.add("expert")
        for kind, group in groups.items():
            if kind in has_same:
                copies = [torch.empty_like(weight) for _ in range(group.size())]
                dist.all_gather(copies, weight.detach(), group=group)
                spread = max(spread, *(float((one - copies[0]).detach().abs().max()) for one in copies))
    return spread


def one(folder: Path, start: Path, lora: Lora, layout: Layout, export: Path) -> dict[str, Any]:
    backend = built(folder, lora, layout)
    drawn = {name: weight.clone() for name, weight in backend.adapter_weights()}
    backend.load_adapter(start)
    index, count, leader = backend.shard
    samples = samples_of()
    mine = samples[np.array_split(np.arange(len(samples)), count)[index]]
    found = found_by(backend, mine)
    backend.export(export)
    trained = [weight for stage in backend.stages for weight in stage.parameters() if weight.requires_grad]
    frozen = [weight for stage in backend.stages for weight in stage.parameters() if not weight.requires_grad]
    return found | {
        "index": index,
        "leader": leader,
        "drawn": drawn,
        "spread": largest_spread(backend),
        "frozen with a gradient": [hasattr(weight, "main_grad") or weight.grad is not None for weight in frozen],
        "num buffered": sum(
            len(buffer.params)
            for chunk in backend.chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ),
        "num trained": len(trained),
    }


def of_layouts(rank: int, folder: Path, start: Path, lora: Lora, layouts: list[Layout], export: Path) -> list[Any]:
    megatron_on_cpu.install()
    found = []
    for k, layout in enumerate(layouts):
        found.append(one(folder, start, lora, layout, export / str(k)))
        megatron_on_cpu.end_groups()
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: save(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


@pytest.mark.parametrize(
    ("family", "lora", "num_ranks", "layouts"), CASES, ids=[f"{case[0]}-{case[2]}-{k}" for k, case in enumerate(CASES)]
)
def test_an_adapter_of_a_model_in_parts_is_pefts(
    family: str, lora: Lora, num_ranks: int, layouts: list[Layout], folders: dict[str, Path], tmp_path: Path
) -> None:
    backend, start = begin(folders[family], lora)
    right = found_by(backend, samples_of())
    backend.save(tmp_path / "right")
    arguments = (folders[family], start, lora, layouts, tmp_path)
    ranks = run_ranks(num_ranks, of_layouts, *arguments, folder=tmp_path)
    for k, layout in enumerate(layouts):
        compare([rank[k] for rank in ranks], right, told(layout))
        compare_folders(folders[family], tmp_path / str(k), tmp_path / "right", right["weights"])
    drawn = dict(FsdpBackend(folders[family], lora=lora, **TRAINING).adapter_weights())
    for rank in ranks:  # however the model is cut
        for found in rank:
            check_drawn(found["drawn"], drawn)


def test_experts_and_workers_may_have_no_tokens(tmp_path: Path) -> None:
    folder = with_idle_experts(save("qwen3_moe", tmp_path))
    backend, start = begin(folder, NAMED)
    right = found_by(backend, samples_of())
    ranks = run_ranks(2, of_layouts, folder, start, NAMED, IDLE, tmp_path, folder=tmp_path)
    for k, layout in enumerate(IDLE):
        compare([rank[k] for rank in ranks], right, told(layout))


def compare(ranks: list[dict[str, Any]], right: dict[str, Any], case: str) -> None:
    leaders = sorted((rank for rank in ranks if rank["leader"]), key=lambda rank: rank["index"])
    for name, values in right["scores"].items():
        found = np.concatenate([rank["scores"][name] for rank in leaders])
        np.testing.assert_allclose(found, values, atol=1e-5, err_msg=f"{case}: {name}")
    features = np.concatenate([rank["features without"] for rank in leaders])
    np.testing.assert_allclose(features, right["features without"], atol=1e-5, err_msg=f"{case}: features")
    losses = np.sum([rank["losses"] for rank in leaders], 0)
    np.testing.assert_allclose(losses, right["losses"], atol=1e-5, err_msg=f"{case}: losses")
    assert np.ptp(losses) > 1e-3, "the adapter learns"
    for rank in ranks:
        np.testing.assert_allclose(rank["norms"], right["norms"], rtol=1e-5, err_msg=f"{case}: norms of gradients")
        assert rank["moved"] == 0.0, f"{case}: the model without its adapter"
        assert rank["spread"] == 0.0, f"{case}: what workers have the same of"
        assert not any(rank["frozen with a gradient"]), case
        assert rank["num buffered"] == rank["num trained"] > 0, case
        assert rank["trained"] == right["trained"], case
        assert list(rank["adapter"]) == list(ranks[0]["adapter"]), f"{case}: one sequence on every worker"
        for kind in ("adapter", "weights"):
            assert rank[kind].keys() == right[kind].keys(), f"{case}: names"
            for name, value in right[kind].items():
                np.testing.assert_allclose(rank[kind][name], value, atol=1e-5, err_msg=f"{case}: {kind} of {name}")


def compare_folders(base: Path, exported: Path, right: Path, weights: dict[str, torch.Tensor]) -> None:
    """The exported model is the merged one, and peft reads the adapter beside it."""
    from peft import PeftModel

    adapter, wanted = load_file(exported / "adapter" / FILE), load_file(right / FILE)
    assert adapter.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(adapter[name], value, atol=1e-5, err_msg=name)
    merged = load_file(exported / "model.safetensors")
    for name, value in weights.items():
        np.testing.assert_allclose(merged[name], value, atol=1e-5, err_msg=name)
    ids = torch.tensor([[5, 9, 40, 7, 100]])
    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), exported / "adapter")
    logits = AutoModelForCausalLM.from_pretrained(exported)(ids).logits
    torch.testing.assert_close(model(ids).logits, logits, atol=1e-5, rtol=0)


def check_drawn(drawn: dict[str, torch.Tensor], first: dict[str, torch.Tensor]) -> None:
    """B is zero; A is uniform within 1 / sqrt(width of the input), as a linear layer is drawn."""
    assert drawn.keys() == first.keys()
    for name, weight in drawn.items():
        assert torch.equal(weight, first[name]), name
        if ".lora_B." in name:
            assert not weight.any()
        else:
            scaled = weight * weight.shape[1] ** 0.5
            assert float(scaled.abs().max()) <= 1.0
            assert float(scaled.std()) == pytest.approx(3**-0.5, rel=0.25)
    in_all = [weight.flatten()[:3].tolist() for name, weight in drawn.items() if ".lora_A." in name]
    assert len({tuple(values) for values in in_all}) == len(in_all), "every layer is drawn anew"


def of_values(rank: int, folder: Path, start: Path, export: Path) -> bool:
    """Whether this worker has a value head, which is trained; the adapter is read and written."""
    from trainers.backends.megatron import layout
    from trainers.backends.megatron.adapters import MegatronAdapter
    from trainers.backends.megatron.model import build_stages
    from trainers.backends.megatron.settings import MegatronSettings

    megatron_on_cpu.install()
    settings = MegatronSettings(pipeline_model_parallel_size=2)
    layout.start(settings, seed=0)
    config = AutoConfig.from_pretrained(folder)
    stages = build_stages(config, settings, head="value", dtype=torch.float32, device=torch.device("cpu"))
    adapter = MegatronAdapter(config, stages, ALL, value_head=True, seed=0)
    adapter.load(start)
    adapter.save(export)
    values = stages[-1].values
    return values is not None and values.weight.requires_grad


def test_the_head_of_a_value_model_is_trained_whole_and_kept_with_the_adapter(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    right = FsdpBackend(folders["llama"], head="value", lora=ALL, **TRAINING)
    right.save(tmp_path / "right")
    arguments = (folders["llama"], tmp_path / "right", tmp_path / "found")
    assert run_ranks(2, of_values, *arguments, folder=tmp_path) == [False, True]
    found, wanted = (load_file(tmp_path / name / FILE) for name in ("found", "right"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("found", "right")]
    assert configs[0]["modules_to_save"] == ["score"]
    for field in ("task_type", "r", "lora_alpha", "base_model_name_or_path"):
        assert configs[0][field] == configs[1][field]
    assert sorted(configs[0]["target_modules"]) == sorted(configs[1]["target_modules"])


def in_bfloat16(rank: int, folder: Path, start: Path, lora: Lora, layouts: list[Layout]) -> list[Any]:
    megatron_on_cpu.install()
    found = []
    for layout in layouts:
        backend = built(folder, lora, layout, dtype="bfloat16")
        backend.load_adapter(start)
        loss = partial(weighted_loss, float(samples_of().target_mask.values.sum()))
        losses = [backend.step(samples_of(), loss, micro_batch_size=MICRO).values().get("loss") for _ in range(STEPS)]
        kinds = {weight.dtype for stage in backend.stages for weight in stage.parameters() if weight.requires_grad}
        frozen = {weight.dtype for stage in backend.stages for weight in stage.parameters() if not weight.requires_grad}
        adapter = {name: weight.clone() for name, weight in backend.adapter_weights()}
        found.append((losses, kinds, frozen, adapter, {weight.dtype for _, weight in backend.named_weights()}))
        megatron_on_cpu.end_groups()
    return found


@pytest.mark.parametrize(
    ("family", "lora", "layouts"),
    [("llama", ALL, [{TP: 2} | SP, {TP: 2} | PLAIN]), ("qwen3_moe", NAMED, [{TP: 2} | SP | GROUPED])],
    ids=["llama", "grouped experts"],
)
def test_beside_a_bfloat16_model_the_adapter_is_float32(
    family: str, lora: Lora, layouts: list[Layout], folders: dict[str, Path], tmp_path: Path
) -> None:
    backend, start = begin(folders[family], lora)
    right = found_by(backend, samples_of())
    for rank in run_ranks(2, in_bfloat16, folders[family], start, lora, layouts, folder=tmp_path):
        for losses, kinds, frozen, adapter, merged in rank:
            np.testing.assert_allclose(losses, right["losses"], atol=0.03)
            assert kinds == {torch.float32}
            assert frozen == merged == {torch.bfloat16}
            for name, value in right["adapter"].items():
                apart = (adapter[name] - value).square().mean().sqrt() / value.square().mean().sqrt()
                assert apart < 0.03, name


def with_dropout(rank: int, folder: Path, layouts: list[Layout]) -> list[Any]:
    megatron_on_cpu.install()
    found = []
    for layout in layouts:
        of_rate: list[Any] = []
        for rate in (0.0, 0.5):
            backend = built(folder, ALL | {"lora_dropout": rate}, layout)
            loss = partial(weighted_loss, float(samples_of().target_mask.values.sum()))
            losses = [backend.step(samples_of(), loss, micro_batch_size=8).values()["loss"] for _ in range(STEPS)]
            scores = [backend.token_logps(samples_of(), micro_batch_size=8).values for _ in range(2)]
            of_rate.append((losses, largest_spread(backend), np.array_equal(*scores)))
        attention = backend.stages[0].decoder.layers[0].self_attention
        ones = torch.ones(16, 1, 16)
        of_rate.append([one.low_rank._dropped(ones) for one in (attention.linear_qkv, attention.linear_proj)])
        found.append(of_rate)
        megatron_on_cpu.end_groups()
    return found


def test_dropout_is_of_training_alone_and_keeps_workers_equal(folders: dict[str, Path], tmp_path: Path) -> None:
    ranks = run_ranks(2, with_dropout, folders["llama"], [{TP: 2} | WHOLE, {TP: 2} | SP], folder=tmp_path)
    for rank in ranks:
        for (losses, *_), (dropped, spread, is_repeatable), _ in rank:
            assert dropped[0] == pytest.approx(losses[0]), "B is zero at first"
            assert abs(dropped[-1] - losses[-1]) > 1e-4
            assert spread == 0.0
            assert is_repeatable
    for k, (whole, cut) in enumerate(zip(*(rank[k][2] for rank in ranks), strict=True) for k in range(2)):
        assert torch.equal(*whole) == (k == 0), "one input is dropped alike, tokens of each worker's own are not"
        assert not torch.equal(*cut), "channels of each worker's own are not dropped alike"


REFUSED: dict[str, tuple[str, Lora, int, str]] = {
    "field": ("llama", {"use_dora": True}, 1, "use_dora.*lora_alpha"),
    "pattern": ("llama", {"target_modules": ".*_proj"}, 1, "not a pattern"),
    "head": ("llama", {"target_modules": ["q_proj", "lm_head"]}, 1, "lm_head.*down_proj.*q_proj"),
    "experts": ("qwen2_moe", {"target_modules": ["up_proj"]}, 1, r"experts also have.*shared_expert\.up.*target_param"),
    "some": (
        "qwen3_moe",
        {"target_modules": ["mlp.up_proj", "q_proj"]},
        1,
        r"not \['gate_proj', 'down_proj'\]. Write all",
    ),
    "one": ("qwen2_moe", {"target_parameters": [STACKS[0]]}, 1, "Write both"),
    "stack": (
        "qwen3_moe",
        {"target_parameters": ["mlp.gate"]},
        1,
        "'mlp.gate'.*accepts.*mlp.gate.weight.*gate_up_proj",
    ),
    "no experts": ("qwen3", {"target_parameters": list(STACKS)}, 1, "this qwen3 model has none"),
    "dropout": ("qwen3_moe", {"target_parameters": list(STACKS), "lora_dropout": 0.1}, 1, "lora_dropout: 0"),
    "dense layers": ("qwen3_moe", {"target_modules": [], "target_parameters": list(STACKS)}, 2, r"\[2\].*every layer"),
    "routers": ("qwen3_moe", {"target_modules": ["all-linear", "all-router"]}, 1, r"\['all-router'\].*only all-linear"),
    "router": ("qwen3_moe", {"target_modules": ["gate"]}, 1, "only these layers"),
    "stages": ("qwen2_moe", {"target_modules": ["shared_expert.up_proj"]}, 2, r"\[2\].*every layer"),
}


def config_of(family: str) -> Any:
    return AutoConfig.for_model(family, **FAMILIES[family] | {"num_hidden_layers": 4, "mlp_only_layers": [2]})


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_have_no_adapter_is_refused_with_what_can(case: str) -> None:
    family, lora, num_stages, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        chosen_targets(config_of(family), lora, num_stages=num_stages)


@pytest.mark.parametrize(("family", "num_targets"), [("qwen3", 7 * 4), ("qwen3_moe", 4 * 4), ("qwen2_moe", 7 * 4)])
def test_all_linear_is_what_is_not_in_experts(family: str, num_targets: int) -> None:
    names = chosen_targets(config_of(family), {"target_modules": ["all-linear"]})
    assert len(names) == num_targets
    assert not any(".experts." in name for name in names)


def test_an_adapter_of_other_layers_is_not_loaded(folders: dict[str, Path], tmp_path: Path) -> None:
    _, start = begin(folders["llama"], SOME)
    for rank in run_ranks(1, refusals, folders["llama"], start, folder=tmp_path):
        assert "other weights" in rank[0]
        assert "LoRA" in rank[1]
        assert "adapter merged" in rank[2]


def refusals(rank: int, folder: Path, start: Path) -> list[str]:
    megatron_on_cpu.install()
    backend = built(folder, ALL, {})
    with pytest.raises(ValueError, match="other weights") as other:
        backend.load_adapter(start)
    with pytest.raises(FileNotFoundError) as missing:
        backend.load_adapter(folder)
    with pytest.raises(ValueError, match="merged") as given:
        backend.load_weights(backend.named_weights())
    return [str(error.value) for error in (other, missing, given)]


# Checkpoints


def resumed(rank: int, folder: Path, lora: Lora, layouts: list[Layout], saved: Path) -> list[tuple[Any, list[float]]]:
    """The losses of two steps after a checkpoint: of the run that wrote it, then of each layout that reads it."""
    megatron_on_cpu.install()
    found = []
    for k, layout in enumerate([layouts[0], *layouts]):
        backend = built(folder, lora, layout)
        index, count, leader = backend.shard
        samples = samples_of()
        mine = samples[np.array_split(np.arange(len(samples)), count)[index]]
        loss = partial(weighted_loss, float(samples.target_mask.values.sum()))

        def steps(number: int, backend: Any = backend, mine: Any = mine, loss: Any = loss) -> list[float]:
            taken = [backend.step(mine, loss, micro_batch_size=MICRO).values() for _ in range(number)]
            return [step.get("loss", 0.0) for step in taken]

        if k == 0:
            steps(1)
            backend.save(saved)
        else:
            backend.load(saved)
        found.append((leader, steps(2)))
        megatron_on_cpu.end_groups()
    return found


DENSE_LAYOUTS: list[Layout] = [{TP: 2, PP: 2} | SP, {}, {TP: 4} | PLAIN]
EXPERT_LAYOUTS: list[Layout] = [{PP: 2, EP: 2}, {EP: 2, ETP: 2} | GROUPED, {TP: 2, EP: 2} | SP | PLAIN]


@pytest.mark.parametrize(
    ("family", "lora", "layouts"),
    [("qwen3", SOME, DENSE_LAYOUTS), ("qwen2_moe", STACKED, EXPERT_LAYOUTS)],
    ids=["some", "experts"],
)
def test_a_run_with_an_adapter_goes_on_in_any_layout(
    family: str, lora: Lora, layouts: list[Layout], tmp_path: Path
) -> None:
    model = save(family, tmp_path, num_hidden_layers=2)
    ranks = run_ranks(4, resumed, model, lora, layouts, tmp_path / "saved", folder=tmp_path)
    written, *read = (np.sum([rank[k][1] for rank in ranks if rank[k][0]], 0) for k in range(len(layouts) + 1))
    np.testing.assert_array_equal(read[0], written)
    for layout, losses in zip(layouts, read, strict=True):
        np.testing.assert_allclose(losses, written, atol=1e-6, err_msg=told(layout))
    assert abs(written[0] - written[1]) > 1e-3, "a step changes the loss"
    assert not (tmp_path / "saved" / "model.safetensors").exists(), "the adapter alone"
