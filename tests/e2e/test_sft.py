"""SFT learns what completions say, and would not if it looked one token off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.runs import TEXTS, lines, sft_config
from tests.golden.tiny import save_tiny, tiny_model, tiny_tokenizer
from trainers.backends.scores import inputs
from trainers.data.packs import batches_of
from trainers.sft.trainer import SFTTrainer

LETTERS = "abcdefgh"


def answer(letter: str) -> str:
    """The letter three further on, around the end."""
    return LETTERS[(LETTERS.index(letter) + 3) % len(LETTERS)]


def accuracy_after_training(seed: int, folder: Path) -> float:
    """The share of letters whose answer the trained model finds likeliest."""
    rows = [{"prompt": f"{letter}=", "completion": answer(letter)} for letter in LETTERS]
    keys: dict[str, Any] = {"learning_rate": 1e-2, "max_steps": 40, "global_batch_size": 8, "seed": seed}
    config = sft_config(save_tiny(folder / "model", seed=seed), folder / "out", **keys)
    trainer = SFTTrainer(type(config)(**{**vars(config), "dataset": rows}))
    trainer.train()
    tokenizer, model = tiny_tokenizer(), trainer.policy.built.module.eval()
    right = 0
    for letter in LETTERS:
        with torch.no_grad():
            best = int(model(torch.tensor([tokenizer(f"{letter}=")["input_ids"]])).logits[0, -1].argmax())
        right += tokenizer.decode([best]) == answer(letter)
    return right / len(LETTERS)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_completions_are_learned(seed: int, tmp_path: Path) -> None:
    assert accuracy_after_training(seed, tmp_path) > 0.9


def test_they_are_not_if_targets_are_scored_one_token_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = inputs.model_inputs

    def one_off(*args: Any, **kwargs: Any) -> inputs.Inputs:
        found = right(*args, **kwargs)
        return found._replace(places_N=found.places_N - 1)

    monkeypatch.setattr("trainers.backends.fsdp.scoring.model_inputs", one_off)
    assert accuracy_after_training(0, tmp_path) < 0.5


WEIGHED = [  # pieces of completions, and how much their tokens count
    [("so ", 1.0), ("Action:", 2.0), (" look ", 2.0), ("Observation:", 2.0), (" 3 ", 0.0), ("Thought: ok", 1.0)],
    [("no", 1.0)],
    [("Action Input:", 2.0), ("é", 2.0)],
]


def weighed_loss(model: torch.nn.Module) -> torch.Tensor:
    """By a loop over tokens: sum(weight x nll) / number of tokens that count."""
    tokenizer, total, count = tiny_tokenizer(), torch.zeros(()), 0
    for pieces in WEIGHED:
        ids = tokenizer("ask")["input_ids"]
        for text, weight in [*pieces, ("<|im_end|>", 1.0)]:
            for token in tokenizer(text)["input_ids"]:
                nll = -model(torch.tensor([ids])).logits[0, -1].log_softmax(0)[token]
                ids.append(token)
                total, count = total + weight * nll, count + (weight > 0)
    return total / count


@pytest.mark.parametrize(
    "keys",
    [{}, {"packing": True, "max_length": 200, "global_batch_size": 1}, {"streaming": True, "shuffle_dataset": False}],
    ids=["rows", "packed", "streamed"],
)
def test_weighted_tokens_give_the_loss_and_the_gradient_of_a_loop_over_them(tmp_path: Path, keys: Any) -> None:
    model = save_tiny(tmp_path / "model")
    rows = [{"prompt": "ask", "completion": "".join(text for text, _ in pieces)} for pieces in WEIGHED]
    settings: dict[str, Any] = {"max_steps": 1, "global_batch_size": 3, "warmup_steps": 0, "loss_scale": "react"}
    settings |= {"dataset": rows, "eval_dataset": rows, "learning_rate": 1e-12}
    SFTTrainer(sft_config(model, tmp_path / "run", **settings | keys)).train()
    found = {name: value for line in lines(tmp_path / "run") for name, value in line.items()}

    naive = tiny_model()
    loss = weighed_loss(naive)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = loss.item()
    norm = torch.stack([p.grad.norm() for p in naive.parameters() if p.grad is not None]).norm()
    assert found["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    assert found["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_rows_that_are_grouped_by_length_are_learned_in_that_order(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    trainer = SFTTrainer(sft_config(model, tmp_path / "run", group_by_length=True, num_train_epochs=1))
    lengths = trainer.sequences.input_ids.lengths
    trainer.train()

    def tokens(by_length: bool) -> list[int]:
        batches = batches_of(lengths, 4, seed=7, shuffle=True, by_length=by_length)
        return np.cumsum([lengths[batches[step]].sum() for step in range(3)]).tolist()

    seen = [line["num_tokens"] for line in lines(tmp_path / "run") if "loss" in line]
    assert seen == tokens(by_length=True) != tokens(by_length=False)


def test_an_evaluation_has_the_first_sequences_alone(tmp_path: Path) -> None:
    rows = [{"text": text} for text in TEXTS[:5]]
    trainer = SFTTrainer(
        sft_config(save_tiny(tmp_path / "model"), tmp_path, eval_dataset=rows, eval_steps=1, max_eval_sequences=2)
    )
    assert trainer.eval_sequences is not None
    assert trainer.eval_sequences == trainer.read(rows, "test")[:2]


def test_noise_is_on_embeddings_in_training_alone(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    keys: dict[str, Any] = {"learning_rate": 0.0, "max_steps": 1, "eval_dataset": [{"text": text} for text in TEXTS]}
    for name, alpha in (("none", None), ("zero", 0.0), ("noise", 500.0)):
        SFTTrainer(sft_config(model, tmp_path / name, neftune_noise_alpha=alpha, **keys)).train()
    (loss, evaluated), zero, (noisy_loss, noisy_evaluated) = (
        [line[key] for line in lines(tmp_path / name) for key in ("loss", "eval_loss") if key in line]
        for name in ("none", "zero", "noise")
    )
    assert zero == [loss, evaluated]
    assert noisy_evaluated == evaluated
    assert abs(noisy_loss - loss) > 0.01
