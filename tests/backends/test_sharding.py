"""Weights in shards over ranks give the step, the scores, the files and the completions of one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from tests.backends.batches import largest_difference, mean_loss, samples_of, weighted_loss
from tests.backends.ranks import run_ranks
from tests.golden.tiny import save_tiny, tiny_tokenizer
from trainers.backends.fsdp import sharding
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.batch import Prompts, Ragged, Samples
from trainers.rollout.base import Sampling
from trainers.rollout.hf.engine import HfEngine

SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "num_training_steps": 4,
    "adam_epsilon": 1e-4,  # see test_step.py
    "max_grad_norm": 0.1,
    "weight_decay": 0.1,
    "sharding": "full_shard",
}
CUTS = [0, 4, 5, 5, 8]  # of eight samples; the third rank of four has none
CASES: dict[str, dict[str, Any]] = {
    "resharded": {},
    "kept after forward": {"reshard_after_forward": False},
    "checkpointing": {"gradient_checkpointing": True},
    "offloaded": {"offload_params": True},
    "sgd": {"optim": "sgd", "optim_kwargs": {"momentum": 0.9}},
    "rmsprop": {"optim": "rmsprop", "optim_kwargs": {"eps": 1e-2}},
    "adagrad": {"optim": "adagrad", "optim_kwargs": {"eps": 1e-2}},
    "lora": {"lora": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}, "learning_rate": 1e-2},
    "lora of every layer": {"lora": {"r": 4, "target_modules": ["all-linear", "embed_tokens", "lm_head"]}},
}
UNTIED = "lora of every layer"  # whose embedding and head are two weights
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("models") / "tied", tie_word_embeddings=True)


def model_of(folder: str, case: str) -> str:
    """The folder of the case's model: that one, or another beside it."""
    if case != UNTIED:
        return folder
    beside = Path(folder).parent / "untied"
    return str(beside) if beside.exists() else save_tiny(beside)


def weights_of(backend: FsdpBackend) -> Weights:
    return {name: weight.clone() for name, weight in backend.named_weights()}


def two_steps(rank: int, folder: str, cuts: list[int], case: str) -> tuple[Weights, np.ndarray, bool]:
    """Weights after two steps with a scoring pass between them, the scores, and whether weights were in shards."""
    backend = FsdpBackend(model_of(folder, case), **SETTINGS | CASES[case])
    scores = Ragged.of([], np.float32)
    for step in range(2):
        samples = samples_of(seed=step)
        loss = partial(weighted_loss, int(samples.target_mask.values.sum()))
        mine = samples[cuts[rank] : cuts[rank + 1]]
        backend.step(mine, loss, micro_batch_size=2)
        scores = backend.token_logps(mine, micro_batch_size=2)
    weights = weights_of(backend)
    return weights, scores.values, all(isinstance(weight, DTensor) for weight in backend.module.parameters())


def steps_of_cases(rank: int, folder: str, cuts: list[int]) -> dict[str, tuple[Weights, np.ndarray, bool]]:
    """All on the same ranks: most of what a rank costs is its first step."""
    return {case: two_steps(rank, folder, cuts, case) for case in CASES}


def test_shards_take_the_steps_of_one_process(folder: str, tmp_path: Path) -> None:
    alone = steps_of_cases(0, folder, [0, 8])
    ranks = run_ranks(4, steps_of_cases, folder, CUTS, folder=tmp_path)
    for case, (expected, scores, _) in alone.items():
        assert largest_difference(expected, weights_of(FsdpBackend(model_of(folder, case)))) > 1e-4
        for weights, _, is_sharded in (found[case] for found in ranks):
            assert is_sharded
            assert largest_difference(weights, expected) < 1e-6, case
        np.testing.assert_allclose(np.concatenate([found[case][1] for found in ranks]), scores, atol=1e-5)


def complete(rank: int, folder: str) -> tuple[list[list[int]], Weights]:
    """Greedy completions by an engine that shares a sharded model, more on one rank than on the other; then a step."""
    backend = FsdpBackend(folder, **SETTINGS)
    engine = HfEngine(backend.module, tiny_tokenizer(), whole_weights=backend.whole_weights)
    samples = samples_of()[rank * 4 : rank * 4 + 4]
    backend.step(samples, partial(mean_loss, 50), micro_batch_size=2)
    prompts = Prompts(Ragged.of([[5, 6, 7], [8, 9]][: 1 + rank], np.int64))
    rollouts = engine.generate(prompts, Sampling(max_completion_length=4 + rank, temperature=0.0), seed=1)
    assert all(isinstance(weight, DTensor) for weight in backend.module.parameters())
    backend.step(samples, partial(mean_loss, 50), micro_batch_size=2)
    return [row.tolist() for row in rollouts.completion_ids], weights_of(backend)


def test_an_engine_completes_with_gathered_weights_each_rank_at_its_own_pace(folder: str, tmp_path: Path) -> None:
    ranks = run_ranks(2, complete, folder, folder=tmp_path)
    alone = FsdpBackend(folder, **SETTINGS)
    alone.step(samples_of(), partial(mean_loss, 50), micro_batch_size=8)
    engine = HfEngine(alone.module, tiny_tokenizer())
    for rank, (completions, _) in enumerate(ranks):
        prompts = Prompts(Ragged.of([[5, 6, 7], [8, 9]][: 1 + rank], np.int64))
        expected = engine.generate(prompts, Sampling(max_completion_length=4 + rank, temperature=0.0), seed=1)
        assert completions == [row.tolist() for row in expected.completion_ids]
    alone.step(samples_of(), partial(mean_loss, 50), micro_batch_size=8)
    assert largest_difference(ranks[0][1], weights_of(alone)) < 1e-6


def half_of_a_run(rank: int, folder: str, checkpoint: Path, case: str, num_ranks: int) -> Weights:
    backend = FsdpBackend(model_of(folder, case), **SETTINGS | CASES[case])
    start = 0
    if checkpoint.exists():
        backend.load(checkpoint)
        start = 2
    each = 8 // num_ranks
    for step in (start, start + 1):
        mine = samples_of(seed=step)[rank * each : (rank + 1) * each]
        backend.step(mine, partial(mean_loss, 50), micro_batch_size=2)
    if start == 0:
        backend.save(checkpoint)
    else:
        backend.export(checkpoint.parent / "final")
    return weights_of(backend)


def halves_of_runs(rank: int, folder: str, runs: Path, num_ranks: int) -> dict[str, Weights]:
    """Of a plain one and of one with an adapter."""
    cases = ("resharded", UNTIED)
    return {case: half_of_a_run(rank, folder, runs / case / "checkpoint", case, num_ranks) for case in cases}


def test_a_run_goes_on_over_another_number_of_ranks(folder: str, tmp_path: Path) -> None:
    halves_of_runs(0, folder, tmp_path / "alone", 1)
    expected = halves_of_runs(0, folder, tmp_path / "alone", 1)
    for before, after in ((4, 2), (1, 2)):
        runs = tmp_path / f"from_{before}"
        run_ranks(before, halves_of_runs, folder, runs, before, folder=tmp_path)
        found = run_ranks(after, halves_of_runs, folder, runs, after, folder=tmp_path)[0]
        for case, weights in expected.items():
            assert largest_difference(found[case], weights) < 2e-6, f"{case}, {before} to {after}"
    for case in expected:
        final, ours = (
            load_file(tmp_path / name / case / "final" / "model.safetensors") for name in ("from_4", "alone")
        )
        assert largest_difference(final, ours) < 2e-6


def follow(rank: int, folder: str) -> Weights:
    """A reference that moves a third of the way to a trained policy, after it has scored."""
    policy = FsdpBackend(folder, **SETTINGS)
    reference = FsdpBackend(folder, sharding="full_shard")
    mine = samples_of()[rank * 4 : rank * 4 + 4]
    policy.step(mine, partial(mean_loss, 50), micro_batch_size=2)
    reference.token_logps(mine, micro_batch_size=2)
    reference.mix_weights(policy.named_weights(), 1 / 3)
    return weights_of(reference)


def test_a_reference_in_shards_follows_a_policy_in_shards(folder: str, tmp_path: Path) -> None:
    policy = FsdpBackend(folder, **SETTINGS)
    policy.step(samples_of(), partial(mean_loss, 50), micro_batch_size=8)
    untrained = weights_of(FsdpBackend(folder))
    expected = {name: untrained[name] + (weight - untrained[name]) / 3 for name, weight in policy.named_weights()}
    assert largest_difference(expected, untrained) > 1e-4
    for weights in run_ranks(2, follow, folder, folder=tmp_path):
        assert largest_difference(weights, expected) < 1e-6


LOW: dict[str, Any] = {"dtype": "bfloat16", "optim": "sgd", "learning_rate": 10.0}


def steps_alone(rank: int, folder: str) -> tuple[list[Weights], dict[str, Weights]]:
    """On a single rank: weights after a step of four micro-batches, in copies and by FSDP.

    And those after such a step when one before it has failed. A torch whose FSDP cannot forget that takes no further
    step.
    """
    found = []
    for offload_params in (False, True):
        backend = FsdpBackend(folder, **SETTINGS | LOW, offload_params=offload_params)
        assert backend.is_sharded is offload_params
        backend.step(samples_of(), partial(weighted_loss, 50), micro_batch_size=2)
        found.append(weights_of(backend))
    by_fsdp = LOW | {"offload_params": True}
    after_failures = {failing: after_a_failure(folder, failing, LOW) for failing in FAILING}
    after_failures |= {f"{failing}, FSDP": after_a_failure(folder, failing, by_fsdp) for failing in FAILING}
    sharding.holds_gradients = lambda weight: False  # as if it kept gradients elsewhere; nothing else uses this process
    with pytest.raises(RuntimeError, match=r"an earlier step failed.*Resume"):
        after_a_failure(folder, "loss", by_fsdp)
    return found, after_failures


class FailureError(Exception):
    pass


FAILING = ("loss", "backward pass", "forward pass")


def after_a_failure(folder: str, failing: str, settings: dict[str, Any], at: int = 2) -> Weights:
    """Weights after a step, before which another one failed in the second, or so, of its four micro-batches."""
    backend = FsdpBackend(folder, **SETTINGS | settings)
    micros: list[int] = []

    def fail(*given: Any) -> None:
        if len(micros) == at:
            raise FailureError

    def entered(module: Any, inputs: Any) -> None:
        micros.append(0)
        if failing == "forward pass":
            fail()

    def passed(module: Any, inputs: Any, output: Any) -> None:
        if failing == "backward pass" and output.requires_grad:
            output.register_hook(fail)

    def loss(*given: Any) -> torch.Tensor:
        if failing == "loss":
            fail()
        return weighted_loss(50, *given)

    layer = backend.module.model.layers[0].mlp
    hooks = [layer.register_forward_pre_hook(entered), layer.register_forward_hook(passed)]
    with pytest.raises(FailureError):
        backend.step(samples_of(seed=3), loss, micro_batch_size=2)
    for hook in hooks:
        hook.remove()
    backend.step(samples_of(), partial(weighted_loss, 50), micro_batch_size=2)
    return weights_of(backend)


def assert_equal(found: Weights, expected: Weights) -> None:
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_a_single_rank_in_copies_learns_as_fsdp_does_and_forgets_a_step_that_failed(
    folder: str, tmp_path: Path
) -> None:
    (((in_copies, by_fsdp), after_failures),) = run_ranks(1, steps_alone, folder, folder=tmp_path)
    assert largest_difference(in_copies, weights_of(FsdpBackend(folder))) > 1e-4
    assert_equal(in_copies, by_fsdp)
    for weights in after_failures.values():
        assert_equal(weights, by_fsdp)


def copies_after_a_failure(rank: int, folder: str) -> tuple[dict[str, Weights], Weights]:
    """Of ranks that hold copies: weights after a failure and a step, and after that step alone."""
    settings = {"sharding": "no_shard"}
    forgotten = {failing: after_a_failure(folder, failing, settings, at=4) for failing in ("loss", "forward pass")}
    forgotten["earlier"] = after_a_failure(folder, "backward pass", settings)
    with pytest.raises(RuntimeError, match=r"an earlier step failed.*DistributedDataParallel.*Resume"):
        after_a_failure(folder, "backward pass", settings, at=4)  # which adds up what the ranks found
    backend = FsdpBackend(folder, **SETTINGS | settings)
    backend.step(samples_of(), partial(weighted_loss, 50), micro_batch_size=2)
    return forgotten, weights_of(backend)


def test_ranks_with_copies_forget_a_failure_or_refuse_further_steps(folder: str, tmp_path: Path) -> None:
    for forgotten, right in run_ranks(2, copies_after_a_failure, folder, folder=tmp_path):
        for weights in forgotten.values():
            assert_equal(weights, right)


@pytest.mark.parametrize("failing", FAILING)
def test_a_step_that_failed_leaves_no_gradient_to_the_next(folder: str, failing: str) -> None:
    backend = FsdpBackend(folder, **SETTINGS)
    backend.step(samples_of(), partial(weighted_loss, 50), micro_batch_size=2)
    assert_equal(after_a_failure(folder, failing, {}), weights_of(backend))


def step_after_the_reference(rank: int, folder: str, samples: Samples) -> list[list[float]]:
    """Gradient norms of two steps, each after a look without the adapter; layers are sharded anew or stay gathered."""
    found = []
    for resharded in (True, False):
        backend = FsdpBackend(folder, **SETTINGS | CASES["lora"] | {"reshard_after_forward": resharded})
        norms = []
        for _ in range(2):
            backend.token_logps(samples, micro_batch_size=2, adapter=False)
            loss = partial(weighted_loss, int(samples.target_mask.values.sum()))
            norms.append(backend.step(samples, loss, micro_batch_size=2).values("")["grad_norm"])
        found.append(norms)
    return found


def test_layers_that_stay_gathered_learn_after_a_look_without_the_adapter(folder: str, tmp_path: Path) -> None:
    for resharded, gathered in run_ranks(2, step_after_the_reference, folder, samples_of(), folder=tmp_path):
        assert gathered == resharded
        assert min(gathered) > 0
