"""Whole SFT runs on rows with pictures: in files, off and over workers, with parts frozen, saved and loaded."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from benchmarks.tiny.vision import MODELS, picture, png, save_vision
from rayhelper import ConfigError, RayHelper
from tests.conftest import RaySession, without_runtime
from tests.e2e.runs import final_bytes, final_weights, lines, sft_config, together
from tests.images.test_sft import turns
from trainers.backends.fsdp.vision.parts import part_of
from trainers.data.images.processor import load_processor
from trainers.sft.trainer import SFTTrainer

PROCESSOR = ("preprocessor_config.json", "processor_config.json", "chat_template.jinja", "tokenizer.json")
KEYS: dict[str, Any] = {"num_train_epochs": 1, "max_steps": 3, "warmup_steps": 0, "max_length": None}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_vision(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of twelve rows beside a folder of its pictures: none, one or two in a row; one step has none at all."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "pictures").mkdir()
    rows = []
    for k in range(12):
        names = [f"pictures/{number}.png" for number in range(k, k + (0, 1, 2)[k % 3])] if k < 8 else []
        for name in names:
            (folder / name).write_bytes(png(int(Path(name).stem)))
        rows.append(
            {"messages": turns("<image>" * len(names) + f"How many in {k}?", "some" * (1 + k % 4)), "images": names}
        )
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def trained(model: str, folder: Path, data: Any, **keys: Any) -> SFTTrainer:
    trainer = SFTTrainer(sft_config(model, folder, **{**KEYS, "shuffle_dataset": False, "dataset": str(data), **keys}))
    trainer.train()
    return trainer


def test_a_run_is_the_same_off_in_a_worker_and_over_two_workers(
    model: str, data: Path, tmp_path: Path, ray_session: RaySession
) -> None:
    with without_runtime():
        trained(model, tmp_path / "off", data)
    with RayHelper.session(together(1), runtime="inprocess"):
        trained(model, tmp_path / "inprocess", data)
    with ray_session(together(1)):
        trained(model, tmp_path / "ray", data)
    for place in ("inprocess", "ray"):
        assert lines(tmp_path / place) == lines(tmp_path / "off")
        assert final_bytes(tmp_path / place) == final_bytes(tmp_path / "off")
    with ray_session(together(2)):  # weights in shards: below
        trained(model, tmp_path / "two", data, fsdp_sharding_strategy="no_shard", adam_epsilon=1e-4)
    with without_runtime():
        trained(model, tmp_path / "alone", data, adam_epsilon=1e-4)
    for found, wanted in zip(lines(tmp_path / "two"), lines(tmp_path / "alone"), strict=True):
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    alone = final_weights(tmp_path / "alone")
    for name, weight in final_weights(tmp_path / "two").items():
        torch.testing.assert_close(weight, alone[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_what_is_written_is_the_whole_model_with_its_processor(model: str, data: Path, tmp_path: Path) -> None:
    trained(model, tmp_path, data, freeze_vit=True, freeze_aligner=True)
    final = tmp_path / "final"
    before, after = load_file(Path(model) / "model.safetensors"), load_file(final / "model.safetensors")
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert torch.equal(weight, after[name]) == ("visual" in name), name
    loaded = AutoModelForImageTextToText.from_pretrained(final)
    for name in PROCESSOR:
        assert (final / name).is_file(), name
    one, other = (
        load_processor(str(folder))(text=["<|image_pad|>?"], images=[[picture(1)]], return_tensors="pt")
        for folder in (model, final)
    )
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    with torch.no_grad():
        assert bool(loaded(**other).logits.isfinite().all())


@pytest.mark.parametrize("frozen", [{"vit"}, {"aligner"}, {"llm"}, {"vit", "llm"}, set()])
def test_frozen_parts_stay_and_all_others_learn(frozen: set[str], model: str, data: Path, tmp_path: Path) -> None:
    keys = {f"freeze_{part}": part in frozen for part in ("vit", "aligner", "llm")}
    trained(model, tmp_path, data, **keys)
    before, after = (
        dict(AutoModelForImageTextToText.from_pretrained(f).named_parameters()) for f in (model, tmp_path / "final")
    )
    parts = part_of(AutoModelForImageTextToText.from_pretrained(model))
    for part in ("vit", "aligner", "llm"):
        of_part = {name for name, found in parts.items() if found == part}
        moved = {name for name in of_part if not torch.equal(before[name], after[name])}
        assert not moved if part in frozen else len(moved) > 0.9 * len(of_part), part


def test_parts_have_learning_rates_of_their_own(model: str, data: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"max_steps": 1, "optim": "sgd", "weight_decay": 0.0, "max_grad_norm": 0.0}
    moved = {}
    for name, rates in {"one": {}, "own": {"vit_lr": 6e-3, "aligner_lr": 0.0}}.items():
        trained(model, tmp_path / name, data, lr_scheduler_type="constant", **keys, **rates)
        before, after = load_file(Path(model) / "model.safetensors"), final_weights(tmp_path / name)
        moved[name] = {n: after[n] - weight for n, weight in before.items()}
    for name, step in moved["own"].items():
        factor = 0.0 if "merger" in name else 2.0 if "visual" in name else 1.0
        torch.testing.assert_close(step, factor * moved["one"][name], rtol=1e-3, atol=1e-6)


def test_an_adapter_is_of_the_language_model_alone_unless_the_tower_is_unfrozen(
    model: str, data: Path, tmp_path: Path
) -> None:
    lora: dict[str, Any] = {"tuner_type": "lora", "lora_rank": 2}
    trained(model, tmp_path / "lora", data, **lora)
    names = load_file(tmp_path / "lora" / "final" / "adapter" / "adapter_model.safetensors").keys()
    assert names
    assert all("language_model" in name for name in names)
    before, after = load_file(Path(model) / "model.safetensors"), final_weights(tmp_path / "lora")
    assert before.keys() == after.keys()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items() if "visual" in name)
    trained(model, tmp_path / "both", data, **lora, freeze_vit=False)
    names = load_file(tmp_path / "both" / "final" / "adapter" / "adapter_model.safetensors").keys()
    assert any("visual.blocks" in name for name in names)
    assert not any("merger" in name for name in names)


def test_what_sees_learns_whole_beside_an_adapter_of_the_language_model(model: str, data: Path, tmp_path: Path) -> None:
    """Its step is that of a run without adapter, the adapter's that of a run with frozen tower; peft reads both."""
    lora: dict[str, Any] = {"tuner_type": "lora", "lora_rank": 2}
    whole: dict[str, Any] = {**lora, "lora_kwargs": {"modules_to_save": ["vit", "aligner"]}}
    one: dict[str, Any] = {"max_steps": 1, "optim": "sgd", "weight_decay": 0.0, "max_grad_norm": 0.0}
    one |= {"lr_scheduler_type": "constant", "learning_rate": 0.1}
    trained(model, tmp_path / "full", data, freeze_llm=True, **one)
    trained(model, tmp_path / "lora", data, **lora, **one)
    trained(model, tmp_path / "both", data, **whole, **one)
    before = load_file(Path(model) / "model.safetensors")
    full, both = map(final_weights, (tmp_path / "full", tmp_path / "both"))
    seeing = [name for name in before if "visual" in name]
    assert sum(not torch.equal(before[name], both[name]) for name in seeing) > 0.9 * len(seeing)
    for name in seeing:
        torch.testing.assert_close(both[name], full[name], rtol=1e-4, atol=1e-6)
    adapters = [tmp_path / name / "final" / "adapter" for name in ("lora", "both")]
    alone, beside = (load_file(folder / "adapter_model.safetensors") for folder in adapters)
    assert alone.keys() == {name for name in beside if ".lora_" in name}
    for name, weight in alone.items():
        torch.testing.assert_close(beside[name], weight, rtol=1e-4, atol=1e-6)
    merged = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(model), adapters[1])
    known = merged.merge_and_unload().state_dict()
    for name, weight in AutoModelForImageTextToText.from_pretrained(tmp_path / "both" / "final").state_dict().items():
        torch.testing.assert_close(weight, known[name], rtol=1e-4, atol=1e-6)


def test_a_resumed_run_is_the_run_that_was_not_interrupted(model: str, data: Path, tmp_path: Path) -> None:
    trained(model, tmp_path / "whole", data, save_steps=1)
    folder = tmp_path / "whole" / "checkpoint-1"
    assert folder.is_dir()
    trained(model, tmp_path / "resumed", data, resume_from_checkpoint=str(folder))
    assert final_bytes(tmp_path / "resumed") == final_bytes(tmp_path / "whole")


def written(number: int) -> dict[str, Any]:
    return {"type": "image", "image": base64.b64encode(png(number)).decode()}


FORMS: dict[str, Any] = {
    "bytes": lambda folder: ("<image>What?", [png(0)]),
    "mapping": lambda folder: ("<image>What?", [{"bytes": png(0), "path": None}]),
    "pil": lambda folder: ("<image>What?", [picture(0)]),
    "path": lambda folder: ("<image>What?", [str(folder / "0.png")]),
    "unplaced": lambda folder: ("What?", [str(folder / "0.png")]),
    "file": lambda folder: ("<image>What?", [f"file://{folder / '0.png'}"]),
    "data": lambda folder: ("<image>What?", [f"data:image/png;base64,{base64.b64encode(png(0)).decode()}"]),
    "base64": lambda folder: ("<image>What?", [base64.b64encode(png(0)).decode()]),
    "part": lambda folder: ([{"type": "image"}, {"type": "text", "text": "What?"}], [png(0)]),
    "own": lambda folder: (
        [{"type": "image", "image": str(folder / "0.png")}, {"type": "text", "text": "What?"}],
        None,
    ),
    "openai": lambda folder: (
        [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png(0)).decode()}"}},
            {"type": "text", "text": "What?"},
        ],
        None,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_picture_may_be_written_in_any_of_these_ways(form: str, model: str, tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(png(0))
    question, images = FORMS[form](tmp_path)
    row = {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "one"}]}
    row |= {} if images is None else {"images": images}
    trainer = SFTTrainer(sft_config(model, tmp_path / "out", dataset=[row], **KEYS))
    expected = SFTTrainer(
        sft_config(
            model, tmp_path / "out", dataset=[{"messages": turns("<image>What?", "one"), "images": [png(0)]}], **KEYS
        )
    )
    assert trainer.sequences.input_ids == expected.sequences.input_ids
    (pictures,) = trainer.sequences.images or [()]
    assert [one.image().tobytes() for one in pictures] == [picture(0).tobytes()]


def test_large_pictures_are_made_smaller(model: str, tmp_path: Path) -> None:
    large = Image.new("RGB", (40, 40), "red")
    row = {"messages": turns("<image>What?", "one"), "images": [large]}
    counts = []
    for limit in (None, 16 * 16):
        trainer = SFTTrainer(sft_config(model, tmp_path, dataset=[row], max_pixels=limit, **KEYS))
        counts.append(int((trainer.sequences.input_ids.values == trainer.images.processor.image_token_id).sum()))  # type: ignore[union-attr]
    assert counts == [25, 4]


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"images": ["nowhere.png"]}, "nowhere.png' does not exist"),
    "null": ({"images": [None]}, "a picture of the list is null"),
    "torn": ({"images": [png(0)[:80]]}, "cannot be read"),
    "no picture": ({"images": [b"words\0"]}, "cannot be read"),
    "address": ({"images": ["https://example.org/a.png"]}, "image_urls: true"),
    "too many places": ({"messages": turns("<image><image>", "a"), "images": [png(0)]}, "1 images and 2 places"),
    "no place": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, turns("", "a")[1]]},
        "a place for an image",
    ),
    "sound": ({"messages": [{"role": "user", "content": [{"type": "audio"}]}, turns("", "a")[1]]}, "type 'audio'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_row_whose_picture_is_missing_or_broken_is_told_with_its_number_or_left_out(
    name: str, model: str, tmp_path: Path
) -> None:
    keys, told = BROKEN[name]
    good = {"messages": turns("<image>What?", "one"), "images": [png(0)]}
    rows = [good, {"messages": turns("<image>What?", "one"), "images": None} | keys, good]
    with pytest.raises(ConfigError, match="1 of 3 rows are broken: row 1") as error:
        SFTTrainer(sft_config(model, tmp_path, dataset=rows, **KEYS))
    assert told in str(error.value)
    kept = SFTTrainer(sft_config(model, tmp_path, dataset=rows, skip_broken_rows=True, **KEYS))
    assert len(kept.sequences) == 2


def test_packing_that_cuts_pictures_is_refused(model: str, tmp_path: Path) -> None:
    rows = [{"messages": turns("<image>What?", "one"), "images": [png(0)]}]
    keys = {"packing": True, "packing_strategy": "bfd_split", "max_length": 64}
    with pytest.raises(ConfigError, match=r"bfd_split cuts documents, and pictures with them\. Write bfd"):
        SFTTrainer(sft_config(model, tmp_path, dataset=rows, **KEYS | keys))


def test_a_checkpoint_is_a_model_for_another_run(model: str, data: Path, tmp_path: Path) -> None:
    trained(model, tmp_path / "whole", data, save_steps=1)
    rows = [{"messages": turns("<image>What?", "one"), "images": [png(0)]}]
    checkpoint = str(tmp_path / "whole" / "checkpoint-1")
    again = SFTTrainer(sft_config(checkpoint, tmp_path / "again", dataset=rows, **KEYS))
    assert again.images is not None
    assert again.sequences.images is not None


def test_a_row_that_would_lose_a_part_of_a_picture_is_an_error(model: str, tmp_path: Path) -> None:
    rows = [{"messages": turns("<image>What?", "one"), "images": [png(1)]}]
    with pytest.raises(ConfigError, match="max_length 12 would cut a picture apart"):
        SFTTrainer(sft_config(model, tmp_path, dataset=rows, **KEYS | {"max_length": 12}))
    rows += [{"messages": turns("What?", "one"), "images": []}]
    dropped = SFTTrainer(
        sft_config(model, tmp_path, dataset=rows, **KEYS | {"max_length": 30, "truncation_mode": "drop"})
    )
    assert len(dropped.sequences) == 1


@pytest.mark.parametrize("keys", [{"assistant_only_loss": True}, {"loss_scale": "default"}])
def test_answers_alone_are_learned_behind_pictures(keys: dict[str, Any], model: str, tmp_path: Path) -> None:
    rows = [
        {
            "messages": turns("<image>What?", "one") + turns("and <image><image>?", "two"),
            "images": [png(0), png(1), png(2)],
        }
    ]
    sequences = SFTTrainer(sft_config(model, tmp_path, dataset=rows, **KEYS | keys)).sequences
    learned = sequences.input_ids.values[sequences.target_mask.values]
    processor = load_processor(model)
    assert processor.tokenizer.decode(learned).replace("<|im_end|>\n", "<|im_end|>") == "one<|im_end|>two<|im_end|>"


def test_a_language_model_has_no_picture_to_look_at(tmp_path: Path) -> None:
    from tests.golden.tiny import save_tiny

    language = save_tiny(tmp_path / "model")
    rows = [{"messages": turns("<image>What?", "one"), "images": ["a.png"]}]
    with pytest.raises(ConfigError, match="1 of 1 rows have images, which this run cannot read"):
        SFTTrainer(sft_config(language, tmp_path, dataset=rows, **KEYS))
    with pytest.raises(ConfigError, match="freeze_llm is true, but the model has no vision tower"):
        SFTTrainer.check(sft_config(language, tmp_path, freeze_llm=True), None)
    keys = {"tuner_type": "lora", "lora_kwargs": {"modules_to_save": ["vit", "aligner"]}}
    with pytest.raises(ConfigError, match="modules_to_save has vit, but the model has no vision tower"):
        SFTTrainer.check(sft_config(language, tmp_path, **keys), None)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_written_whole_under_its_own_names(name: str, data: Path, tmp_path: Path) -> None:
    model = Path(save_vision(tmp_path / "model", name))
    before = load_file(model / "model.safetensors")
    if name == "qwen3_5":  # has layers that predict several tokens, of which transformers builds none
        before["mtp.norm.weight"] = torch.randn(32)
        save_file(before, model / "model.safetensors", metadata={"format": "pt"})
    keys: dict[str, Any] = {"freeze_vit": True, "freeze_aligner": True, "max_steps": 1}
    trained(str(model), tmp_path / "out", data, **keys)
    after = load_file(tmp_path / "out" / "final" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[weight], after[weight]) for weight in before if weight.startswith("mtp"))
    parts = part_of(AutoModelForImageTextToText.from_pretrained(model))
    loaded = dict(AutoModelForImageTextToText.from_pretrained(tmp_path / "out" / "final").named_parameters())
    first = dict(AutoModelForImageTextToText.from_pretrained(model).named_parameters())
    for weight, part in parts.items():
        if weight in first:
            assert torch.equal(first[weight], loaded[weight]) == (part != "llm"), weight


BY_TWO = [*((name, "full") for name in MODELS if name not in ("qwen2_5_vl", "qwen3_vl", "gemma3"))]
BY_TWO += [("qwen3_vl", "lora"), ("gemma3", "lora")]


@pytest.mark.parametrize(("name", "tuner"), BY_TWO)
def test_two_workers_of_which_one_has_no_pictures_make_the_step_of_one(
    name: str, tuner: str, tmp_path: Path, ray_session: RaySession
) -> None:
    model = save_vision(tmp_path / "model", name)
    rows = [
        {"messages": turns(f"{'<image>' * (k % 2)}How many in {k}?", "some"), "images": [png(k)] * (k % 2)}
        for k in range(4)
    ]
    keys: dict[str, Any] = {"dataset": rows, "max_steps": 1, "adam_epsilon": 1e-4, "tuner_type": tuner, "lora_rank": 2}
    keys |= {"per_device_train_batch_size": 1, "global_batch_size": 2, "freeze_vit": False, "freeze_aligner": False}
    if tuner == "full":
        del keys["lora_rank"]
    settings = {**KEYS, "shuffle_dataset": False, **keys}
    with without_runtime():
        SFTTrainer(sft_config(model, tmp_path / "alone", **settings)).train()
    with ray_session(together(2)):
        SFTTrainer(sft_config(model, tmp_path / "two", **settings)).train()
    for found, wanted in zip(lines(tmp_path / "two"), lines(tmp_path / "alone"), strict=True):
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    alone, before = final_weights(tmp_path / "alone"), load_file(Path(model) / "model.safetensors")
    assert any(not torch.equal(weight, before[name]) for name, weight in alone.items() if "vis" in name)
    for weight_name, weight in final_weights(tmp_path / "two").items():
        torch.testing.assert_close(
            weight, alone[weight_name], rtol=0, atol=1e-5, msg=lambda m, n=weight_name: f"{n}: {m}"
        )
