"""What is tried of a model: each cell of the matrix compares a tiny model with an oracle, and says what came out.

``ok``; ``refused: ...``, a line that says so before anything is trained; ``fails: ...`` otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayhelper import ConfigError
from tests.backends.batches import largest_difference, mean_loss, packed, plain_scores, samples_of, weights_of
from tests.conftest import without_runtime
from tests.e2e.runs import lines, sft_config
from tests.e2e.test_vllm_runs import VLLM, LedgerTrainer, greedy_config
from tests.models.architectures import tiny
from tests.rollout.prompts import as_sequences, prompts_of
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.batch import Sequences
from trainers.rollout.base import Sampling
from trainers.sft.trainer import SFTTrainer

OWN, PADDED, PACKED, LORA = "log-probabilities", "SFT", "SFT packed", "LoRA"
HF, HF_COOL, VLLM_RUN, VLLM_COOL = "GRPO, hf", "hf at 0.7", "GRPO, vLLM", "vLLM at 0.7"
FAST = (OWN, PADDED, PACKED, LORA, HF, HF_COOL)
CELLS = (*FAST, VLLM_RUN, VLLM_COOL)
SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "num_training_steps": 4, "adam_epsilon": 1e-4, "max_grad_norm": 0.0}
ROWS = [[0, 1, 2], [3], [4, 5], [6, 7]]
COOL = 0.7
NOT_TRIED = "not tried"


def fast_cells(name: str, folder: str, place: Path) -> dict[str, str]:
    """All that runs without vLLM; ``place``: an empty folder."""
    return {
        OWN: told(own_logits, name, folder),
        PADDED: told(sft, name, folder, place / "sft"),
        PACKED: told(sft_packed, folder),
        LORA: told(lora, folder),
        **rollouts(name, folder, place / "hf", (HF, HF_COOL), {}),
    }


def vllm_cells(name: str, folder: str, place: Path) -> dict[str, str]:
    """With vLLM beside training in this process: one engine."""
    return rollouts(name, folder, place / "vllm", (VLLM_RUN, VLLM_COOL), VLLM)


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
    trainer = SFTTrainer(sft_config(folder, place, max_steps=2, global_batch_size=11, learning_rate=1e-3))
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


def rollouts(name: str, folder: str, place: Path, cells: tuple[str, str], keys: dict[str, Any]) -> dict[str, str]:
    """A run of GRPO, and what its engine then says of its own tokens at both temperatures, against the policy."""
    found = dict.fromkeys(cells, NOT_TRIED)
    with without_runtime():
        try:
            trainer = LedgerTrainer(greedy_config(folder, place, max_steps=2, top_k=0, **keys))
            found[cells[0]] = told(trainer.train)
            if found[cells[0]] != "ok":
                found[cells[1]] = found[cells[0]]
                return found
            engine: Any = trainer.generator.engine
        except Exception as error:
            return dict.fromkeys(cells, told(partial(_raise, error)))
        with closing(engine) if keys else nullcontext():
            trainer.generator.update()
            for cell, temperature in zip(cells, (1.0, COOL), strict=True):
                found[cell] = told(_engine_agrees, trainer, temperature)
    return found


def _raise(error: Exception) -> None:
    raise error


def _engine_agrees(trainer: LedgerTrainer, temperature: float) -> None:
    sampling = Sampling(max_completion_length=10, temperature=temperature)
    drawn = trainer.generator.engine.generate(prompts_of(), sampling, seed=3)  # type: ignore[union-attr]
    expected = trainer.policy.built.token_logps(as_sequences(drawn), micro_batch_size=3, temperature=temperature)
    np.testing.assert_allclose(drawn.rollout_logps.values, expected.values, atol=2e-3)
    assert expected.values.std() > 0.1, "all tokens are alike: nothing was tried"
