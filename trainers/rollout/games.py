"""Games that ``gym_scheduler`` plays, one object per episode: the class that a plugin's games have, and ``math_env``.

envs["name"] = Class          # in a plugin; then ``gym_env: name``
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainers.plugins import GAMES

if TYPE_CHECKING:
    from trainers.rollout.environments import Message
    from trainers.rollout.schedulers import RolloutInferRequest

MOST_TOKENS = 2048  # of a conversation of ``math_env``


class Env:
    """One game of ``gym_scheduler``, made of the ``env_config`` of a row; its methods are async."""

    def __init__(self, env_config: Any) -> None:
        self.env_config = env_config

    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        """The first observation, information, and the system message."""
        raise NotImplementedError(f"{type(self).__name__} has no reset")

    async def step(self, action: list[Message]) -> tuple[str, float, bool, dict[str, Any]]:
        """The next observation, the reward, whether the game is over, and information."""
        raise NotImplementedError(f"{type(self).__name__} has no step")

    async def close(self) -> None:
        """Nothing more is asked of the game."""


class MathEnv(Env):
    """Asks for another try until the answer is right: ``math_env``. Texts and rewards are ms-swift's.

    The question is the column ``problem``, or the last turn of the user. The answer is compared with ``solution`` by
    ``ms_swift_accuracy``: 1.0 where it is right. A conversation of ``MOST_TOKENS`` tokens ends too. They are counted by
    the model's own tokenizer, where ms-swift takes Qwen2.5-3B-Instruct's for every model.
    """

    tips_prompt = "The answer is not correct, It seems You made a mistake, you need to recheck very carefully."
    lines = (
        "A conversation between User and Assistant.",
        "The user asks a question, and the Assistant solves it.",
        "The assistant first thinks about the reasoning process in the mind and then provides the user with "
        "the answer.",
        "The reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags,",
        "respectively, i.e., <think> reasoning process here </think><answer> answer here </answer>",
        "",
    )
    tokenizer: Any = None  # set by the scheduler
    solution: str = ""

    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        row = config.data_dict
        if row.get("solution") is None:
            raise ValueError("math_env compares with the column 'solution', and a row has none. Add it.")
        self.solution = row["solution"]
        asked = [message["content"] for message in config.messages if message["role"] == "user"]
        problem = row.get("problem") or (asked[-1] if asked else None)
        if problem is None:
            raise ValueError("math_env needs the column 'problem' or the turn of the user, and a row has neither.")
        return problem, {}, "\n        ".join(self.lines)  # indented, as it is in ms-swift

    async def step(self, action: list[Message]) -> tuple[str, float, bool, dict[str, Any]]:
        from trainers.rewards.ms_swift import ms_swift_accuracy

        is_right = ms_swift_accuracy([action[-1]["content"]], [self.solution])[0] == 1.0
        infos: dict[str, Any] = {"math_reward": float(is_right)}
        is_long = self._is_long(action)
        if is_right or is_long:
            infos["stop_reason"] = "Correct" if is_right else "Exceeded maximum length"
        return self.tips_prompt, float(is_right), is_right or is_long, infos

    def _is_long(self, messages: Sequence[Message]) -> bool:
        if self.tokenizer is None:
            return False
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False)
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"]) >= MOST_TOKENS


GAMES.register("math_env")(MathEnv)
