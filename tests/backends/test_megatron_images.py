"""Vision models in the megatron backend on the CPU, in every way of cutting a model, against transformers alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from benchmarks.tiny.vision import save_vision
from tests import megatron_on_cpu
from tests.backends.batches import mean_loss
from tests.backends.ranks import run_ranks
from tests.backends.test_megatron import CP, FULL, PLAIN, PP, SP, TP, WHOLE, Layout, told
from tests.images.test_sft import ROWS, transformers_gradients
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.megatron.weights import canonical
from trainers.batch import Sequences
from trainers.data.images.processor import ImageReader
from trainers.data.rows import pack, tokenize_sft

megatron_on_cpu.take_back()

MARGIN = 1e-5
STEPS, MICRO = 2, 2
TRAINING: dict[str, Any] = {
    "vision": {"frozen": []},
    "learning_rate": 1e-2,
    "num_training_steps": 10,
    "weight_decay": 0.1,
    "adam_epsilon": 1e-3,
    "max_grad_norm": 0.5,
}


def batch_of(model: str, rows: list[dict[str, Any]] = ROWS) -> Sequences:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return tokenize_sft(Dataset.from_list(rows), tokenizer, max_length=None, images=ImageReader(tokenizer, model))


def one(folder: str, batch: Sequences, layout: Layout, **settings: Any) -> dict[str, Any]:
    """Log-probabilities, steps, the gradients of the first and weights, as a rank has them."""
    from trainers.backends.megatron.backend import MegatronBackend
    from trainers.backends.megatron.settings import MegatronSettings

    backend: Any = MegatronBackend(folder, settings=MegatronSettings(**layout), **TRAINING | settings)
    index, count, leader = backend.shard
    mine = batch[np.array_split(np.arange(len(batch)), count)[index]]
    logps = backend.token_logps(mine, micro_batch_size=MICRO).values
    gradients: dict[str, torch.Tensor] = {}
    step = backend.optimizer.step

    def watched() -> Any:
        if not gradients and layout.get("use_distributed_optimizer") is False:
            found = backend.weights.named_weights(of=lambda weight: weight.main_grad)
            gradients.update((name, value.clone()) for name, value in found)
        return step()

    backend.optimizer.step = watched
    loss = partial(mean_loss, float(batch.target_mask.values.sum()))
    taken = [backend.step(mine, loss, micro_batch_size=MICRO).values() for _ in range(STEPS)]
    return {
        "index": index,
        "leader": leader,
        "logps": logps,
        "losses": [step["loss"] for step in taken if leader],
        "norms": [step["grad_norm"] for step in taken],
        "gradients": gradients,
        "weights": {name: weight.clone() for name, weight in backend.named_weights()},
    }


def of_layouts(rank: int, folder: str, batch: Sequences, layouts: list[Layout]) -> list[dict[str, Any]]:
    megatron_on_cpu.install()
    found = []
    for layout in layouts:
        given = batch
        if PACKED in layout:
            given = pack(batch, max_length=2 * int(batch.input_ids.lengths.max()))
            assert len(given) < len(batch)
        found.append(one(folder, given, {key: value for key, value in layout.items() if key != PACKED}))
        megatron_on_cpu.end_groups()
    return found


def in_memory(name: str) -> str:
    """What transformers calls the weight in memory."""
    name = canonical(name)
    is_language = name.startswith("model.") and not name.startswith("model.visual.")
    return name.replace("model.", "model.language_model.", 1) if is_language else name


def wanted(folder: str, batch: Sequences) -> dict[str, Any]:
    """The same from transformers in one process."""
    backend = FsdpBackend(folder, **TRAINING)
    logps = backend.token_logps(batch, micro_batch_size=MICRO).values
    loss = partial(mean_loss, float(batch.target_mask.values.sum()))
    taken = [backend.step(batch, loss, micro_batch_size=MICRO).values() for _ in range(STEPS)]
    return {
        "logps": logps,
        "losses": [step["loss"] for step in taken],
        "norms": [step["grad_norm"] for step in taken],
        "weights": {name: weight.clone() for name, weight in backend.named_weights()},
    }


PACKED = "packed rows"
CASES: dict[str, dict[int, list[Layout]]] = {
    "qwen2_5_vl": {1: [PLAIN], 2: [{TP: 2} | WHOLE | PLAIN, {TP: 2} | SP | FULL, {PP: 2} | PLAIN, {}]},
    "qwen3_vl": {1: [PLAIN | FULL], 2: [{TP: 2} | SP | PLAIN | {PACKED: True}, {PP: 2}, {CP: 2}]},
    "qwen3_5": {1: [PLAIN | {PACKED: True}], 2: [{TP: 2} | SP, {PP: 2}]},
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_and_weights_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = save_vision(tmp_path / "model", name)
    batch = batch_of(folder)
    right = wanted(folder, batch)
    loss, gradients = transformers_gradients(folder)
    assert right["losses"][0] == pytest.approx(loss, abs=MARGIN)
    largest = max(1.0, *(float(gradient.abs().max()) for gradient in gradients.values()))
    for num_ranks, layouts in CASES[name].items():
        ranks = run_ranks(num_ranks, of_layouts, folder, batch, layouts, folder=tmp_path)
        for k, layout in enumerate(layouts):
            found = [rank[k] for rank in ranks]
            leaders = sorted((one for one in found if one["leader"]), key=lambda one: one["index"])
            words = told(layout)
            logps = np.concatenate([one["logps"] for one in leaders])
            given, expected = (np.sort(one) if PACKED in layout else one for one in (logps, right["logps"]))
            np.testing.assert_allclose(given, expected, atol=MARGIN, rtol=5e-6, err_msg=words)
            losses = np.sum([one["losses"] for one in leaders], axis=0)
            np.testing.assert_allclose(losses, right["losses"], atol=MARGIN, err_msg=words)
            for one in found:
                np.testing.assert_allclose(one["norms"], right["norms"], atol=MARGIN, err_msg=words)
                assert one["weights"].keys() == right["weights"].keys()
                for key, weight in right["weights"].items():
                    torch.testing.assert_close(one["weights"][key], weight, atol=5e-5, rtol=0, msg=f"{words} {key}")
                for key, gradient in one["gradients"].items():
                    wide = {"atol": MARGIN * largest, "rtol": 0.0}
                    torch.testing.assert_close(gradient, gradients[in_memory(key)], **wide, msg=f"{words} {key}")
