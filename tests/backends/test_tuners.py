"""The tuners beside LoRA: steps, merged weights and files are those of peft, on one rank and over several."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from rayhelper import ConfigError
from rayhelper.planning.adapter import adapter_parameters
from rayhelper.planning.model_shape import ModelShape
from tests.backends.batches import largest_difference, mean_loss, plain_scores, samples_of, weighted_loss
from tests.backends.ranks import run_ranks
from tests.golden.tiny import save_tiny
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.fsdp.tuners.adapters import targets_of
from trainers.backends.fsdp.tuners.kinds import CONFIGS
from trainers.parts.model_checks import check_model_folder
from trainers.sft.config import SFTConfig

FIELDS: dict[str, dict[str, Any]] = {
    "adalora": {"init_r": 4, "target_r": 2, "lora_alpha": 8, "tinit": 1, "tfinal": 1, "orth_reg_weight": 0.5},
    "boft": {"boft_block_size": 4},
    "fourierft": {"n_frequency": 40, "scaling": 100.0},
    "ia3": {},
    "miss": {"r": 5},  # which divides no width of the model
    "vera": {"r": 8, "d_initial": 0.1},
}
LAYERS = [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]
STEPS = 4
STEADY = {"lr_scheduler_type": "constant", "learning_rate": 3e-3, "adam_epsilon": 1e-3, "max_grad_norm": 0.0}


def settings_of(tuner: str, **changed: Any) -> dict[str, Any]:
    lora = {"target_modules": "all-linear", **FIELDS[tuner]}
    return {"num_training_steps": STEPS, **STEADY, "lora": lora, "tuner": tuner, **changed}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With biases in the attention, which IA3 scales too; the output of a head of its own."""
    return save_tiny(tmp_path_factory.mktemp("model"), attention_bias=True)


def weights_of(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in backend.named_weights()}


def step(backend: FsdpBackend, seed: int, rows: slice = slice(None)) -> dict[str, float]:
    return backend.step(samples_of(seed=seed)[rows], partial(mean_loss, 50), micro_batch_size=4).values()


def stepped_by_peft(folder: str, tuner: str, start: dict[str, torch.Tensor]) -> tuple[Any, list[float]]:
    """peft, transformers and torch's AdamW from the weights ``start``; and AdaLoRA's regularizer in each step."""
    import peft

    fields = {"target_modules": LAYERS, **FIELDS[tuner]}
    if tuner == "adalora":
        fields["total_step"] = STEPS
    elif tuner == "ia3":
        fields["feedforward_modules"] = ["gate_proj", "up_proj", "down_proj"]
    config = getattr(peft, CONFIGS[tuner])(task_type="CAUSAL_LM", **fields)
    model: Any = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained.keys() == start.keys()
    with torch.no_grad():
        for name, weight in trained.items():
            assert weight.shape == start[name].shape
            weight.copy_(start[name])
    optimizer, regularizers = torch.optim.AdamW(trained.values(), lr=3e-3, eps=1e-3, weight_decay=0.0), []
    for number in range(1, STEPS + 1):
        samples = samples_of(seed=number)
        loss = -plain_scores(model, samples)[0].sum() / 50
        if tuner == "adalora":  # peft's forward pass adds it to a loss that the model computes itself
            ids = torch.tensor([[5, 6, 7]])
            regularizer = model(ids, labels=ids).loss - model.base_model.model(ids, labels=ids).loss
            loss = loss + regularizer
            regularizers.append(float(regularizer.detach()))
        loss.backward()
        optimizer.step()
        if tuner == "adalora":
            model.base_model.update_and_allocate(number)
        optimizer.zero_grad()
    return model, regularizers


@pytest.mark.parametrize("tuner", FIELDS)
def test_steps_merged_weights_and_files_are_those_of_peft(
    tuner: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel

    for compiler in ("CC", "CXX"):  # peft's BOFT leaves them there, when it is not ours that asks for it
        monkeypatch.setenv(compiler, "gcc")
    backend = FsdpBackend(folder, **settings_of(tuner))
    own = dict(backend.adapted.named_parameters())
    start = {name: weight.detach().clone() for name, weight in own.items() if weight.requires_grad}
    expected, regularizers = stepped_by_peft(folder, tuner, start)
    before = backend.token_logps(samples_of(), micro_batch_size=4).values
    found = [step(backend, number) for number in range(1, STEPS + 1)]
    trained = dict(expected.named_parameters())
    assert max(float((trained[name] - weight).detach().abs().max()) for name, weight in start.items()) > 3e-3
    for name in start:
        torch.testing.assert_close(own[name].detach(), trained[name].detach(), atol=2e-6, rtol=0, msg=name)
    if tuner == "adalora":
        assert [values["orthogonality"] for values in found] == pytest.approx(regularizers, rel=1e-4)
        zeros = [not float(rank) for name, weight in own.items() if ".lora_E." in name for rank in weight.detach()]
        assert sum(zeros) == len(zeros) // 2, "four ranks became two, on average"
    base = FsdpBackend(folder)
    plain = base.token_logps(samples_of(), micro_batch_size=4).values
    np.testing.assert_array_equal(backend.token_logps(samples_of(), micro_batch_size=4, adapter=False).values, plain)
    after = backend.token_logps(samples_of(), micro_batch_size=4).values
    assert np.abs(after - before).max() > 1e-4
    backend.export(tmp_path)
    again: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter")
    merged = dict(backend.named_weights())
    assert largest_difference(merged, again.merge_and_unload().state_dict()) == 0.0
    assert largest_difference(merged, expected.merge_and_unload().state_dict()) < 2e-6
    base.load_weights(merged.items())
    for other in (base, FsdpBackend(tmp_path)):
        np.testing.assert_allclose(other.token_logps(samples_of(), micro_batch_size=4).values, after, atol=1e-5)
    unchanged = base_of(folder)
    changed = {name for name, weight in merged.items() if not torch.equal(weight, unchanged[name])}
    assert changed <= {name for name, _ in backend.named_weights(trained_only=True)}
    np.testing.assert_array_equal(backend.token_logps(samples_of(), micro_batch_size=4).values, after)


def base_of(folder: str) -> dict[str, torch.Tensor]:
    return weights_of(FsdpBackend(folder))


Found = tuple[dict[str, torch.Tensor], bool]


def run_of(rank: int, folder: str, tuner: str, num_ranks: int, checkpoint: Path, **changed: Any) -> Found:
    """Merged weights after all steps, interrupted after two of them; and whether weights were in shards."""
    each = 8 // num_ranks
    mine = slice(rank * each, (rank + 1) * each)
    settings = settings_of(tuner, **{"sharding": "full_shard", **changed})
    first = FsdpBackend(folder, **settings)
    for number in (1, 2):
        step(first, number, mine)
    first.save(checkpoint)
    resumed = FsdpBackend(folder, **settings)
    resumed.load(checkpoint)
    for number in (3, 4):
        step(first, number, mine)
        step(resumed, number, mine)
    assert largest_difference(weights_of(first), weights_of(resumed)) == 0.0, tuner
    return weights_of(resumed), all(isinstance(weight, DTensor) for weight in resumed.module.parameters())


def runs_of_all(rank: int, folder: str, num_ranks: int, checkpoints: Path) -> dict[str, Found]:
    found = {tuner: run_of(rank, folder, tuner, num_ranks, checkpoints / tuner) for tuner in FIELDS}
    whole = {"sharding": "no_shard", "dtype": "bfloat16"}  # whose adapters are float32
    return found | {"adalora, whole": run_of(rank, folder, "adalora", num_ranks, checkpoints / "whole", **whole)}


def test_shards_take_the_steps_of_one_process_and_resume_exactly(folder: str, tmp_path: Path) -> None:
    alone = runs_of_all(0, folder, 1, tmp_path / "alone")
    before = base_of(folder)
    for ranks in run_ranks(2, runs_of_all, folder, 2, tmp_path / "two", folder=tmp_path):
        for case, (weights, is_sharded) in ranks.items():
            expected, _ = alone[case]
            low = case.endswith("whole")
            assert is_sharded is not low
            assert largest_difference(expected, before) > 2e-5, case
            assert largest_difference(weights, expected) < (1e-2 if low else 2e-6), case


def low_shards(rank: int, folder: str) -> dict[str, float]:
    """How far scores move in a step whose layers, adapters too, run in bfloat16 over shards."""
    moved = {}
    for tuner in FIELDS:
        backend = FsdpBackend(folder, **settings_of(tuner, sharding="full_shard", dtype="bfloat16"))
        before = backend.token_logps(samples_of(), micro_batch_size=4).values
        backend.step(samples_of(), partial(weighted_loss, 50), micro_batch_size=4)
        after = backend.token_logps(samples_of(), micro_batch_size=4).values
        merged = FsdpBackend(folder, dtype="bfloat16")
        merged.load_weights(backend.named_weights())
        np.testing.assert_allclose(merged.token_logps(samples_of(), micro_batch_size=4).values, after, atol=0.1)
        moved[tuner] = float(np.abs(after - before).max())
    return moved


def test_adapters_in_shards_run_in_bfloat16(folder: str, tmp_path: Path) -> None:
    (moved,) = run_ranks(1, low_shards, folder, folder=tmp_path)
    assert {tuner for tuner, far in moved.items() if far > 0} == set(FIELDS)


def test_values_that_peft_refuses_are_named(folder: str) -> None:
    for tuner, fields, words in (
        ("adalora", {"init_r": 4, "target_r": 4}, "init_r is 4, which must be above target_r, 4"),
        ("adalora", {"tinit": 9}, "schedule values don't allow for a budgeting phase"),
        ("boft", {"boft_block_size": 4, "boft_block_num": 4}, "tuner_type: boft: peft refuses"),
        ("boft", {"boft_n_butterfly_factor": 2}, "could not compile its CUDA kernel"),
        ("vera", {"rank": 4}, "unexpected keyword argument 'rank'"),
    ):
        with pytest.raises(ConfigError, match=words):
            FsdpBackend(folder, **settings_of(tuner, lora={"target_modules": LAYERS, **fields}))


KEYS: dict[str, Any] = {"model": "m", "dataset": "d"}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"tuner_type": "vera", "backend": "megatron"}, "tuner_type: vera is for backend: fsdp; backend: megatron has"),
        ({"tuner_type": "ia3", "lora_rank": 16}, "lora_rank is 16, but tuner_type is ia3"),
        ({"tuner_type": "boft", "lora_dropout": 0.1}, "lora_dropout is 0.1, but tuner_type is boft"),
        ({"tuner_type": "vera", "tuner_kwargs": {"rank": 4}}, "tuner_kwargs must be one of .*; got 'rank'"),
        ({"tuner_type": "lora", "tuner_kwargs": {"r": 4}}, "tuner_kwargs are for tuner_type: another tuner than lora"),
        ({"tuner_type": "miss", "lora_kwargs": {"r": 4}}, "lora_kwargs are for tuner_type: lora"),
        ({"tuner_type": "adalora", "tuner_kwargs": {"lora_alpha": 4}}, "is the key lora_alpha; write it there"),
        ({"tuner_type": "adalora", "tuner_kwargs": {"tinit": 9}, "max_steps": 9}, "allow for a budgeting phase"),
        ({"tuner_type": "adalora", "tuner_kwargs": {"init_r": 8}}, "init_r is 8, which must be above target_r, 8"),
    ],
)
def test_keys_that_nobody_would_read_are_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SFTConfig(**KEYS | keys)


@pytest.mark.parametrize(
    ("tuner", "kwargs", "words"),
    [
        ("boft", {"boft_block_size": 7}, r"q_proj has 64 inputs, which 7 \(boft_block_size or boft_block_num\) must"),
        ("miss", {"r": 4096}, "tuner_type: miss does not fit .* must be less than or equal to in_features"),
    ],
)
def test_layers_that_cannot_have_an_adapter_are_found_before_the_start(
    tuner: str, kwargs: dict[str, Any], words: str, folder: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_model_folder(SFTConfig(model=folder, dataset="d", tuner_type=tuner, tuner_kwargs=kwargs))
    for name, fields in FIELDS.items():
        fitting = {key: value for key, value in fields.items() if key != "lora_alpha"}
        check_model_folder(SFTConfig(model=folder, dataset="d", tuner_type=name, tuner_kwargs=fitting))


def test_a_plan_counts_what_each_tuner_trains(folder: str) -> None:
    shape = ModelShape.of(folder, "model")
    assert shape is not None
    for tuner, fields in FIELDS.items():
        backend = FsdpBackend(folder, **settings_of(tuner))
        trained = sum(weight.numel() for weight in backend.module.parameters() if weight.requires_grad)
        counted = adapter_parameters(shape, 8, tuner=tuner, kwargs=fields)
        assert counted == trained or (tuner == "ia3" and trained < counted < 1.5 * trained), tuner


def test_experts_that_a_tuner_leaves_out_are_told(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": []}
    config = AutoConfig.for_model("qwen3_moe", num_key_value_heads=2, head_dim=8, **sizes, **experts)
    with caplog.at_level("INFO"):
        found = targets_of(AutoModelForCausalLM.from_config(config), "vera", {"target_modules": "all-linear"})
    assert not any("experts" in name or name.endswith(".gate") for name in found["target_modules"])
    assert "all-linear leaves out experts, which only tuner_type: lora changes" in caplog.text
