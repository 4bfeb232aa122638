"""Writes weights.json: the weights that ms-swift's own template gives the tokens of conversations, by loss_scale.

pip install ms-swift==4.6.0 --no-deps --target FOLDER      # and modelscope, modelscope_hub, cryptography, cffi
PYTHONPATH=FOLDER python -m tests.golden.ms_swift.record_weights > tests/golden/ms_swift/weights.json

Of agentflan the pieces of one answer are recorded: ms-swift's template ends with a TypeError, as it looks for the
questions of agentflan in the end of an answer, which has none.
"""

from __future__ import annotations

import json
from typing import Any

from tests.golden.ms_swift.record_answers import encoded_by_ms_swift

ASKED = {"role": "user", "content": "how warm? <tool_call>no</tool_call> Action: none"}
ANSWERS = {
    "hermes": 'I look.\n<tool_call>\n{"name": "w"}\n</tool_call>\n<tool_call>{}</tool_call> so',
    "react": "Thought: hm\nAction: look\nAction Input: {}\nObservation: 3\nThought: ok\nFinal Answer: é 3",
    "alpha_umi": "Thought: hm\nNext: caller\nAction:x",
    "qwen": "so ✿FUNCTION✿: look\n✿ARGS✿: {}\n✿RESULT✿: 3\n✿RETURN✿: three",
    "agentflan": "Name: a Command b ACTION: c Tool:d Arguments: e action input f ACTION_INPUT: g Action Input: h "
    "Thought: i Final Answer: j Observation: k Action: l",
}
THOUGHTS = "<think>\n\n</think>\n\n"
QUESTIONS = ("What is the tool you want to use?", "What are the required parameter names for this tool?", "why?")
QUESTIONS += ("What is the value of x?",)


def conversation(*answers: dict[str, Any] | str) -> list[dict[str, Any]]:
    said = [{"role": "assistant", "content": a} if isinstance(a, str) else {"role": "assistant", **a} for a in answers]
    return [message for answer in said for message in (ASKED, answer)]


def cases() -> list[tuple[str, list[dict[str, Any]]]]:
    found = [(name, conversation(ANSWERS[name], "plain")) for name in ANSWERS if name != "agentflan"]
    thoughtful = conversation(THOUGHTS + ANSWERS["react"], THOUGHTS + ANSWERS["hermes"])
    for scale in ("last_round+hermes", "hermes+ignore_empty_think", "ignore_think_prefix+hermes+react", "default+base"):
        found.append((scale, thoughtful))
    ways: list[dict[str, Any]] = [{"loss": False}, {"loss_scale": 0.5}, {"loss_scale": 0.0}, {}]
    found.append(("hermes", conversation(*({"content": ANSWERS["hermes"], **way} for way in ways))))
    return found


def main() -> None:
    from swift.loss_scale import get_loss_scale

    recorded = []
    for scale, messages in cases():
        encoded = encoded_by_ms_swift(messages, scale)
        learned = [label != -100 for label in encoded["labels"]]
        weights = encoded.get("loss_scale") or [float(is_in) for is_in in learned]
        assert learned == [weight > 0 for weight in weights]
        recorded.append(
            {"loss_scale": scale, "messages": messages, "input_ids": encoded["input_ids"], "weights": weights}
        )
    pieces = []
    for query in QUESTIONS:
        texts, weights = get_loss_scale("agentflan").get_loss_scale(ANSWERS["agentflan"], query=query)
        pieces.append({"query": query, "answer": ANSWERS["agentflan"], "pieces": texts, "weights": weights})
    print(json.dumps({"templates": recorded, "agentflan": pieces}))


if __name__ == "__main__":
    main()
