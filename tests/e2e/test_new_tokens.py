"""``new_special_tokens``: tokenizer and model grow together, in every model and every folder of a run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rayhelper import ConfigError
from tests.e2e.runs import dpo_config, final_bytes, final_weights, gkd_config, grpo_config, lines, sft_config
from tests.golden.tiny import save_tiny, tiny_model
from trainers.configuration.values import read_tokens
from trainers.dpo.trainer import DPOTrainer
from trainers.gkd.trainer import GKDTrainer
from trainers.grpo.trainer import GRPOTrainer
from trainers.sft.trainer import SFTTrainer

TOKENS = ["<tool>", "<|note|>"]
TEXTS = ["a<tool>b<|note|>", "<|note|>no one<tool>"]
PLAIN: dict[str, Any] = {
    "dataset": [{"text": text} for text in TEXTS],
    "new_special_tokens": TOKENS,
    "global_batch_size": 2,
    "num_train_epochs": 3,
    "lr_scheduler_type": "constant",
    "learning_rate": 1e-2,
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "adam_epsilon": 1e-3,  # above the rounding errors of gradients
    "max_grad_norm": 0.0,
}
LORA: dict[str, Any] = {"tuner_type": "lora", "lora_rank": 4}
WHOLE: dict[str, Any] = {"lora_kwargs": {"modules_to_save": ["embed_tokens", "lm_head"]}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


def grown_by_transformers(model: str) -> tuple[Any, Any]:
    """The model and the tokenizer, as transformers alone makes them larger."""
    tokenizer, grown = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    torch.manual_seed(7)
    grown.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=128)
    return grown, tokenizer


def test_three_steps_are_those_of_a_plain_loop_over_a_model_that_transformers_resized(
    model: str, tmp_path: Path
) -> None:
    SFTTrainer(sft_config(model, tmp_path, **PLAIN)).train()
    plain, tokenizer = grown_by_transformers(model)
    assert plain.get_input_embeddings().weight.shape[0] == 384
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0)
    encoded = [torch.tensor([tokenizer(text + "<|im_end|>")["input_ids"]]) for text in TEXTS]
    for _ in range(3):
        logps = [plain(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]) for ids in encoded]
        optimizer.zero_grad()
        (-torch.cat(logps).mean()).backward()
        optimizer.step()
    final = final_weights(tmp_path)
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(final[name], weight, atol=1e-6, rtol=0)
    read = AutoTokenizer.from_pretrained(tmp_path / "final")
    assert read("a<tool>")["input_ids"][-1] == 260
    assert read.decode(read("a<tool>b<|im_start|>")["input_ids"], skip_special_tokens=True) == "ab"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "final").config.vocab_size == 384


@pytest.mark.parametrize("keys", [{}, LORA | WHOLE, LORA], ids=["full", "lora, embeddings", "lora"])
def test_a_resumed_run_has_the_same_tokens_and_rows(model: str, tmp_path: Path, keys: dict[str, Any]) -> None:
    SFTTrainer(sft_config(model, tmp_path / "run", **PLAIN | keys, save_steps=2)).train()
    whole = final_bytes(tmp_path / "run")
    (tmp_path / "run" / "final").rename(tmp_path / "elsewhere")
    again = sft_config(model, tmp_path / "run", **PLAIN | keys, save_steps=2, resume_from_checkpoint=True)
    resumed = SFTTrainer(again)
    resumed.train()
    assert final_bytes(tmp_path / "run") == whole
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "checkpoint-2")("<tool>")["input_ids"] == [260]
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model_with_new_tokens").state_dict()
    rows = [weights["model.embed_tokens.weight"] for weights in (before, final_weights(tmp_path / "run"))]
    assert torch.equal(*rows) is (keys == LORA)


def test_a_model_that_has_rows_to_spare_keeps_them(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", vocab_size=300)
    trainer = SFTTrainer(sft_config(model, tmp_path / "run", **PLAIN))
    assert trainer.model_path == model
    trainer.train()
    assert final_weights(tmp_path / "run")["lm_head.weight"].shape[0] == 300
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "final")("<tool>")["input_ids"] == [260]


@pytest.mark.parametrize("named", [False, True])
def test_a_reference_and_a_teacher_that_are_the_policy_know_the_tokens(model: str, tmp_path: Path, named: bool) -> None:
    pairs = [{"prompt": "a", "chosen": "<tool>", "rejected": "b<|note|>"}]
    keys: dict[str, Any] = {"dataset": pairs, "eval_dataset": None, "max_steps": 1, "new_special_tokens": TOKENS}
    DPOTrainer(dpo_config(model, tmp_path / "dpo", **keys, ref_model=model if named else None)).train()
    assert lines(tmp_path / "dpo")[0]["loss"] == pytest.approx(0.6931472, abs=1e-6)
    keys = {"max_steps": 1, "new_special_tokens": TOKENS, "teacher_model": model, "eval_dataset": None}
    config = gkd_config(model, tmp_path / "gkd", **keys)
    GKDTrainer.check(config, None)
    GKDTrainer(config).train()
    assert final_weights(tmp_path / "gkd")["lm_head.weight"].shape[0] == 384


def test_completions_of_the_grown_model_may_have_the_tokens(model: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"max_steps": 1, "new_special_tokens": TOKENS, "dataset": [{"prompt": "a<tool>"}] * 4}
    trainer = GRPOTrainer(grpo_config(model, tmp_path, **keys, eval_dataset=None))
    assert trainer.tokenizer("<tool>")["input_ids"] == [260]
    trainer.train()
    assert trainer.generator.engine is not None
    assert trainer.generator.tokenizer("<tool>")["input_ids"] == [260]
    assert final_weights(tmp_path)["lm_head.weight"].shape[0] == 384


@pytest.mark.parametrize("key", ["ref_model", "teacher_model"])
def test_another_model_that_lacks_the_tokens_is_refused_before_the_start(model: str, tmp_path: Path, key: str) -> None:
    other = save_tiny(tmp_path / "other", seed=1)
    config_of, trainer = {"ref_model": (dpo_config, DPOTrainer), "teacher_model": (gkd_config, GKDTrainer)}[key]
    config: Any = config_of(model, tmp_path / "run", **{key: other, "new_special_tokens": TOKENS})
    with pytest.raises(ConfigError, match=f"{key}: .* has other tokens than the policy"):
        trainer.check(config, None)  # type: ignore[attr-defined]


def test_an_adapter_that_cannot_learn_the_tokens_is_told_so(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        SFTTrainer.check(sft_config(model, tmp_path, **PLAIN, **LORA, **WHOLE), None)
        assert not caplog.messages
        SFTTrainer.check(sft_config(model, tmp_path, **PLAIN, **LORA), None)
    assert "modules_to_save: [embed_tokens, lm_head]" in caplog.messages[0]


def test_tokens_stand_in_a_list_or_in_files_of_text(tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("<x> <y>\n<tool>\n", encoding="utf-8")
    assert read_tokens(["<tool>", str(tmp_path / "more.txt")]) == ["<tool>", "<x>", "<y>"]
    (tmp_path / "none.txt").write_text("\n")
    for entries, told in (([str(tmp_path / "absent.txt")], "cannot be read"), ([" "], "an empty token")):
        with pytest.raises(ConfigError, match=told):
            sft_config("m", tmp_path, new_special_tokens=entries)
    with pytest.raises(ConfigError, match="an empty token"):
        read_tokens([str(tmp_path / "none.txt")])


def test_new_rows_are_drawn_around_the_mean_of_the_old_ones(model: str, tmp_path: Path) -> None:
    """And depend on the seed."""
    rows = []
    for seed in (7, 7, 8):
        folder = tmp_path / str(len(rows))
        trainer = SFTTrainer(sft_config(model, folder, **PLAIN, seed=seed))
        rows.append(AutoModelForCausalLM.from_pretrained(trainer.model_path).get_input_embeddings().weight.detach())
    old = tiny_model().get_input_embeddings().weight.detach()  # type: ignore[operator]
    assert torch.equal(rows[0][:260], old)
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0][260:], rows[2][260:])
    assert float((rows[0][260:] - old.mean(0)).abs().max()) < 1e-2 * float(old.std())
