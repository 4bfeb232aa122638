"""Writes rewards.json: what ms-swift's own reward functions give (its file swift/rewards/orm.py, imported alone).

pip install ms-swift==4.6.0 --no-deps --target FOLDER
python -m tests.golden.ms_swift.record_rewards FOLDER > tests/golden/ms_swift/rewards.json

math_by_sympy is what MathORM gives where sympy reads LaTeX: pip install antlr4-python3-runtime==4.11.1 --target OTHER,
and OTHER in PYTHONPATH. Without it this file keeps the numbers that it has.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

COMPLETIONS = [
    *("<answer>72</answer>", "72", "The answer is \\boxed{72}", "$72$", "<think>a</think><answer>72</answer>"),
    *("<think>a</think>\n<answer>72</answer>\n", "<think>a</think> b <answer>72</answer>"),
    *("x<think>a</think><answer>72</answer>", "<think>a</think><answer>7</answer><answer>72</answer>", ""),
    *("a a a a a a", "one two three one two three one two three", "A b c a B c", "\\frac{1}{2}"),
    *("<answer>\\frac{1}{2}</answer>", "<answer>$\\frac12$</answer>", "\\boxed{0.5}", "<answer>1/2</answer>"),
    *("<answer>\nfour\n</answer>", "<think>a</think><think>b</think><answer>72</answer>"),
]
SOLUTIONS = [
    *["72"] * 13,
    *("1/2", "$\\frac{1}{2}$", "0.5", "\\frac{1}{2}", "<answer>0.5</answer>", "four", "#### 72"),
]
BOXED = [  # completion and last turn of the assistant
    *(("\\boxed{72}", "72"), ("so # Answer\n72", "\\boxed{72}"), ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}")),
    *(("\\boxed{x+1}", "\\boxed{1+x}"), ("0.5", "\\frac{1}{2}"), ("\\(72\\)", "\\[72\\]"), ("", "72")),
    *(("2x", "x+x"), ("71", "72"), ("I do not know", "72"), ("\\boxed{a} \\boxed{b}", "\\boxed{b}")),
]
LENGTHS = [0, 1, 5, 9, 10, 11, 12, 15, 19, 20, 21, 25, 30, 31, 40, 7, 3, 2, 8, 16]
ARGUMENTS = {
    **{"cosine_min_len_value_wrong": -0.5, "cosine_max_len_value_wrong": 0.0, "cosine_min_len_value_correct": 1.0},
    **{"cosine_max_len_value_correct": 0.5, "cosine_max_len": 40, "repetition_n_grams": 3},
    **{"repetition_max_penalty": -1.0, "soft_max_length": 20, "soft_cache_length": 8},
}


def main(folder: str) -> None:
    package, engine = ModuleType("swift"), ModuleType("swift.infer_engine")
    package.__path__ = [str(Path(folder) / "swift")]
    engine.InferRequest = dict  # type: ignore[attr-defined]  # a type of an annotation
    sys.modules |= {"swift": package, "swift.infer_engine": engine}
    spec = importlib.util.spec_from_file_location("swift.rewards.orm", Path(folder) / "swift/rewards/orm.py")
    assert spec is not None
    assert spec.loader is not None
    orm: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(orm)
    arguments, ids = SimpleNamespace(**ARGUMENTS), [[1] * length for length in LENGTHS]
    found = {"completions": COMPLETIONS, "solutions": SOLUTIONS, "lengths": LENGTHS}
    found["accuracy"] = orm.MathAccuracy()(COMPLETIONS, SOLUTIONS)
    found["format"] = orm.Format()(COMPLETIONS)
    found["cosine"] = orm.CosineReward(arguments)(COMPLETIONS, SOLUTIONS, response_token_ids=ids)
    found["repetition"] = orm.RepetitionPenalty(arguments)(COMPLETIONS)
    found["soft_overlong"] = orm.SoftOverlong(arguments)(COMPLETIONS, response_token_ids=ids)
    requests = [SimpleNamespace(messages=[{"role": "assistant", "content": text}]) for text, _ in BOXED]
    before = json.loads((Path(__file__).parent / "rewards.json").read_text(encoding="utf-8"))
    found["boxed"] = BOXED
    for name in ("math", "math_by_sympy"):
        is_so = reads_latex() == (name == "math_by_sympy")
        found[name] = orm.MathORM()(requests, [truth for _, truth in BOXED]) if is_so else before.get(name)
    print(json.dumps(found, indent=1))


def reads_latex() -> bool:
    from sympy.parsing.latex import parse_latex

    try:
        parse_latex("1")
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1])
