"""What a checkpoint has beside the tensors that are trained, and other forms that its tensors may have."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rayhelper import ConfigError
from tests import megatron_on_cpu
from tests.backends.batches import plain_scores, samples_of, weighted_loss
from tests.backends.ranks import run_ranks
from tests.backends.test_megatron import EP, MICRO, PP, SP, TP, TRAINING, Layout, told
from tests.backends.test_megatron_delta_rule import FAMILIES
from trainers.backends.megatron.model_fields import read_config
from trainers.backends.megatron.tensors.stacks import OF_EXPERT

megatron_on_cpu.take_back()

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 40,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
SEEING = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("model*.safetensors") for name, tensor in load_file(file).items()}


def seeing(kind: str, folder: Path, seed: int = 0, **more: Any) -> Path:
    """A checkpoint of a model that also sees, with a layer that predicts a further token, and experts in stacks."""
    fields = FAMILIES[SEEING[kind]] | more
    tied = {"tie_word_embeddings": fields["tie_word_embeddings"]}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, text_config=fields, vision_config=VISION, **tied)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tensors = tensors_of(folder)
    for name in [name for name in tensors if (found := OF_EXPERT.fullmatch(name)) and found[2] + found[3] == "0down"]:
        experts = name.partition(".experts.")[0] + ".experts"
        own = [
            {part: tensors.pop(f"{experts}.{k}.{part}_proj.weight") for part in ("gate", "up", "down")}
            for k in range(fields["num_experts"])
        ]
        tensors[f"{experts}.gate_up_proj"] = torch.stack([torch.cat([one["gate"], one["up"]]) for one in own])
        tensors[f"{experts}.down_proj"] = torch.stack([one["down"] for one in own])
    tensors |= {"mtp.fc.weight": torch.randn(40, 80).bfloat16(), "mtp.norm.weight": torch.randn(40)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "preprocessor_config.json").write_text('{"patch_size":4}')
    return folder


def exported(rank: int, folder: Path, layouts: list[Layout], out: Path) -> list[np.ndarray]:
    """Log-probabilities; the model is exported as it came, then after a step."""
    from trainers.backends.megatron.backend import MegatronBackend
    from trainers.backends.megatron.settings import MegatronSettings

    megatron_on_cpu.install()
    found = []
    for k, layout in enumerate(layouts):
        backend = MegatronBackend(folder, settings=MegatronSettings(**layout), **TRAINING)
        logps = backend.token_logps(samples_of(), micro_batch_size=3).values
        backend.weights.export(out / f"{k} at first", dtype=torch.float32, max_file_bytes=20_000)
        index, count, _ = backend.shard
        samples = samples_of()
        mine = samples[np.array_split(np.arange(len(samples)), count)[index]]
        backend.step(mine, partial(weighted_loss, 40.0), micro_batch_size=MICRO)
        backend.export(out / f"{k} trained")
        found.append(logps)
        megatron_on_cpu.end_groups()
    return found


CASES: dict[str, list[Layout]] = {
    "qwen3_5": [{TP: 2} | SP, {PP: 2}],
    "qwen3_5_moe": [{EP: 2}, {TP: 2} | SP | {"moe_grouped_gemm": True}, {PP: 2}],
}


@pytest.mark.parametrize("kind", CASES)
def test_a_model_that_also_sees_comes_out_whole(kind: str, tmp_path: Path) -> None:
    folder = seeing(kind, tmp_path / "model")
    with torch.no_grad():
        right = plain_scores(AutoModelForCausalLM.from_pretrained(folder), samples_of())[0]
    layouts = CASES[kind]
    ranks = run_ranks(2, exported, folder, layouts, tmp_path, folder=tmp_path)
    expected = tensors_of(folder)
    assert ("model.language_model.layers.0.mlp.experts.down_proj" in expected) == (kind == "qwen3_5_moe")
    for k, layout in enumerate(layouts):
        for rank in ranks:
            np.testing.assert_allclose(rank[k], right, atol=1e-5, err_msg=told(layout))
        first, trained = (tensors_of(tmp_path / f"{k} {when}") for when in ("at first", "trained"))
        assert first.keys() == trained.keys() == expected.keys(), told(layout)
        for name, value in expected.items():
            assert first[name].dtype == value.dtype, name
            assert torch.equal(first[name], value), f"{told(layout)}: {name}"
            is_kept = name.startswith(("mtp.", "model.visual."))
            if is_kept or value.dim() == 2:  # other weights may move by less than they can show
                assert torch.equal(trained[name], value) == is_kept, f"{told(layout)}: {name}"
        out = tmp_path / f"{k} trained"
        assert (out / "preprocessor_config.json").read_text() == '{"patch_size":4}'
        model = AutoModelForImageTextToText.from_pretrained(out)
        assert type(model).__name__ == json.loads((out / "config.json").read_text())["architectures"][0]
        own = model.state_dict()
        for name, value in trained.items():
            if not name.startswith("mtp."):
                assert torch.equal(own[name], value), name


def test_values_of_a_configuration_are_not_given_to_a_model_of_two(tmp_path: Path) -> None:
    config = AutoConfig.for_model("qwen3_5", text_config=FAMILIES["qwen3_5_text"], vision_config=VISION)
    config.save_pretrained(tmp_path)
    given: dict[str, Any] = {"rms_norm_eps": 1e-4}
    with pytest.raises(ConfigError, match=r"rms_norm_eps.*qwen3_5 is a vision model.*config\.json"):
        read_config(tmp_path, given, trust_remote_code=False)
    assert read_config(tmp_path, {}, trust_remote_code=False).get_text_config().hidden_size == 40
