"""The loss that balances experts, against transformers' own ``aux_loss`` of every micro-batch in a plain loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.tiny import architectures
from benchmarks.tiny.architectures import Architecture, save
from rayhelper import ConfigError
from tests.backends.batches import largest_difference, mean_loss, packed, plain_loss, samples_of, weighted_loss
from tests.backends.ranks import run_ranks
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.batch import Ragged, Samples, Sequences
from trainers.losses.tokens import token_logps

COEF = 0.5
SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "num_training_steps": 10, "sharding": "no_shard"}
SETTINGS |= {"adam_epsilon": 1e-4, "max_grad_norm": 0.0, "router_aux_loss_coef": COEF}
Weights = dict[str, torch.Tensor]
Step = tuple[dict[str, float], Weights]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save("qwen3_moe", tmp_path_factory.mktemp("model"))


def step(backend: FsdpBackend, samples: Sequences, loss: Any, micro_batch_size: int) -> Step:
    """What a step reports, and its gradients."""
    found: Weights = {}

    def keep(*_: Any) -> None:
        trained = ((name, weight.grad) for name, weight in backend.module.named_parameters())
        found.update({name: _whole(gradient).clone() for name, gradient in trained if gradient is not None})

    assert backend.optimizer is not None
    handle = backend.optimizer.register_step_pre_hook(keep)
    values = backend.step(samples, loss, micro_batch_size=micro_batch_size).values()
    handle.remove()
    return values, found


def _whole(gradient: Any) -> torch.Tensor:
    whole: torch.Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole


def weighted(samples: Samples) -> Any:
    return partial(weighted_loss, float(samples.target_mask.values.sum()))


def aux_loss(model: Any, documents: Iterable[np.ndarray]) -> torch.Tensor:
    """transformers' own, of documents that are padded to one length under an attention mask."""
    rows = [torch.from_numpy(ids) for ids in documents]
    ids_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    is_token_BT = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    outputs = model(input_ids=ids_BT, attention_mask=is_token_BT, output_router_logits=True, use_cache=False)
    found: torch.Tensor = outputs.aux_loss
    return found


def wanted(model: Any, samples: Samples, groups: Sequence[Iterable[int]], loss: torch.Tensor | None = None) -> Step:
    """The same by transformers and autograd: ``groups`` are the documents of each micro-batch."""
    num_tokens = len(samples.input_ids.values)
    parts = []
    for group in groups:
        share = sum(len(samples.input_ids[k]) for k in group) / num_tokens
        parts.append(share * aux_loss(model, [samples.input_ids[k] for k in group]))
    aux = torch.stack(parts).sum()
    loss = (plain_loss(model, samples) if loss is None else loss) + COEF * aux
    loss.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return {"loss": float(loss.detach()), "moe_aux_loss": float(aux.detach())}, gradients


def assert_same(found: Step, right: Step, case: str = "") -> None:
    for name, value in right[0].items():
        assert found[0][name] == pytest.approx(value, abs=1e-5), f"{case} {name}"
    assert largest_difference(found[1], right[1]) < 1e-5, case


@pytest.mark.parametrize("settings", [{}, {"padding_free": True}, {"gradient_checkpointing": True}], ids=str)
@pytest.mark.parametrize(
    ("micro_batch_size", "groups"), [(3, [(0, 1, 2), (3, 4, 5), (6, 7)]), (8, [range(8)])], ids=["three", "one"]
)
def test_a_step_adds_the_mean_over_micro_batches_by_their_tokens(
    folder: str, settings: dict[str, Any], micro_batch_size: int, groups: list[Any]
) -> None:
    samples = samples_of()
    backend = FsdpBackend(folder, **SETTINGS | settings)
    right = wanted(backend.module.eval(), samples, groups)
    backend.module.train()
    assert_same(step(backend, samples, weighted(samples), micro_batch_size), right)


ROUTED: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
OTHERS = {
    "granitemoe": Architecture("GraniteMoeConfig", ROUTED | {"logits_scaling": 4.0}),
    "jamba": Architecture(
        "JambaConfig",
        {"num_experts": 4, "attn_layer_period": 1, "attn_layer_offset": 0, "expert_layer_period": 1}
        | {"expert_layer_offset": 0, "use_mamba_kernels": False},
    ),
}


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "gpt_oss", "qwen3_next", "minimax_m2", *OTHERS])
def test_every_architecture_is_balanced_by_its_own_loss(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several documents where the model takes them; gpt-oss does so by masks."""
    monkeypatch.setattr(architectures, "ARCHITECTURES", architectures.ARCHITECTURES | OTHERS)
    backend = FsdpBackend(save(name, tmp_path), **SETTINGS)
    samples = samples_of()
    right = wanted(backend.module, samples, [range(4), range(4, 8)])
    assert_same(step(backend, samples, weighted(samples), 4), right, name)


def test_documents_of_packed_rows_count_and_their_padding_does_not(folder: str) -> None:
    samples = samples_of()
    rows = [(0, 1, 2), (3, 4), (5,), (6, 7)]
    backend = FsdpBackend(folder, **SETTINGS)
    scored = [backend.module(input_ids=torch.tensor(ids)[None]).logits[0, :-1] for ids in samples.input_ids]
    logps = [token_logps(x, torch.tensor(ids[1:]), 1.0) for x, ids in zip(scored, samples.input_ids, strict=True)]
    masks = [torch.tensor(mask[1:]) for mask in samples.target_mask]
    loss = -sum(x[mask].sum() for x, mask in zip(logps, masks, strict=True)) / 50
    assert isinstance(loss, torch.Tensor)
    right = wanted(backend.module, samples, [range(5), range(5, 8)], loss)
    assert_same(step(backend, packed(samples, rows), partial(mean_loss, 50.0), 2), right)


CASES: dict[str, dict[str, Any]] = {
    "whole": {},
    "in shards": {"sharding": "full_shard"},
    "in shards, recomputed": {"sharding": "full_shard", "gradient_checkpointing": True},
    "padding-free": {"sharding": "full_shard", "padding_free": True},
}
CUT = [0, 5, 8]  # of eight documents: the second rank has one micro-batch of two less
GROUPS = [(0, 1), (2, 3), (4,), (5, 6), (7,)]


def steps_of_cases(rank: int, folder: str) -> dict[str, Step]:
    samples = samples_of()
    mine = samples[CUT[rank] : CUT[rank + 1]]
    return {
        case: step(FsdpBackend(folder, **SETTINGS | settings), mine, weighted(samples), 2)
        for case, settings in CASES.items()
    }


def test_two_workers_add_their_micro_batches_up(folder: str, tmp_path: Path) -> None:
    right = wanted(FsdpBackend(folder).module.requires_grad_(True), samples_of(), GROUPS)
    ranks = run_ranks(2, steps_of_cases, folder, folder=tmp_path)
    tokens = [sum(samples_of().input_ids.lengths[CUT[rank] : CUT[rank + 1]]) for rank in range(2)]
    for case in CASES:
        losses, aux = ([rank[case][0][name] for rank in ranks] for name in ("loss", "moe_aux_loss"))
        values = {"loss": sum(losses), "moe_aux_loss": float(np.average(aux, weights=tokens))}
        for rank in ranks:
            assert_same((values, rank[case][1]), right, case)


def test_scores_know_nothing_of_it_and_without_it_nothing_is_reported(folder: str) -> None:
    samples = samples_of()
    balanced, plain = (FsdpBackend(folder, **SETTINGS | {"router_aux_loss_coef": coef}) for coef in (COEF, 0.0))
    scores = [backend.token_logps(samples, micro_batch_size=3).values for backend in (balanced, plain)]
    np.testing.assert_array_equal(*scores)
    values, gradients = step(plain, samples, weighted(samples), 3)
    assert "moe_aux_loss" not in values
    assert largest_difference(step(balanced, samples, weighted(samples), 3)[1], gradients) > 1e-2


def test_an_adapter_learns_to_balance(folder: str) -> None:
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    samples = samples_of()
    backend = FsdpBackend(folder, **SETTINGS | {"lora": lora, "learning_rate": 1e-2, "router_aux_loss_coef": 100.0})
    losses = [step(backend, samples, weighted(samples), 8)[0]["moe_aux_loss"] for _ in range(4)]
    assert losses[-1] < losses[0] - 1e-3


def test_a_batch_without_rows_adds_nothing(folder: str) -> None:
    nothing = Sequences(Ragged.of([], np.int64), Ragged.of([], bool))
    values, gradients = step(FsdpBackend(folder, **SETTINGS), nothing, partial(mean_loss, 1.0), 2)
    assert values["loss"] == 0
    assert "moe_aux_loss" not in values
    assert all(not gradient.count_nonzero() for gradient in gradients.values())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen3", "Qwen3ForCausalLM has no experts"),
        ("llama4_text", "Llama4ForCausalLM of transformers has no loss that balances its experts"),
        ("glm4_moe", "Glm4MoeForCausalLM of transformers has no loss"),
    ],
)
def test_a_model_without_the_loss_is_refused(name: str, words: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path)
    with pytest.raises(ConfigError, match=words):
        FsdpBackend(folder, **SETTINGS)
    FsdpBackend(folder, router_aux_loss_coef=COEF)  # which only scores


def test_an_adapter_of_a_router_whose_logits_are_read_before_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(architectures, "ARCHITECTURES", OTHERS)
    folder = save("jamba", tmp_path)
    lora: dict[str, Any] = {"r": 4, "target_modules": "all-linear"}
    with pytest.raises(ConfigError, match=r"exclude_modules: \[router\]"):
        FsdpBackend(folder, **SETTINGS, lora=lora)
    FsdpBackend(folder, **SETTINGS, lora=lora | {"exclude_modules": ["router"]})


def test_a_loss_that_is_not_that_of_the_model_is_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

    ask = modeling.Qwen3MoeForCausalLM.forward

    def other(self: Any, *args: Any, output_router_logits: bool | None = None, **kwargs: Any) -> Any:
        outputs = ask(self, *args, output_router_logits=output_router_logits, **kwargs)
        if outputs.aux_loss is not None:
            outputs.aux_loss = 2 * outputs.aux_loss
        return outputs

    monkeypatch.setattr(modeling.Qwen3MoeForCausalLM, "forward", other)
    with pytest.raises(ConfigError, match="by a loss that RayHelper does not support"):
        FsdpBackend(folder, **SETTINGS)
