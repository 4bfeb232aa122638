"""Pictures of coloured shapes to be counted, for GRPO of a vision model, and the reward of a right number.

    external_plugins: [examples/grpo/count_shapes.py]
    dataset: count_shapes
    reward_funcs: [external_r1v_acc, format]

Registers the dataset ``count_shapes`` and the reward ``external_r1v_acc``: ms-swift's file for CLEVR in
``examples/ray/grpo`` calls it so. ``format`` is there already. The pictures are drawn here: nothing is downloaded.
"""

from __future__ import annotations

import io
import random
import re
import threading
from collections.abc import Sequence
from typing import Any

from math_verify import parse, verify

from trainers.plugins import register_dataset, register_reward

SIZE = 112  # pixels of a side
CELL = SIZE // 4  # each shape has a cell of its own, so that none covers another
MOST_SHAPES = 6
COLOURS = ("red", "green", "blue", "orange", "purple", "gray")
KINDS = ("square", "circle", "triangle")
QUESTION = "<image>How many {what} are there in the picture?"
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@register_dataset("count_shapes")
def count_shapes(split: str) -> list[dict[str, Any]]:
    """256 pictures to learn from, and 64 others (``test``): each with a question, and the number as its solution."""
    draws = random.Random(split)
    return [drawn_row(draws) for _ in range(64 if split == "test" else 256)]


def drawn_row(draws: random.Random) -> dict[str, Any]:
    """A picture and a question about it: how many shapes there are, or how many of one colour."""
    cells = draws.sample(
        [(x, y) for x in range(0, SIZE, CELL) for y in range(0, SIZE, CELL)], draws.randint(1, MOST_SHAPES)
    )
    shapes = [(cell, draws.choice(KINDS), draws.choice(COLOURS)) for cell in cells]
    colour = draws.choice([None, *COLOURS])
    number = sum(colour in (None, own) for _, _, own in shapes)
    question = QUESTION.format(what="shapes" if colour is None else f"{colour} shapes")
    return {
        "messages": [{"role": "user", "content": question}],
        "images": [picture(shapes)],
        "solution": f"<answer> {number} </answer>",
    }


def picture(shapes: Sequence[tuple[tuple[int, int], str, str]]) -> bytes:
    """A PNG file of shapes, each with the corner of its cell, its kind and its colour."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIZE, SIZE), "white")
    draw = ImageDraw.Draw(image)
    for (x, y), kind, colour in shapes:
        left, top, right, bottom = x + 4, y + 4, x + CELL - 4, y + CELL - 4
        if kind == "square":
            draw.rectangle((left, top, right, bottom), fill=colour)
        elif kind == "circle":
            draw.ellipse((left, top, right, bottom), fill=colour)
        else:
            draw.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], fill=colour)
    written = io.BytesIO()
    image.save(written, "PNG")
    return written.getvalue()


@register_reward("external_r1v_acc")
def external_r1v_acc(completions: Sequence[Any], solution: Sequence[str], **_: Any) -> list[float]:
    """1.0 where a completion says what its solution says, else 0.0.

    Both are read as mathematics, and if these are not equal as the texts in their ``<answer>`` tags.
    """
    return [
        float(_same_number(_text(completion), truth) or _answer(_text(completion)) == _answer(truth))
        for completion, truth in zip(completions, solution, strict=True)
    ]


def _text(completion: Any) -> str:
    """What the model wrote: a completion of a conversation is a list of messages."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _answer(text: str) -> str:
    match = ANSWER.search(text)
    return (match[1] if match else text).strip()


def _same_number(text: str, truth: str) -> bool:
    # math_verify limits its time by an alarm, which the main thread alone has
    no_alarm = threading.current_thread() is not threading.main_thread()
    try:
        wanted, found = (parse(one, **({"parsing_timeout": None} if no_alarm else {})) for one in (truth, text))
        return bool(wanted) and bool(verify(wanted, found, **({"timeout_seconds": None} if no_alarm else {})))
    except Exception:  # of sympy, by what a model wrote
        return False
