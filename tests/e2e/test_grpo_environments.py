"""GRPO on completions of several turns: it learns what to say when, wherever the episodes are played."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayhelper import ConfigError
from tests.conftest import RaySession
from tests.e2e.runs import final_bytes, grpo_config, interrupted_after, lines, together
from tests.golden.tiny import save_tiny
from trainers.grpo.config import GRPOConfig
from trainers.grpo.trainer import GRPOTrainer
from trainers.rollout.environments import Reply
from trainers.sft.config import SFTConfig
from trainers.sft.trainer import SFTTrainer

LETTERS = "abcd"


class Alphabet:
    """Wants an a, then, asked for more, a b. Each is worth a half."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self.wanted = iter("ab")

    async def step(self, text: str) -> Reply:
        wanted = next(self.wanted)
        return Reply("" if wanted == "b" else "more: ", reward=0.5 * (text == wanted))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One that has learned to write single letters, any of four, whatever is before them."""
    folder = tmp_path_factory.mktemp("letters")
    prompts = ["say: ", *(f"say: {letter}<|im_end|>more: " for letter in LETTERS)]
    config = SFTConfig(
        model=save_tiny(folder / "untrained"),
        dataset=[{"prompt": p, "completion": letter} for p, letter in itertools.product(prompts, LETTERS)],
        output_dir=str(folder),
        learning_rate=1e-2,
        per_device_train_batch_size=20,
        max_steps=30,
        save_steps=0,
        report_to=["none"],
    )
    SFTTrainer(config).train()
    return str(folder / "final")


def episodes_config(model: str, folder: Path, **keys: Any) -> GRPOConfig:
    settings: dict[str, Any] = {
        "dataset": [{"prompt": "say: "}] * 8,
        "eval_dataset": None,
        "environment": Alphabet,
        "reward_funcs": [],
        "reward_weights": None,
        "num_generations": 8,
        "generation_batch_size": None,
        "global_batch_size": 64,
        "per_device_train_batch_size": 64,
        "max_completion_length": 16,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "num_iterations": 1,
        "beta": 0.0,
        "num_train_epochs": 12,
    }
    return grpo_config(model, folder, **settings | keys)


def test_it_learns_what_to_say_in_each_turn(model: str, tmp_path: Path) -> None:
    GRPOTrainer(episodes_config(model, tmp_path, seed=0)).train()
    told = lines(tmp_path)
    assert told[0]["reward"] == told[0]["rewards/environment/mean"] < 0.4
    assert np.mean([line["reward"] for line in told[-3:]]) > 0.85
    assert told[-1]["num_turns"] == pytest.approx(2.0, abs=0.1)
    assert told[-1]["tools/call_frequency"] == 0.0


def test_a_resumed_run_plays_the_same_episodes(model: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"num_train_epochs": 4, "save_steps": 2}
    GRPOTrainer(episodes_config(model, tmp_path / "whole", **keys)).train()
    with interrupted_after(3), pytest.raises(KeyboardInterrupt):
        GRPOTrainer(episodes_config(model, tmp_path / "parted", **keys)).train()
    GRPOTrainer(episodes_config(model, tmp_path / "parted", **keys, resume_from_checkpoint="auto")).train()
    assert lines(tmp_path / "parted") == lines(tmp_path / "whole")
    assert final_bytes(tmp_path / "parted") == final_bytes(tmp_path / "whole")


def test_two_workers_with_weights_in_shards_play_at_their_own_pace(
    model: str, tmp_path: Path, ray_session: RaySession
) -> None:
    """One worker's episodes end after a turn, the other's have two: the engine is called unequally often."""
    rows = [{"prompt": "say: ", "turns": turns} for turns in (1, 2)]
    keys: dict[str, Any] = {
        "dataset": rows,
        "shuffle_dataset": False,
        "environment": "tests.e2e.test_grpo_environments.Turns",
    }
    keys |= {"global_batch_size": 16, "per_device_train_batch_size": 4, "num_train_epochs": 2}
    with ray_session(together(2)):
        GRPOTrainer(episodes_config(model, tmp_path / "one", **keys)).train()
        GRPOTrainer(episodes_config(model, tmp_path / "other", **keys)).train()
    assert lines(tmp_path / "one") == lines(tmp_path / "other")
    assert final_bytes(tmp_path / "one") == final_bytes(tmp_path / "other")
    assert lines(tmp_path / "one")[0]["num_turns"] == pytest.approx(1.5, abs=0.2)


class Turns(Alphabet):
    """As many turns as the row says."""

    def reset(self, row: Mapping[str, Any]) -> None:
        super().reset(row)
        self.num_left = row["turns"]

    async def step(self, text: str) -> Reply:
        self.num_left -= 1
        return Reply("" if not self.num_left else "more: ", reward=float(text == "a"))


def triple(a: int) -> int:
    """Three times a number.

    Args:
        a: The number.
    """
    return 3 * a


def test_the_prompt_shows_the_tools(model: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"environment": None, "tools": [triple], "reward_funcs": ["tests.e2e.runs.evenness"]}
    with pytest.raises(ConfigError, match="the chat template writes the tools: prompts must be conversations"):
        GRPOTrainer(episodes_config(model, tmp_path, **keys))
    template = "{{ tools | tojson }}{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
    keys |= {"dataset": [{"prompt": [{"role": "user", "content": "?"}]}], "chat_template": template, "max_steps": 1}
    keys |= {"global_batch_size": 8}
    trainer = GRPOTrainer(episodes_config(model, tmp_path, **keys))
    trainer.train()
    starts = trainer.generator.starts(trainer.rows, trainer.tokenizer, np.arange(len(trainer.rows)))
    rollouts = trainer.generator.complete(starts, 0, temperature=1.0)
    shown = trainer.tokenizer.decode(rollouts.prompt_ids[0])
    assert '"name": "triple"' in shown
    assert "The number." in shown
    assert shown.endswith("user: ?<|im_end|>")


def test_a_wrong_environment_is_told_before_anything_starts(model: str, tmp_path: Path) -> None:
    for keys, told in [
        ({"environment": "alphabett"}, "environment: unknown environment 'alphabett'"),
        ({"environment": None, "tools": ["nowhere.tool"]}, "tools: unknown tool 'nowhere.tool'"),
    ]:
        with pytest.raises(ConfigError, match=told):
            GRPOTrainer.check(episodes_config(model, tmp_path, **keys), None)
