"""What a person sees of a run while it goes on: a bar at the bottom, and above it lines that stay.

    step 20/220 |███        | reward 0.31, loss -0.02, 16,606 tokens/s | 0:00:15 done, 0:02:31 left
    step 20: reward 0.3125  loss -0.0212  completions/mean_length 3.589
    evaluation  step   loss  rewards/exact_answer/mean
                  0  2.3148                      0.248
                 40  1.9912                      0.502

The bar is on stderr, and only where that is a terminal. The lines are on stdout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

EVAL = "eval_"
TOKENS = "throughput/tokens_per_second"
FORMAT = "step {n_fmt}/{total_fmt} |{bar:20}| {postfix[0]}{elapsed} done, {remaining} left"
ASIDE = re.compile(
    r"std$|frac_|kv_cache|/(min|max)_|terminated"
)  # of an evaluation what the page shows, not the console
WIDTH = 118  # of a row of an evaluation; further numbers go to further rows
HEAD_EVERY = 20  # lines after which the head of evaluations is written again


class Console:
    """``headline`` names the few numbers that the bar and the lines show; ``logging_steps`` are between lines."""

    def __init__(self, total_steps: int, first_step: int, headline: tuple[str, ...], logging_steps: int) -> None:
        from tqdm.auto import tqdm

        self.headline, self.logging_steps = headline, logging_steps
        self.shown: dict[str, float] = {}  # since the last line: not every step has a reward
        self.head: tuple[str, ...] = ()  # of the evaluations above
        self.lines_since_head = 0
        # None: no bar where stderr is a file; the lines are enough there
        self.bar: Any = tqdm(
            total=total_steps, initial=first_step, dynamic_ncols=True, disable=None, bar_format=FORMAT, postfix=[""]
        )

    def write(self, text: str) -> None:
        """A text that stays, above the bar."""
        self.lines_since_head += text.count("\n") + 1
        self.bar.write(text)

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        """Moves the bar, and writes a line if one is due."""
        self.shown |= {name: numbers[name] for name in self.headline if name in numbers}
        shown = {name: self.shown[name] for name in self.headline if name in self.shown}
        told = [f"{name} {value:.4g}" for name, value in shown.items()]
        if TOKENS in numbers:
            told.append(f"{numbers[TOKENS]:,.0f} tokens/s")
        self.bar.postfix = [f"{', '.join(told)} | " if told else ""]
        self.bar.update(1)
        if step % self.logging_steps == 0:
            self.write(f"step {step}: " + "  ".join(f"{name} {value:.4g}" for name, value in shown.items()))
            self.shown = {}

    def evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        """A row of numbers below those of the evaluation before."""
        named = {name.removeprefix(EVAL): f"{value:.4g}" for name, value in numbers.items() if not ASIDE.search(name)}
        named = dict(sorted(named.items(), key=lambda one: "completions/" in one[0]))  # what is judged comes first
        widths = {name: max(len(name), 8) for name in named}
        rows: list[list[str]] = [[]]
        for name in named:
            if rows[-1] and sum(widths[one] + 2 for one in (*rows[-1], name)) > WIDTH - 18:
                rows.append([])
            rows[-1].append(name)
        for names in rows:
            if tuple(names) != self.head or self.lines_since_head > HEAD_EVERY:
                self.write("evaluation  step" + "".join(f"  {name:>{widths[name]}}" for name in names))
                self.head, self.lines_since_head = tuple(names), 0
            self.write(f"{step:>16}" + "".join(f"  {named[name]:>{widths[name]}}" for name in names))

    def close(self) -> None:
        self.bar.close()
