"""One optimizer step against plain torch autograd and AdamW, however the batch is cut."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, Trainer

from rayhelper import ConfigError
from tests.backends.batches import (
    LENGTHS,
    largest_difference,
    mean_loss,
    packed,
    plain_loss,
    plain_scores,
    samples_of,
    weighted_loss,
    weights_of,
)
from tests.golden.tiny import save_tiny, tiny_model
from trainers.backends.fsdp import backend as fsdp
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.fsdp.optimizer import build_optimizer, load_whole_state, whole_state
from trainers.batch import Ragged, Samples
from trainers.grpo.config import GRPOConfig
from trainers.grpo.loss import StepNumbers, grpo_loss
from trainers.metrics import Metrics

# Adam divides a gradient by its own size: with its usual epsilon, rounding errors of gradients near zero become steps
# of full length. This epsilon keeps a step a smooth function of the gradient.
SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "num_training_steps": 10, "adam_epsilon": 1e-4, "max_grad_norm": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


def num_targets(samples: Samples) -> int:
    return int(samples.target_mask.values.sum())


def one_step(folder: str | Path, samples: Any = None, micro_batch_size: int = 3, **settings: Any) -> FsdpBackend:
    samples = samples_of() if samples is None else samples
    backend = FsdpBackend(folder, **SETTINGS | settings)
    backend.step(samples, partial(weighted_loss, num_targets(samples)), micro_batch_size=micro_batch_size)
    return backend


def gradients_of_step(backend: FsdpBackend, loss: Any, samples: Any, **settings: Any) -> dict[str, torch.Tensor]:
    """The gradients that the optimizer of a backend would use."""
    found: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        found.update({n: w.grad.clone() for n, w in backend.module.named_parameters() if w.grad is not None})

    assert backend.optimizer is not None
    handle = backend.optimizer.register_step_pre_hook(keep)
    backend.step(samples, loss, micro_batch_size=3, **settings)
    handle.remove()
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_are_those_of_plain_autograd(folder: str, temperature: float) -> None:
    samples = samples_of()
    backend = FsdpBackend(folder, **SETTINGS)
    plain_loss(backend.module, samples, temperature).backward()
    expected = {name: weight.grad.clone() for name, weight in backend.module.named_parameters()}
    backend.module.zero_grad()
    loss = partial(weighted_loss, num_targets(samples))
    found = gradients_of_step(backend, loss, samples, temperature=temperature)
    assert largest_difference(found, expected) < 1e-6
    assert min(float(gradient.abs().max()) for gradient in expected.values()) > 1e-4


def test_gradients_of_an_entropy_bonus_are_those_of_plain_autograd(folder: str) -> None:
    def entropy_loss(
        logps_BT: torch.Tensor, entropy_BT: torch.Tensor, mask_BT: torch.Tensor, micro: Samples, metrics: Metrics
    ) -> torch.Tensor:
        return -entropy_BT[mask_BT].sum()

    samples = samples_of()
    backend = FsdpBackend(folder, **SETTINGS)
    (-plain_scores(backend.module, samples)[1].sum()).backward()
    expected = {name: weight.grad.clone() for name, weight in backend.module.named_parameters()}
    backend.module.zero_grad()
    found = gradients_of_step(backend, entropy_loss, samples, entropy_gradient=True)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest_difference(found, expected) < 1e-6 * max(1.0, scale)


def test_a_loss_with_entropies_that_have_no_gradient_is_an_error(folder: str) -> None:
    def entropy_loss(logps_BT: Any, entropy_BT: Any, mask_BT: Any, micro: Any, metrics: Metrics, coef: float) -> Any:
        metrics.mean("entropy", (entropy_BT * mask_BT).sum(), mask_BT.sum())
        return -((logps_BT + coef * entropy_BT) * mask_BT).sum()

    backend = FsdpBackend(folder, **SETTINGS)
    with pytest.raises(ValueError, match="entropy_gradient=True"):
        backend.step(samples_of(), partial(entropy_loss, coef=0.1), micro_batch_size=3)
    backend.step(samples_of(), partial(entropy_loss, coef=0.0), micro_batch_size=3)
    backend.step(samples_of(), partial(entropy_loss, coef=0.1), micro_batch_size=3, entropy_gradient=True)


def test_steps_are_those_of_plain_adamw_with_clipping_decay_and_schedule(folder: str) -> None:
    """Three steps with warm-up, where the norm is above the limit; decayed are all weights but norms."""
    samples = samples_of()
    clipped = SETTINGS | {"weight_decay": 0.1, "max_grad_norm": 0.05, "warmup_steps": 2, "num_training_steps": 4}
    backend = FsdpBackend(folder, **clipped, adam_beta1=0.8, adam_beta2=0.95)
    plain = FsdpBackend(folder).module.requires_grad_(True)
    named = dict(plain.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [weight for name, weight in named.items() if "norm" not in name], "weight_decay": 0.1},
            {"params": [weight for name, weight in named.items() if "norm" in name], "weight_decay": 0.0},
        ],
        betas=(0.8, 0.95),
        eps=1e-4,
    )
    for learning_rate in (0.0, 0.5e-3, 1e-3, 0.5e-3):  # warms up for two steps, then falls for two
        loss = partial(weighted_loss, num_targets(samples))
        metrics = backend.step(samples, loss, micro_batch_size=3).values()
        plain_value = plain_loss(plain, samples)
        plain_value.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad()
        assert metrics["learning_rate"] == pytest.approx(learning_rate)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert metrics["grad_norm"] > 0.05, "the limit must bite"
        assert metrics["loss"] == pytest.approx(float(plain_value.detach()), abs=1e-6)
        assert largest_difference(weights_of(backend.module), weights_of(plain)) < 1e-6


def test_without_a_limit_no_gradient_is_scaled(folder: str) -> None:
    free, wide = one_step(folder), one_step(folder, max_grad_norm=1e6)
    tight = one_step(folder, max_grad_norm=1e-4)
    assert largest_difference(weights_of(free.module), weights_of(wide.module)) == 0.0
    assert largest_difference(weights_of(free.module), weights_of(tight.module)) > 1e-5


def test_biases_and_norms_are_not_decayed_as_in_transformers_trainer(tmp_path: Path) -> None:
    qwen2 = save_tiny(tmp_path / "qwen2", family="qwen2")  # has biases
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=260, n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    for path in (qwen2, tmp_path / "gpt2"):  # one with RMSNorm, one with LayerNorm called ln_1
        backend = FsdpBackend(path, **SETTINGS, weight_decay=0.1)
        assert backend.optimizer is not None
        names = {weight: name for name, weight in backend.module.named_parameters()}
        decay = {names[p]: group["weight_decay"] for group in backend.optimizer.param_groups for p in group["params"]}
        by_trainer = set(Trainer.get_decay_parameter_names(None, backend.module))  # type: ignore[arg-type]
        assert decay == {name: 0.1 if name in by_trainer else 0.0 for name in names.values()}
        assert {0.0, 0.1} == set(decay.values())


@pytest.mark.parametrize("micro_batch_size", [1, 8])
def test_the_micro_batch_size_does_not_change_a_step(folder: str, micro_batch_size: int) -> None:
    threes, others = one_step(folder), one_step(folder, micro_batch_size=micro_batch_size)
    assert largest_difference(weights_of(threes.module), weights_of(others.module)) < 1e-6
    assert largest_difference(weights_of(threes.module), weights_of(FsdpBackend(folder).module)) > 1e-5


def test_metrics_are_those_of_the_whole_batch(folder: str) -> None:
    samples = samples_of()
    _, entropies_N, is_top1_N = plain_scores(FsdpBackend(folder).module, samples)
    for micro_batch_size in (1, 3, 8):
        backend = FsdpBackend(folder, **SETTINGS)
        loss = partial(weighted_loss, num_targets(samples))
        values = backend.step(samples, loss, micro_batch_size=micro_batch_size).values()
        assert values["entropy"] == pytest.approx(float(entropies_N.mean()), rel=1e-5)
        assert values["mean_token_accuracy"] == pytest.approx(float(is_top1_N.mean()))
        assert values["loss"] == pytest.approx(float(plain_loss(FsdpBackend(folder).module, samples)), abs=1e-6)


def test_an_empty_batch_is_a_step_without_gradient(folder: str) -> None:
    backend = FsdpBackend(folder, **SETTINGS)
    before = weights_of(backend.module)
    values = backend.step(samples_of()[:0], partial(weighted_loss, 1), micro_batch_size=2).values()
    assert values["loss"] == 0.0
    assert values["grad_norm"] == 0.0
    assert largest_difference(weights_of(backend.module), before) == 0.0


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_packed_documents_give_the_same_step_as_each_alone(folder: str, micro_batch_size: int) -> None:
    samples = samples_of()
    together = packed(samples, [[0, 1, 2], [3], [4, 5], [6, 7]])
    loss = partial(mean_loss, num_targets(samples))
    alone, in_rows = FsdpBackend(folder, **SETTINGS), FsdpBackend(folder, **SETTINGS)
    alone.step(samples, loss, micro_batch_size=3)
    in_rows.step(together, loss, micro_batch_size=micro_batch_size)
    assert largest_difference(weights_of(alone.module), weights_of(in_rows.module)) < 1e-6


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_logps_of_a_step_are_bit_for_bit_those_scored_before(folder: str, gradient_checkpointing: bool) -> None:
    """So the ratio of an on-policy step is exactly one."""
    samples = samples_of()
    backend = FsdpBackend(folder, **SETTINGS, gradient_checkpointing=gradient_checkpointing)
    samples.old_logps = backend.token_logps(samples, micro_batch_size=3, temperature=0.7)
    seen = []

    def loss(
        logps_BT: torch.Tensor, entropy_BT: torch.Tensor, mask_BT: torch.Tensor, micro: Samples, metrics: Metrics
    ) -> torch.Tensor:
        assert micro.old_logps is not None
        seen.append(torch.equal(logps_BT.detach(), micro.old_logps.padded(0.0)))
        return -logps_BT[mask_BT].sum()

    backend.step(samples, loss, micro_batch_size=3, temperature=0.7)
    assert seen == [True, True, True]


def test_gradient_checkpointing_gives_the_same_gradients_and_runs_layers_again(folder: str) -> None:
    samples = samples_of()
    loss = partial(weighted_loss, num_targets(samples))
    gradients, calls = [], []
    for checkpointing in (False, True):
        backend = FsdpBackend(folder, **SETTINGS, gradient_checkpointing=checkpointing)
        count: list[int] = []
        backend.module.model.layers[0].mlp.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        gradients.append(gradients_of_step(backend, loss, samples))
        calls.append(len(count))
    assert largest_difference(*gradients) < 1e-6  # the head adds in another order: it keeps nothing either
    assert calls[1] == 2 * calls[0]


def test_compiled_layers_give_the_same_step_and_keep_no_more_activations_than_they_may(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer_compile = torch.nn.Module.compile  # into PyTorch's own operators here, by the same choice of what is kept
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda layer: layer_compile(layer, backend="aot_eager_decomp_partition")
    )
    plain = weights_of(one_step(folder).module)
    kept = {}
    for budget in (1.0, 0.9, 0.0):
        torch._dynamo.reset()
        seen: dict[int, int] = {}

        def keep(tensor: torch.Tensor, seen: dict[int, int] = seen) -> torch.Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                seen[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            settings = {"torch_compile": True, "activation_memory_budget": budget, "logits_memory_gib": 0.0}
            compiled = one_step(folder, micro_batch_size=100, **settings)
        kept[budget] = sum(seen.values())
        assert largest_difference(weights_of(compiled.module), plain) < 1e-6
    torch._dynamo.reset()
    assert kept[0.9] < 0.9 * kept[1.0]
    assert kept[0.0] < 0.5 * kept[1.0]


def test_bfloat16_keeps_float32_weights_and_states_and_learns(folder: str) -> None:
    samples = samples_of()
    backend = FsdpBackend(folder, **SETTINGS, dtype="bfloat16")
    dtypes: set[torch.dtype] = set()
    backend.module.model.layers[0].mlp.up_proj.register_forward_hook(lambda _m, _i, output: dtypes.add(output.dtype))
    loss = partial(mean_loss, num_targets(samples))
    losses = [backend.step(samples, loss, micro_batch_size=3).values()["loss"] for _ in range(4)]
    assert dtypes == {torch.bfloat16}
    assert losses[-1] < losses[0] - 0.01
    assert {weight.dtype for weight in backend.module.parameters()} == {torch.float32}
    assert backend.optimizer is not None
    states = [state for states in backend.optimizer.state.values() for state in states.values()]
    assert {state.dtype for state in states} == {torch.float32}
    exact = FsdpBackend(folder).token_logps(samples, micro_batch_size=3)
    rounded = FsdpBackend(folder, dtype="bfloat16").token_logps(samples, micro_batch_size=3)
    assert 1e-4 < abs(exact.values - rounded.values).max() < 0.2


def test_muon_is_torchs_of_matrices_and_adamw_of_all_else() -> None:
    """Also after its states were saved and loaded. Embeddings and head are AdamW's; every weight decays."""
    model, expected = (tiny_model(tie_word_embeddings=False) for _ in range(2))
    expected.load_state_dict(model.state_dict())
    ends = ("embed_tokens", "lm_head")
    named = list(expected.named_parameters())
    matrices = [weight for name, weight in named if weight.ndim == 2 and not any(end in name for end in ends)]
    known = {id(weight) for weight in matrices}
    settings: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
    theirs = [
        torch.optim.Muon(matrices, momentum=0.95, adjust_lr_fn="match_rms_adamw", **settings),
        torch.optim.AdamW([w for _, w in named if id(w) not in known], betas=(0.9, 0.95), eps=1e-8, **settings),
    ]

    def built() -> torch.optim.Optimizer:
        told = {"adam_betas": (0.9, 0.95), "adam_epsilon": 1e-8, "kwargs": {}}
        return build_optimizer("muon", model, learning_rate=0.02, weight_decay=0.1, **told)

    ours, generator = built(), torch.Generator().manual_seed(0)
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step)) for one in (ours, *theirs)]
    for step in range(4):
        if step == 2:
            states, ours = whole_state(ours), built()
            load_whole_state(ours, states)
            schedules[0].optimizer = ours
        for own, other in zip(model.parameters(), expected.parameters(), strict=True):
            own.grad = torch.randn(own.shape, generator=generator)
            other.grad = own.grad.clone()
        for one in (ours, *theirs):
            one.step()
        for schedule in schedules:
            schedule.step()
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(own, other)
    model.stack = torch.nn.Parameter(torch.zeros(2, 2, 2))
    with pytest.raises(ConfigError, match="optim: muon changes matrices, and stack has 3 dimensions"):
        built()


def test_a_model_that_only_scores_has_no_optimizer_and_no_gradients(folder: str) -> None:
    backend = FsdpBackend(folder, dtype="bfloat16")
    assert backend.optimizer is None
    assert not backend.module.training
    assert not any(weight.requires_grad for weight in backend.module.parameters())
    assert {weight.dtype for weight in backend.module.parameters()} == {torch.bfloat16}
    with pytest.raises(AssertionError, match="only scores"):
        backend.step(samples_of(), partial(weighted_loss, 1), micro_batch_size=3)


def test_the_loss_sees_ragged_targets_left_aligned(folder: str) -> None:
    samples = samples_of()
    shapes = []

    def loss(
        logps_BT: torch.Tensor, entropy_BT: torch.Tensor, mask_BT: torch.Tensor, micro: Samples, metrics: Metrics
    ) -> torch.Tensor:
        counts = Ragged.of([[1] * int(mask.sum()) for mask in micro.target_mask], bool)
        assert torch.equal(mask_BT, counts.padded(False))
        assert bool((logps_BT[~mask_BT] == 0).all())
        assert entropy_BT.shape == logps_BT.shape == mask_BT.shape
        shapes.append(len(micro))
        return logps_BT.sum()

    FsdpBackend(folder, **SETTINGS).step(samples, loss, micro_batch_size=3)
    assert shapes == [3, 3, len(LENGTHS) - 6]


aten = torch.ops.aten
READS = [aten._local_scalar_dense.default, aten.masked_select.default, aten.masked_scatter_backward.default]


class Reads(TorchDispatchMode):
    """Counts what a process would wait for, were its device a GPU: for a number, or for how many there are.

    ``of_inputs``: what is done to inputs too, before they go to the device.
    """

    def __init__(self, *, of_inputs: bool = False) -> None:
        super().__init__()
        self.of_inputs, self.count = of_inputs, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in READS
        if self.of_inputs:
            self.count += func is aten.nonzero.default
            self.count += func is aten.index.Tensor and any(
                one is not None and one.dtype == torch.bool for one in args[1]
            )
        return func(*args, **(kwargs or {}))


def test_a_step_waits_for_its_device_as_often_however_many_micro_batches_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FsdpBackend(save_tiny(tmp_path), learning_rate=1e-3, num_training_steps=9)
    config = GRPOConfig(model="any", dataset=[{"prompt": "any"}], reward_funcs=["exact_answer"], beta=0.1)
    samples = dataclasses.replace(
        samples_of(),
        old_logps=Ragged.of([np.full(mask.sum(), -5.0) for mask in samples_of().target_mask], np.float32),
        ref_logps=Ragged.of([np.full(mask.sum(), -6.0) for mask in samples_of().target_mask], np.float32),
    )
    in_losses, token_loss = [], fsdp.token_loss

    def watched(*args: Any) -> torch.Tensor:
        with Reads(of_inputs=True) as reads, monkeypatch.context() as patch:
            for name in ("tolist", "numpy", "cpu"):
                patch.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(f"{name} waits"))
            loss = token_loss(*args)
        in_losses.append(reads.count)
        return loss

    monkeypatch.setattr(fsdp, "token_loss", watched)
    counts = []
    for micro_batch_size in (8, 4, 2):
        with Reads() as reads:
            loss = partial(grpo_loss, config, StepNumbers(normaliser=40.0, num_bonus_tokens=0, entropy_coef=0.0))
            metrics = backend.step(samples, loss, micro_batch_size=micro_batch_size)
        assert metrics.values()["kl"] > 0
        counts.append(reads.count - 8 // micro_batch_size)  # on a CPU the head looks for gradients of entropies
    assert in_losses == [0] * (1 + 2 + 4)
    assert counts[0] == counts[1] == counts[2]
