"""Bar charts of benchmarks: what is drawn is what the JSON says."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.bars import main, svg, words

SVG = "{http://www.w3.org/2000/svg}"
QUESTION: dict[str, Any] = {
    "title": "GRPO <step>",
    "unit": "tokens/s",
    "better": "higher",
    "bars": [
        {"label": "ours & more", "value": 4000, "low": 3900, "high": 5000, "ours": True, "group": "short"},
        {"label": "TRL", "value": 1000, "group": "short"},
        {"label": "verl", "value": None, "group": "long"},
    ],
    "card": "H100",
    "commit": "abc1234",
}


def test_bars_are_as_long_as_their_numbers_and_say_them() -> None:
    chart = ElementTree.fromstring(svg(QUESTION))
    widths = [float(bar.attrib["width"]) for bar in chart.iter(f"{SVG}rect")]
    assert widths[0] == pytest.approx(4 * widths[1], rel=1e-3)
    texts = [text.text for text in chart.iter(f"{SVG}text")]
    assert texts == [
        *("GRPO <step>", "tokens/s; higher is better", "short", "ours & more", "4,000", "TRL", "1,000"),
        *("long", "verl", "not measured", "H100, abc1234"),
    ]
    assert max(float(text.attrib["x"]) for text in chart.iter(f"{SVG}text")) < 600, "numbers have room at the right"


def test_a_long_line_below_the_chart_is_broken_within_the_width() -> None:
    command = "python -m benchmarks.real.grpo --shape 1.7b --steps 24, python -m benchmarks.real.sft --shape 0.6b"
    chart = ElementTree.fromstring(svg(QUESTION | {"command": command}))
    below = [text.text or "" for text in chart.iter(f"{SVG}text")][10:]
    assert " ".join(below) == f"H100, abc1234, {command}"
    assert max(map(len, below)) * 7 < int(chart.attrib["width"])
    last = max(float(text.attrib["y"]) for text in chart.iter(f"{SVG}text"))
    assert last < int(chart.attrib["viewBox"].split()[3])


def test_the_chart_says_itself_in_words() -> None:
    told = "GRPO <step>. short, ours & more: 4,000 tokens/s; short, TRL: 1,000 tokens/s; long, verl: not measured."
    assert words(QUESTION) == told
    assert ElementTree.fromstring(svg(QUESTION)).findtext(f"{SVG}desc") == told


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"unit": ""}, "it has no 'unit'"),
        ({"better": "more"}, "better must be higher or lower, got 'more'"),
        ({"bars": [{"label": "a"}]}, "a bar needs label and value"),
        ({"bars": [{"label": "a", "value": -1}]}, "must be at least 0"),
        ({"bars": [{"label": "a", "value": float("nan")}]}, "must be at least 0"),
        ({"bars": [{"label": "a", "value": 2, "low": 1}]}, "needs both low and high"),
        ({"bars": [{"label": "a", "value": 2, "low": 3, "high": 4}]}, "low <= value <= high"),
    ],
)
def test_a_question_without_meaning_is_refused(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        svg(QUESTION | changed)


def test_pictures_that_are_not_as_drawn_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "step.json", tmp_path / "plots"
    file.write_text(json.dumps(QUESTION))
    assert main([str(file), "--out", str(out), "--check"]) == 1
    assert main([str(file), "--out", str(out)]) == 0
    assert main([str(file), "--out", str(out), "--check"]) == 0
    file.write_text(json.dumps(QUESTION | {"title": "another"}))
    assert main([str(file), "--out", str(out), "--check"]) == 1
    file.write_text("{")
    assert main([str(file), "--out", str(out)]) == 2
    assert f"error: {file}: " in capsys.readouterr().err


BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
PLAIN = {  # by file, the sides of each group of bars, in order
    "plain_grpo_135m": ("ours:token_budget=4096", "trl"),
    "plain_grpo_0.6b": ("ours", "trl"),
    "plain_grpo_1.7b": ("ours", "trl"),
    "plain_sft_135m": ("ours", "trl"),
    "plain_sft_0.6b": ("ours", "trl"),
}


def test_committed_pictures_are_those_of_the_committed_figures() -> None:
    files = [str(file) for file in sorted((BENCHMARKS / "results").glob("*.json"))]
    assert main([*files, "--out", str(BENCHMARKS / "plots"), "--check"]) == 0


@pytest.mark.parametrize("name", PLAIN)
def test_the_page_and_the_bars_of_plain_runs_are_what_was_measured(name: str) -> None:
    measured = json.loads((BENCHMARKS / "results" / "measured" / f"{name}.json").read_text())
    page = (BENCHMARKS / "results" / "plain_run.md").read_text()
    bars = json.loads((BENCHMARKS / "results" / "plain_run.json").read_text())["bars"]
    assert measured["commit"] in page
    for side, bar in zip(PLAIN[name], bars[2 * list(PLAIN).index(name) :], strict=False):
        found = measured["sides"][side]
        warm = found["steps"][2:] or found["steps"]
        seconds, tokens = (statistics.median(step[key] for step in warm) for key in ("seconds", "tokens"))
        row = next(
            line
            for line in page.splitlines()
            if f"{bar['value']:,}" in line and line.lower().startswith(f"| {side[:3]}")
        )
        told = [word.strip("* ") for word in row.replace("(", "|").split("|")]
        assert f"{seconds:.2f}" in told or f"{seconds:.3f}" in told
        assert f"{found['peak_gib']:.1f} GiB" in told
        assert f"{found['ends'][0]:.1f} s" in told
        whole = sum(step["tokens"] for step in warm) / sum(step["seconds"] for step in warm)
        assert bar["value"] == pytest.approx(whole if "sft" in name else tokens / seconds, rel=5e-3)


def test_the_results_are_short_and_link_to_what_is_there() -> None:
    text = (BENCHMARKS / "RESULTS.md").read_text()
    assert len(text.splitlines()) <= 80
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links
    assert [link for link in links if not (BENCHMARKS / link).exists()] == []
    pages = {file.relative_to(BENCHMARKS).as_posix() for file in BENCHMARKS.glob("results/*.md")}
    assert pages <= set(links), "a table that no row leads to"
