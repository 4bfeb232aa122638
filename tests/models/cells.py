"""What is tried of a model: each cell of the matrix compares a tiny model with an oracle, and says what came out.

``ok``; ``refused: ...``, a line that says so before anything is trained; ``fails: ...`` otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.tiny.architectures import tiny
from rayhelper import ConfigError, RayHelper
from tests.backends.batches import largest_difference, mean_loss, packed, plain_scores, samples_of, weights_of
from tests.conftest import without_runtime
from tests.e2e.runs import lines, sft_config
from tests.e2e.test_vllm_runs import LEARNER, ROLES, VLLM, greedy_config
from tests.rollout.prompts import as_sequences, prompts_of
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.batch import Rollouts, Sequences
from trainers.grpo.trainer import GRPOTrainer
from trainers.rollout.base import Sampling
from trainers.sft.trainer import SFTTrainer

OWN, PADDED, PACKED, LORA = "log-probabilities", "SFT", "SFT packed", "LoRA"
HF, HF_COOL, VLLM_RUN, VLLM_COOL = "GRPO, hf", "hf at 0.7", "GRPO, vLLM", "vLLM at 0.7"
APART, APART_COOL = "vLLM apart", "apart at 0.7"
MERGED, ADAPTER = "LoRA, vLLM", "adapter in vLLM"
FAST = (OWN, PADDED, PACKED, LORA, HF, HF_COOL)
BESIDE = (VLLM_RUN, VLLM_COOL, MERGED, ADAPTER)  # vLLM in the process that trains
AWAY = (APART, APART_COOL)  # vLLM on a worker of its own
CELLS = (*FAST, VLLM_RUN, VLLM_COOL, *AWAY, MERGED, ADAPTER)
SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "num_training_steps": 4, "adam_epsilon": 1e-4, "max_grad_norm": 0.0}
ROWS = [[0, 1, 2], [3], [4, 5], [6, 7]]
COOL = 0.7
NOT_TRIED = "not tried"
TUNED: dict[str, Any] = {"tuner_type": "lora", "lora_rank": 4, "lora_alpha": 16, "learning_rate": 3e-2}
GROUPS = {
    "learner": {"device": "CPU", "ranks": 1, "workers": LEARNER},
    "engine": {"device": "CPU", "ranks": 1, "workers": ["rollout"], "timeout_s": 400},
}
TOLERANCE = 2e-3  # nats per token, between an engine and the policy


def fast_cells(name: str, folder: str, place: Path) -> dict[str, str]:
    """All that runs without vLLM; ``place``: an empty folder."""
    return {
        OWN: told(own_logits, name, folder),
        PADDED: told(sft, name, folder, place / "sft"),
        PACKED: told(sft_packed, folder),
        LORA: told(lora, folder),
        **rollouts(name, folder, place / "hf", (HF, HF_COOL), {}),
    }


def beside_cells(name: str, folder: str, place: Path) -> dict[str, str]:
    """With vLLM beside training in this process: an engine for each run."""
    found = rollouts(name, folder, place / "vllm", (VLLM_RUN, VLLM_COOL), VLLM)
    for cell, keys in ((MERGED, {}), (ADAPTER, {"vllm_enable_lora": True})):
        both = (cell, f"{cell} at {COOL}")
        tried = rollouts(name, folder, place / cell, both, VLLM | TUNED | keys)
        found[cell] = next((told for told in tried.values() if told != "ok"), "ok")
    return found


def away_cells(name: str, folder: str, place: Path) -> dict[str, str]:
    """With vLLM on a worker of its own; inside a session with ``GROUPS``."""
    return rollouts(name, folder, place / "apart", AWAY, VLLM)


def told(cell: Callable[..., None], *args: Any) -> str:
    """What came out of a cell, in one line."""
    try:
        cell(*args)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        if isinstance(error, ConfigError):
            return f"refused: {first}"
        return f"fails: {type(error).__name__}: {first}"[:200]
    return "ok"


def own_logits(name: str, folder: str) -> None:
    """Log-probabilities are those of the model as transformers builds it, eager, document by document."""
    own = tiny(name)
    own.set_attn_implementation("eager")
    for temperature in (1.0, COOL):
        expected = plain_scores(own, samples_of(), temperature)[0].detach().numpy()
        found = FsdpBackend(folder).token_logps(samples_of(), micro_batch_size=3, temperature=temperature).values
        np.testing.assert_allclose(found, expected, atol=2e-5)
        assert expected.std() > 0.1, "all tokens are alike: nothing was tried"


def sft(name: str, folder: str, place: Path) -> None:
    """Two steps; the first loss is the mean over the model's own logits."""
    trainer = SFTTrainer(
        sft_config(folder, place, max_steps=2, global_batch_size=11, learning_rate=1e-3, disable_dropout=True)
    )
    own = tiny(name)
    own.set_attn_implementation("eager")
    expected = -float(plain_scores(own, trainer.sequences)[0].detach().mean())
    with without_runtime():
        trainer.train()
    first, second = (line["loss"] for line in lines(place))
    assert abs(first - expected) < 1e-4, f"loss {first}, the model's own {expected}"
    assert second < first + 0.1, "the loss rises"


def sft_packed(folder: str) -> None:
    """Loss and weights of a step on packed rows are those of the documents alone."""
    in_rows = _step(FsdpBackend(folder, **SETTINGS), packed(samples_of(), ROWS))
    alone = _step(FsdpBackend(folder, **SETTINGS), samples_of())
    assert abs(in_rows[0] - alone[0]) < 2e-5, f"loss {in_rows[0]}, of the documents alone {alone[0]}"
    assert largest_difference(in_rows[1], alone[1]) < 2e-5, "weights differ from those of the documents alone"


def lora(folder: str) -> None:
    """An adapter of all linear layers lowers the loss."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    backend = FsdpBackend(folder, lora=settings, **SETTINGS | {"learning_rate": 1e-2})
    first, second = (_step(backend, samples_of())[0] for _ in range(2))
    assert second < first, "the loss does not fall"


def _step(backend: FsdpBackend, batch: Sequences) -> tuple[float, dict[str, torch.Tensor]]:
    metrics = backend.step(batch, partial(mean_loss, int(batch.target_mask.values.sum())), micro_batch_size=4)
    return metrics.values()["loss"], weights_of(backend.module)


@RayHelper.worker(group=ROLES)
class MatrixTrainer(GRPOTrainer):
    """Also says what the engine and the policy say of the same tokens."""

    @RayHelper.function(group="rollout", execute="first")
    def drawn(self, temperature: float) -> Rollouts:
        """Completions of the engine, by the weights that it has."""
        sampling = Sampling(max_completion_length=10, temperature=temperature)
        return self.generator.built.generate(prompts_of(), sampling, seed=3)

    @RayHelper.function(group="train", execute="first")
    def said(self, rollouts: Rollouts, temperature: float) -> np.ndarray:
        """The policy's log-probabilities of these completions."""
        found = self.policy.built.token_logps(as_sequences(rollouts), micro_batch_size=3, temperature=temperature)
        return found.values

    @RayHelper.function(group="rollout")
    def close_engine(self) -> None:
        """Of vLLM: the worker outlives the run."""
        if hasattr(self.generator.engine, "close"):
            self.generator.engine.close()


def rollouts(name: str, folder: str, place: Path, cells: tuple[str, str], keys: dict[str, Any]) -> dict[str, str]:
    """A run of GRPO, and what its engine then says of its own tokens at both temperatures, against the policy."""
    found = dict.fromkeys(cells, NOT_TRIED)
    config = greedy_config(folder, place, max_steps=2, top_k=0, **keys)
    try:
        trainer = MatrixTrainer(config)
    except Exception as error:
        return dict.fromkeys(cells, told(partial(_raise, error)))
    try:
        if (trained := told(trainer.train)) != "ok":
            return dict.fromkeys(cells, trained)
        trainer.generator.update()
        for cell, temperature in zip(cells, (1.0, COOL), strict=True):
            found[cell] = told(_engine_agrees, trainer, folder, temperature)
    finally:
        trainer.close_engine()
    return found


def _raise(error: Exception) -> None:
    raise error


def _engine_agrees(trainer: MatrixTrainer, folder: str, temperature: float) -> None:
    drawn = trainer.drawn(temperature)
    expected = trainer.said(drawn, temperature)
    np.testing.assert_allclose(drawn.rollout_logps.values, expected, atol=TOLERANCE)
    assert expected.std() > 0.1, "all tokens are alike: nothing was tried"
    if trainer.config.tuner_type == "lora":
        untrained = FsdpBackend(folder).token_logps(as_sequences(drawn), micro_batch_size=3, temperature=temperature)
        assert np.abs(untrained.values - expected).max() > 10 * TOLERANCE, "the adapter changed too little"
