"""Writes turns.json: the episodes that ms-swift's own schedulers make of a model that writes what a script says.

python -m tests.golden.ms_swift.record_turns FOLDER > tests/golden/ms_swift/turns.json

FOLDER: a clone of ms-swift. Its files rollout/multi_turn.py, gym_env.py and agent_loop.py and the plugin of its example
frozen_lake are imported alone; what they take from the rest of ms-swift is of ``swift_stand_in.py``, or below.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.golden.tiny import tiny_tokenizer
from trainers.rewards.ms_swift import ms_swift_accuracy
from trainers.rollout.schedulers import ChatCompletionResponseChoice, ChatMessage, RolloutInferRequest

TOKENIZER = tiny_tokenizer()
Row = dict[str, Any]
ASKED = [{"role": "user", "content": "2 + 2?"}]
LAKES: list[tuple[int, list[str]]] = [  # seeds, and what the model writes, turn by turn
    (seed, [f"<action>{move}</action>" for move in moves])
    for seed, moves in ((0, "up left left".split()), (1, "right right down down up".split()))
] + [(2, ["I do not know", "go left, then", "<action>down</action>", "up", "nothing"])]
MATHS: list[list[str]] = [
    ["It is \\boxed{4}."],
    ["It is \\boxed{5}.", " It is \\boxed{4}."],
    ["<think>five</think><answer>5</answer>", "</think><answer>4</answer>"],
    ["five <answer>\\boxed{5}</answer>", " again \\boxed{5}"],
]
CASES: list[dict[str, Any]] = [
    *({"scheduler": "gym_scheduler", "seed": seed, "said": said, "max_turns": 4} for seed, said in LAKES),
    *({"scheduler": "math_tip_trick", "said": said, "max_turns": 2} for said in MATHS),
]


def row_of(case: dict[str, Any]) -> Row:
    if case["scheduler"] == "gym_scheduler":
        return {"messages": [{"role": "user", "content": "<placeholder>"}], "env_config": {"seed": case["seed"]}}
    return {"messages": [dict(message) for message in ASKED], "solution": "4"}


def module(name: str, **names: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(names, __path__=[])
    sys.modules[name] = made
    return made


def of_file(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def remove_response(messages: list[Any]) -> None:
    if messages and messages[-1]["role"] == "assistant":
        messages.pop()


class Accuracy:
    """ms-swift's MathAccuracy, which rewards.json compares with ours."""

    def __call__(self, completions: list[str], solution: list[str]) -> list[float]:
        return ms_swift_accuracy(completions, solution)


def imported(folder: Path) -> tuple[Any, Any]:
    """ms-swift's ``multi_turn`` and ``agent_loop``, and its plugin in the registry."""
    protocol = {
        "RolloutInferRequest": RolloutInferRequest,
        "ChatCompletionResponseChoice": ChatCompletionResponseChoice,
        **dict.fromkeys(("ChatCompletionResponse", "RequestConfig"), SimpleNamespace),
        "RolloutOutput": SimpleNamespace,
    }
    module("swift")
    module("swift.infer_engine", **protocol)
    module("swift.infer_engine.protocol", **protocol)
    module("swift.template", Messages=list, Tool=dict)
    module("swift.utils", remove_response=remove_response, get_logger=lambda: None)
    module("swift.rewards")
    module("swift.rewards.orm", MathAccuracy=Accuracy)
    module("swift.rollout")
    rollout = folder / "swift" / "rollout"
    of_file("swift.rollout.gym_env", rollout / "gym_env.py")
    turns = of_file("swift.rollout.multi_turn", rollout / "multi_turn.py")
    loop = of_file("swift.rollout.agent_loop", rollout / "agent_loop.py")
    of_file("frozen_lake_plugin", folder / "examples/megatron/grpo/multi_turn/frozen_lake_plugin.py")
    return turns, loop


def main(folder: str) -> None:
    turns, loop = imported(Path(folder))
    recorded = []
    for case in CASES:
        kind = turns.multi_turns[case["scheduler"]]
        scheduler = kind(max_turns=case["max_turns"], gym_env="frozen_lake", tokenizer=TOKENIZER)
        row, said = row_of(case), iter(case["said"])
        data = {name: value for name, value in row.items() if name != "messages"}
        request = RolloutInferRequest(row["messages"], data_dict=data, uuid="one")

        def infer(requests: list[Any], _: Any = None, said: Any = said) -> list[Any]:
            outputs = []
            for _request in requests:
                text = next(said)
                ids = TOKENIZER(text)["input_ids"]
                logprobs = {"content": [{"logprob": -1.0} for _ in ids]}
                choice = ChatCompletionResponseChoice(0, ChatMessage("assistant", text), "stop", logprobs, ids)
                outputs.append(SimpleNamespace(response=SimpleNamespace(choices=[choice])))
            return outputs

        loop.invoke_async_hook(scheduler.on_trajectory_start([request]))
        options = {"request_config": None, "max_turns": case["max_turns"]}
        (out,) = loop.run_multi_turn([request], infer([request]), scheduler, infer, **options)
        names = ("messages", "response_token_ids", "response_loss_mask", "rollout_infos")
        recorded.append({**case, **{name: getattr(out, name) for name in names}})
    print("[", ",\n".join(map(json.dumps, recorded)), "]", sep="\n")


if __name__ == "__main__":
    main(sys.argv[1])
