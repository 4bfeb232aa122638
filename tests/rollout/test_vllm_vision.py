"""What vLLM is told of a model that sees pictures, and where their tokens stand; no engine is started."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from benchmarks.tiny.vision import IN_VLLM, png, save_vision
from rayhelper import ConfigError
from trainers.data.images.pictures import pictures_of
from trainers.data.images.processor import ImageReader
from trainers.parts.fingerprints import fingerprints
from trainers.rollout.vllm.settings import check_model_on_cpu
from trainers.rollout.vllm.vision import features
from trainers.rollout.vllm.vision.left_out import LeftOut, cut_towers
from trainers.rollout.vllm.vision.rotations import IN_BLOCKS, IN_TURNS, rotation_overrides

pytestmark = pytest.mark.xdist_group("vllm")

KINDS = {  # of configurations, by type of the language model
    **{f"{kind}_text": kind for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")},
    **{f"{kind}_text": kind for kind in ("qwen3_5_moe", "glm4v", "glm4v_moe")},
}


def configuration(kind: str, section: tuple[int, ...], **rope: Any) -> Any:
    """Of a model whose heads have as many frequencies as its section has."""
    fields = {"hidden_size": 4 * 2 * sum(section), "num_attention_heads": 4, "head_dim": 2 * sum(section)}
    given = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, **rope}
    return AutoConfig.for_model(kind, text_config={**fields, "rope_parameters": given})


def owners_in_transformers(kind: str, text: Any) -> list[int]:
    """Which position each frequency of transformers' class follows: 0 time, 1 height, 2 width."""
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    name = next(name for name in vars(module) if name.endswith("RotaryEmbedding") and "Vision" not in name)
    rotary = getattr(module, name)(text)
    turned = []
    for owner in range(3):
        positions = torch.zeros(3, 1, 1, dtype=torch.long)
        positions[owner] = 1
        turned.append(rotary(torch.zeros(1), positions)[1].flatten())  # the sine of 0 is 0
    width = len(rotary.inv_freq)
    sines = torch.stack(turned)
    in_pairs = torch.equal(sines[:, ::2], sines[:, 1::2])  # the two numbers of a frequency stand side by side
    return [int(owner) for owner in (sines[:, ::2] if in_pairs else sines[:, :width]).abs().argmax(0)]


def owners_in_vllm(rope: dict[str, Any]) -> list[int]:
    """The same as vLLM reads it from a configuration."""
    from vllm.model_executor.layers.rotary_embedding.mrope import apply_interleaved_rope

    section = rope["mrope_section"]
    owners = torch.arange(3).view(3, 1, 1).expand(3, 1, sum(section)).clone()
    if rope.get("mrope_interleaved", False):
        return [int(owner) for owner in apply_interleaved_rope(owners, section).flatten()]
    return [owner for owner, size in enumerate(section) for _ in range(size)]


@pytest.mark.parametrize("kind", IN_TURNS | IN_BLOCKS)
def test_vllm_rotates_as_transformers_whatever_the_configuration_says(kind: str) -> None:
    default = (IN_TURNS | IN_BLOCKS)[kind]
    other = tuple(size - 1 for size in default)
    for section, rope in (
        (default, {}),
        (default, {"mrope_interleaved": kind in IN_BLOCKS}),  # wrong
        (other, {"mrope_section": list(other)}),
        (other, {"mrope_section": list(other), "mrope_interleaved": True}),
    ):
        found = configuration(KINDS[kind], section, **rope)
        overrides = rotation_overrides(found)
        told = overrides.get("text_config", {}).get("rope_parameters") or found.get_text_config().rope_parameters
        expected = owners_in_transformers(KINDS[kind], found.get_text_config())
        assert len(set(expected)) == 3
        assert owners_in_vllm(told) == expected


def test_overrides_of_the_run_are_kept_and_a_right_configuration_gets_none() -> None:
    right = configuration("qwen3_vl", (24, 20, 20), mrope_section=[24, 20, 20], mrope_interleaved=True)
    assert rotation_overrides(right) == {}
    given = {"architectures": ["Other"], "text_config": {"rms_norm_eps": 1e-5}}
    assert rotation_overrides(right, given) == given
    found = rotation_overrides(configuration("qwen3_vl", (24, 20, 20)), given)
    assert found["architectures"] == ["Other"]
    assert found["text_config"]["rms_norm_eps"] == 1e-5
    assert found["text_config"]["rope_parameters"]["mrope_interleaved"]
    assert given["text_config"] == {"rms_norm_eps": 1e-5}


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "linear", "factor": 2.0}, "rotates qwen3_vl_text with rope_type: linear by one position"),
        ({"mrope_section": [8, 8, 8]}, r"mrope_section .* is \[8, 8, 8\], whose sum is 24, and a head .* has 64"),
    ],
)
def test_rotations_that_vllm_cannot_do_are_refused(
    rope: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "find_spec", lambda name: name)  # as if torchvision were installed here
    with pytest.raises(ConfigError, match=f"{said}.*rollout_engine: hf"):
        features.check_pictures(configuration("qwen3_vl", (24, 20, 20), **rope))


def test_a_kind_with_other_numbers_in_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=r"rollout_engine: vllm gives other numbers for paddleocr_vl .* Write hf"):
        features.check_pictures(AutoConfig.for_model("paddleocr_vl"))


def test_a_package_that_a_kind_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "find_spec", lambda name: None if name == "num2words" else name)
    with pytest.raises(
        ConfigError, match=r"teacher_engine: vllm needs num2words .* pip install num2words, or write hf"
    ):
        features.check_pictures(AutoConfig.for_model("smolvlm"), "teacher_engine")
    features.check_pictures(AutoConfig.for_model("idefics3"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_vision(tmp_path_factory.mktemp("gemma3"), "gemma3", **IN_VLLM["gemma3"])


def test_a_model_whose_pictures_are_attended_to_as_a_whole_is_refused_on_a_cpu(gemma: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vllm cannot run gemma3 on a CPU\. .* Use rollout_engine: hf, or a GPU"):
        check_model_on_cpu(gemma)
    for kind, refused in (("vision", True), (None, False)):
        found = AutoConfig.for_model("gemma4", text_config={"use_bidirectional_attention": kind})
        found.save_pretrained(tmp_path)
        if refused:
            with pytest.raises(ConfigError, match="vllm cannot run gemma4 on a CPU"):
                check_model_on_cpu(tmp_path)
        else:
            check_model_on_cpu(tmp_path)


def engine_of(kind: str, processed: Any) -> Any:
    """What is asked of vLLM's engine; ``processed``: its processor."""
    config = SimpleNamespace(hf_config=SimpleNamespace(model_type=kind))
    processor = SimpleNamespace(process_inputs=processed)
    return SimpleNamespace(get_supported_tasks=tuple, input_processor=processor, model_config=config)


def test_pictures_that_vllm_would_cut_up_where_transformers_does_not_are_refused(gemma: str) -> None:
    engine = engine_of("llava_onevision", None)
    taken = features.Features(engine, gemma, AutoTokenizer.from_pretrained(gemma))
    with pytest.raises(ConfigError, match=r"vLLM cuts every picture .* a prompt has 2. Write rollout_engine: hf"):
        taken.of(pictures_of([png(0), png(1)]), np.zeros(4, np.int64), salt="0")


def placed(model: str, text: str, alone: list[int], embedded: int) -> tuple[list[int], Any]:
    """The tokens of ``text``, which has one picture, and its feature in them.

    ``alone``: the tokens that vLLM's processor gives the picture; ``embedded``: the one that its tower replaces.
    """
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    def processed(*_: Any, **__: Any) -> Any:
        is_embed = torch.tensor([token == embedded for token in alone])
        position = PlaceholderRange(offset=0, length=len(alone), is_embed=is_embed)
        data: Any = SimpleNamespace(get_data=dict)
        feature = MultiModalFeatureSpec(data=data, modality="image", identifier="one", mm_position=position)
        return SimpleNamespace(prompt_token_ids=alone, mm_features=[feature])

    tokenizer = AutoTokenizer.from_pretrained(model)
    reader, pictures = ImageReader(tokenizer, model), pictures_of([png(0)])
    shown, _ = reader.expanded(text.replace("<image>", reader.processor.image_token), pictures)
    ids = tokenizer(shown)["input_ids"]
    (found,) = features.Features(engine_of("any", processed), model, tokenizer).of(pictures, np.array(ids), salt="7")
    return ids, found


def test_tokens_beside_a_picture_may_be_one_with_those_of_the_prompt(gemma: str) -> None:
    """Gemma 3 writes blank lines around a picture, which are one token with those of the text."""
    tokenizer = AutoTokenizer.from_pretrained(gemma)
    start, part, end = (getattr(tokenizer, f"{name}_token_id") for name in ("boi", "image", "eoi"))
    blank = tokenizer.convert_tokens_to_ids("\n\n")
    ids, found = placed(gemma, "Look:\n<image>\nWhat?", [blank, start, *[part] * 4, end, blank], part)
    assert blank not in ids  # three lines are one token
    position = found.mm_position
    assert ids[position.offset : position.offset + position.length] == [part] * 4
    assert (position.offset, position.get_num_embeds()) == (ids.index(part), 4)
    assert found.identifier == "7:one"


def test_tokens_around_a_picture_that_stand_for_it_are_its_own(tmp_path: Path) -> None:
    """InternVL has one before and one behind, which no feature replaces."""
    model = save_vision(tmp_path, "internvl", **IN_VLLM["internvl"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    names = ("start_image_token_id", "context_image_token_id", "end_image_token_id")
    start, part, end = (getattr(tokenizer, name) for name in names)
    alone = [start, *[part] * 12, end]
    ids, found = placed(model, "Look: <image> What?", alone, part)
    position = found.mm_position
    assert ids[position.offset : position.offset + position.length] == alone
    assert position.get_num_embeds() == 12


def test_weights_that_no_tower_reads_have_the_fingerprints_of_what_was_sent() -> None:
    """vLLM builds two of three layers where the model takes the features of the second."""
    tower, whole, model = torch.nn.Module(), torch.nn.Module(), torch.nn.Module()
    for module, num_layers in ((tower, 2), (whole, 3)):
        module.encoder = torch.nn.Module()
        module.encoder.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(num_layers))
        module.post_layernorm = torch.nn.LayerNorm(2) if module is whole else None
    model.vision_tower, model.other_tower = tower, whole
    left_out = LeftOut(cut_towers(model))
    parts = ("encoder.layers.1.weight", "encoder.layers.2.weight", "encoder.layers.2.bias", "post_layernorm.weight")
    weights = {f"model.{tower}.{part}": torch.randn(2) for tower in ("vision_tower", "other_tower") for part in parts}
    for name, weight in weights.items():
        left_out.note(name, weight)
    expected = {name: weights[name] for name in [f"model.vision_tower.{part}" for part in parts[1:]]}
    assert left_out.fingerprints() == fingerprints(expected.items())
