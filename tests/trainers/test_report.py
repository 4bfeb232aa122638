"""The page about a run: what it shows, that nothing a model wrote runs in it, and what it says of damaged files."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from tests.trainers.test_run import Nothing, opened, stepped
from trainers.configuration.shared import TrainConfig
from trainers.report.charts import Line, groups, lines, short, smoothed, stack, thinned
from trainers.report.command import main, write
from trainers.report.completions import EACH, chosen, completions
from trainers.report.page import page
from trainers.report.recorded import recorded
from trainers.run import origin
from trainers.run.stopping import Stopped

VOID = {"meta", "input", "br"}
HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">&amp;<!-- "quoted" \'too\' $body ${title}'


class Seen(HTMLParser):
    """What a browser makes of a page: elements with their attributes, and the text of each."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []  # of the elements, at the same places
        self.open: list[int] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        self.texts.append("")
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        place = self.open.pop()
        assert self.elements[place][0] == tag, f"<{self.elements[place][0]}> is closed by </{tag}>"

    def handle_data(self, data: str) -> None:
        for place in self.open:
            self.texts[place] += data

    def all(self, tag: str, kind: str | None = None) -> list[tuple[dict[str, str | None], str]]:
        """Attributes and text of the elements of a tag, and of a class if it is given."""
        found = zip(self.elements, self.texts, strict=True)
        return [
            (attributes, text)
            for (name, attributes), text in found
            if name == tag and (kind is None or kind in (attributes.get("class") or "").split())
        ]


def a_run(folder: Path, *, rows: Sequence[Mapping[str, Any]] = (), **settings: Any) -> Path:
    """The files of a run of four steps, and of an evaluation before and after."""
    folder.mkdir(parents=True)
    found = [{"step": 0, "eval_reward": 0.25, "eval_rewards/right/mean": 0.25, "eval_completions/mean_length": 7}]
    for step in range(1, 5):
        numbers = {"reward": 0.1 * step, "rewards/right/mean": 0.1 * step, "loss": 1 / step, "grad_norm": 2.0}
        times = {"time/step": 3.0, "time/generate": 2.0, "time/update": 1.0, "time/sync": 0.0}
        found.append({"step": step, **numbers, **times, "own/number": 5 * step})
    found.append({"step": 4, "eval_reward": 0.75, "eval_rewards/right/mean": 0.75, "eval_completions/mean_length": 9})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*found, *rows]))
    settings = {"model": "tiny", "learning_rate": 1e-5, "reward_weights": None, "log_completions": True} | settings
    (folder / "config.yaml").write_text(json.dumps(settings))
    start = {"at": "2026-01-01T00:00:00+00:00", "first_step": 0, "command": "rayhelper grpo --config x.yaml"}
    start |= {"versions": {"torch": "2.0"}, "gpus": ["NVIDIA H100"], "commits": {"rayhelper": "abc"}}
    end = {"at": "2026-01-01T01:00:00+00:00", "step": 4, "how": "finished"}
    changed = {"learning_rate": 1e-5}
    told = {"trainer": "grpo", "num_steps": 4, "changed": changed, "starts": [start], "end": end}
    (folder / "run.json").write_text(json.dumps(told))
    return folder


def kept(folder: Path, step: int, columns: Mapping[str, Sequence[Any]]) -> Path:
    file = folder / "completions" / f"completions_{step:05d}.parquet"
    file.parent.mkdir(exist_ok=True)
    pd.DataFrame({"step": step, **columns}).to_parquet(file)
    return file


def shown(*folders: Path) -> Seen:
    return Seen(page([recorded(folder) for folder in folders]))


# What it shows


def test_the_page_says_result_settings_and_how_the_run_was_started(tmp_path: Path) -> None:
    seen = shown(a_run(tmp_path / "first"))
    text = " ".join(seen.all("body")[0][1].split())
    assert "Grpo on tiny; step 4 of 4; finished." in text
    assert [one for _, one in seen.all("h2")] == [
        *("Result", "Curves", "Where the time went", "Completions", "Settings", "How it was run"),
    ]
    assert "eval_rewards/right/mean25.0%75.0%+50.0 points" in [one for _, one in seen.all("tr")]
    for one in ("rayhelper grpo --config x.yaml", "torch 2.0", "NVIDIA H100", "abc", "2026-01-01T00:00:00+00:00"):
        assert one in text
    assert "This run kept no completions. Set log_completions: true" in text


def test_every_number_has_a_curve_and_a_curve_says_its_values_in_words(tmp_path: Path) -> None:
    seen = shown(a_run(tmp_path / "first"))
    told = [attributes["aria-label"] or "" for attributes, _ in seen.all("svg", "drawing")]
    assert "Reward. reward: 0.1 at step 1, 0.4 at step 4, between 0.1 and 0.4." in told
    assert "rewards/right/mean. rewards/right/mean: 0.25 at step 0, 0.75 at step 4, between 0.25 and 0.75." in told
    for name in ("loss", "grad_norm", "own/number"):
        assert [one for one in told if f" {name}: " in one], name
    phases = "Seconds of a step by phase. generate: 2 at step 1, 2 at step 4, between 2 and 2; update: 1 at step 1"
    assert [one for one in told if one.startswith(phases)], "a phase without time is no layer"


def test_without_an_evaluation_first_and_last_steps_are_compared(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "first")
    rows = [json.dumps({"step": step, "loss": 10.0 if step <= 2 else 1.0}) for step in range(1, 21)]
    (folder / "metrics.jsonl").write_text("\n".join(rows))
    (row,) = [one for _, one in shown(folder).all("tr") if one.startswith("loss")]
    assert row.startswith("loss101-9")


def test_two_runs_are_drawn_over_one_another_with_the_keys_that_differ(tmp_path: Path) -> None:
    one = a_run(tmp_path / "one")
    other = a_run(tmp_path / "other", learning_rate=2e-5, beta=0.1)
    seen = shown(one, other)
    curves = {text.partition(" ")[0]: json.loads(each["data-points"] or "") for each, text in seen.all("figure")}
    (reward,) = [drawn for title, drawn in curves.items() if title.startswith("grad_norm")]
    assert reward == [[name, [1, 2, 3, 4], [2.0] * 4] for name in ("one", "other")]
    rows = [text for _, text in seen.all("tr")]
    assert "learning_rate1e-052e-05" in rows
    assert "betanot a key of this run0.1" in rows
    assert not [row for row in rows if row.startswith("model")]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [a_run(tmp_path / name / "outputs") for name in ("a", "b")]
    html = write(folders, tmp_path / "both.html").read_text()
    assert "<title>a/outputs and b/outputs - report</title>" in html


# Completions


def test_best_median_and_worst_are_chosen_and_no_row_twice() -> None:
    totals: list[float | None] = [float(row) for row in range(20)]
    totals[5] = None
    found = chosen(totals)
    assert [row for kind, row in found if kind == "best"] == [19, 18, 17, 16]
    assert [row for kind, row in found if kind == "worst"] == [3, 2, 1, 0]
    assert [row for kind, row in found if kind == "median"] == [12, 11, 10, 9]
    few = chosen([1.0, None, 0.0])
    assert sorted(row for _, row in few) == [0, 2]
    assert chosen([None] * 9) == [("first", row) for row in range(EACH)]


def test_completions_have_rewards_advantages_and_turns(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "first", reward_weights=[1.0, 10.0])
    turns = [{"role": "model", "text": "add(1, 2)"}, {"role": "environment", "text": "3"}]
    columns = {"prompt": ["1+2=", "2+2="], "completion": ["3", "5"], "right": [1.0, 0.0], "short": [0.0, 1.0]}
    kept(folder, 4, {**columns, "advantage": [-1.5, 1.5], "turns": [turns, [{"role": "model", "text": "5"}]]})
    ((of_step),) = completions(recorded(folder))
    best, worst = of_step.shown
    assert (best.total, best.rewards, best.advantage) == (10.0, {"right": 0.0, "short": 1.0}, 1.5)
    assert worst.turns == [("model", "add(1, 2)"), ("environment", "3")]
    seen = shown(folder)
    assert [text for _, text in seen.all("p", "who")] == ["prompt", "model", "prompt", "model", "environment"]
    assert [text for _, text in seen.all("summary")][-2].startswith("worst reward 1, right 1, short 0, advantage -1.5")
    assert seen.all("input")[0][0]["type"] == "search"


def test_conversations_are_shown_as_their_messages(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "first")
    prompt = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2"}]
    kept(folder, 1, {"prompt": [prompt], "completion": [[{"role": "assistant", "content": "3"}]], "right": [1.0]})
    texts = [text for _, text in shown(folder).all("pre")]
    assert texts[:2] == ["[system] Add.\n[user] 1+2", "3"]


def test_pictures_and_tool_calls_of_a_conversation_are_named(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "first")
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "What is it?"}]
    calls = [{"type": "function", "function": {"name": "look", "arguments": "{}"}}]
    answer = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "a bee", "tool_calls": None},
    ]
    kept(folder, 1, {"prompt": [[{"role": "user", "content": parts}]], "completion": [answer], "right": [1.0]})
    prompt, call, result, *_ = [text for _, text in shown(folder).all("pre")]
    assert prompt == "[user] [image]\nWhat is it?"
    assert '"name": "look"' in call
    assert result == "a bee"


def test_nothing_that_a_model_wrote_runs_and_all_of_it_is_shown(tmp_path: Path) -> None:
    folder = a_run(tmp_path / HOSTILE.replace("/", "|")[:60], model=HOSTILE, rows=[{"step": 4, HOSTILE: 1.0}])
    turns = [{"role": HOSTILE, "text": HOSTILE + "\x00\u202e\ud83d"}]
    kept(folder, 4, {"prompt": [HOSTILE], "completion": [HOSTILE], HOSTILE: [1.0]})
    again = kept(folder, 3, {"prompt": [HOSTILE], "completion": [HOSTILE]})
    table = pd.read_parquet(again)
    table["turns"] = [json.loads(json.dumps(turns).replace("\\ud83d", ""))]
    table.to_parquet(again)
    html = write([folder]).read_text()
    seen = Seen(html)
    assert len(seen.all("script")) == 1
    assert not seen.all("img")
    tags = {tag for tag, _ in seen.elements}
    assert tags <= set(
        "html head meta title style body header h1 p nav ul li a main section h2 h3 div table thead tbody tr th td "
        "figure figcaption span svg path polyline polygon details summary label input br pre script button".split()
    )
    assert not [name for _, attributes in seen.elements for name in attributes if name.startswith("on")]
    assert HOSTILE in [text for _, text in seen.all("pre")]
    assert HOSTILE in [text for _, text in seen.all("th")] + [text for _, text in seen.all("figcaption")]


def test_the_policy_of_the_page_runs_its_own_script_alone_and_loads_nothing(tmp_path: Path) -> None:
    html = page([recorded(a_run(tmp_path / "first"))])
    seen = Seen(html)
    ((_, script),) = seen.all("script")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policies = [attributes["content"] or "" for attributes, _ in seen.all("meta") if "http-equiv" in attributes]
    assert policies == [f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"]
    sources = [
        value for _, attributes in seen.elements for name, value in attributes.items() if name in ("src", "href")
    ]
    assert sources
    assert [source for source in sources if not (source or "").startswith("#")] == []
    assert "url(" not in html


# For everyone


def test_headings_are_in_order_and_every_picture_and_field_has_words(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "first")
    kept(folder, 4, {"prompt": ["a"], "completion": ["b"], "right": [1.0]})
    for seen in (shown(folder), shown(folder, a_run(tmp_path / "second"))):
        levels = [int(tag[1]) for tag, _ in seen.elements if re.fullmatch(r"h\d", tag)]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
        for attributes, _ in seen.all("svg"):
            assert attributes.get("aria-hidden") == "true" or (attributes["role"], bool(attributes["aria-label"])) == (
                "img",
                True,
            )
        labelled = {attributes["for"] for attributes, _ in seen.all("label")}
        assert {attributes["id"] for attributes, _ in seen.all("input")} <= labelled
        assert [text for attributes, text in seen.all("th") if attributes.get("scope") not in ("row", "col")] == []


def luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(2 * one for one in digits) if len(digits) == 3 else digits
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def test_texts_and_curves_stand_out_from_their_ground_in_light_and_dark(tmp_path: Path) -> None:
    """WCAG 2 AA: 4.5 for text, 3 for what is drawn. Colours that stand for text are used as links and marks too."""
    html = page([recorded(a_run(tmp_path / "first"))])
    schemes = re.findall(r":root \{(.*?)\}", html, re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w]+): (#\w+)", scheme))
        for ground in ("back", "band"):
            assert contrast(colours["text"], colours[ground]) >= 4.5
            assert contrast(colours["quiet"], colours[ground]) >= 4.5
        assert contrast(colours["c0"], colours["back"]) >= 4.5
        assert [
            name for name in colours if re.fullmatch(r"c\d", name) and contrast(colours[name], colours["back"]) < 3
        ] == []


# What is missing or damaged


def test_a_run_that_was_killed_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "first")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": null, "reward": 0.5}\n[1]\n{"loss": 1}\n{"step": 6, "lo')
    told = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(told | {"end": None, "num_steps": 10}))
    text = " ".join(shown(folder).all("body")[0][1].split())
    assert "step 5 of 10; no end is recorded: the run continues, or was killed." in text
    assert "metrics.jsonl: 3 damaged lines left out (lines 8, 9, 10)." in text
    assert "loss was not finite (NaN or infinite) in 1 step." in text
    assert "Read the page again every 20 seconds" in text


@pytest.mark.parametrize(
    ("file", "contents", "told"),
    [
        ("metrics.jsonl", None, "metrics.jsonl is missing: there are no curves."),
        ("metrics.jsonl", b"", "metrics.jsonl holds no step yet."),
        ("metrics.jsonl", b"\xff\xfe\n", "1 damaged line left out (line 1)."),
        ("config.yaml", None, "config.yaml is missing: the settings of the run are not known."),
        ("config.yaml", b"a: [", "config.yaml cannot be read ("),
        ("config.yaml", b"- 1", "config.yaml cannot be read (it holds no keys)"),
        ("run.json", None, "run.json is missing: command line, versions and GPUs are not known."),
        ("run.json", b'{"starts"', "run.json cannot be read ("),
        ("run.json", b"[]", "run.json cannot be read (it holds no mapping)"),
        ("completions/completions_00002.parquet", b"PAR1", "completions/completions_00002.parquet cannot be read ("),
    ],
)
def test_the_page_says_which_file_is_missing_or_damaged(
    file: str, contents: bytes | None, told: str, tmp_path: Path
) -> None:
    folder = a_run(tmp_path / "first")
    kept(folder, 4, {"prompt": ["a"], "completion": ["b"], "right": [1.0]})
    if contents is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(contents)
    seen = shown(folder)
    assert told in seen.all("section", "problems")[0][1]
    assert "b" in [text for _, text in seen.all("pre")], "the rest is shown"


@pytest.mark.parametrize("origin_file", [{"starts": 3}, {"starts": [3, {}]}, {"starts": None, "end": 3, "changed": []}])
def test_a_file_of_another_shape_does_no_harm(origin_file: dict[str, Any], tmp_path: Path) -> None:
    folder = a_run(tmp_path / "first")
    (folder / "run.json").write_text(json.dumps(origin_file))
    assert shown(folder).all("h1")[0][1] == "first"


def test_completions_of_an_earlier_run_in_the_folder_are_left_out(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "first")
    old = kept(folder, 2, {"prompt": ["a"], "completion": ["old"], "right": [1.0]})
    os.utime(old, (0, 0))
    kept(folder, 99, {"prompt": ["a"], "completion": ["later"], "right": [1.0]})
    kept(folder, 3, {"prompt": ["a"], "completion": ["own"], "right": [1.0]})
    run = recorded(folder)
    assert [one.step for one in completions(run)] == [3]
    assert run.problems == ["completions: 2 files of an earlier run left out."]


def test_a_folder_without_a_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path} holds no run: there is no metrics.jsonl, config.yaml or run.json. "
        "Name the output_dir of a run.\n"
    )
    assert main([str(tmp_path / "no")]) == 2
    assert "is not a folder" in capsys.readouterr().err


# As runs write it


def test_a_run_writes_its_page_as_often_as_asked_and_at_its_end(tmp_path: Path) -> None:
    with opened(tmp_path, num_steps=5, report_every=2) as run:
        stepped(run)
        assert not (tmp_path / "report.html").exists()
        stepped(run)
        assert "step 2 of 5; no end is recorded" in (tmp_path / "report.html").read_text()
        stepped(run, 3).finish(Nothing().save, Nothing())
    assert "step 5 of 5; finished." in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (ValueError("no\nsuch thing"), "ended by ValueError: no"),
        (KeyboardInterrupt(), "interrupted"),
        (Stopped(0), "stopped early, and saved"),
    ],
)
def test_the_page_says_how_a_run_ended_early(error: BaseException, how: str, tmp_path: Path) -> None:
    run = stepped(opened(tmp_path, num_steps=5), 2)
    with pytest.raises(type(error)), run:
        raise error
    assert recorded(tmp_path).ended == how
    assert f"step 2 of 5; {how}." in (tmp_path / "report.html").read_text()


def test_a_resumed_run_adds_its_start_and_a_new_one_begins_anew(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        stepped(run, 2).save_checkpoint(Nothing().save, Nothing())
    with opened(tmp_path, resume_from_checkpoint="auto") as run:
        stepped(run)
    assert [start["first_step"] for start in recorded(tmp_path).starts] == [2, 0]
    assert "resumed after step 2" in (tmp_path / "report.html").read_text()
    with opened(tmp_path) as run:
        stepped(run)
    assert [start["first_step"] for start in recorded(tmp_path).starts] == [0]


def test_a_page_that_cannot_be_written_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "report.html").mkdir()
    (tmp_path / "report.html" / "mine").write_text("")
    with opened(tmp_path, num_steps=1) as run:
        stepped(run)
    assert f"the report of {tmp_path} could not be written (" in caplog.text


def test_secrets_stand_in_no_command_line_of_a_page(tmp_path: Path) -> None:
    groups = '{"all": {"device": "CPU", "ranks": 1, "workers": ["train"], "env": {"GROUP_TOKEN": "hunter3"}}}'
    config = SimpleNamespace(env={"HF_TOKEN": "hunter2", "OMP_NUM_THREADS": 8}, device_groups=groups)
    given = [
        "--env",
        '{"HF_TOKEN": "hunter2", "OMP_NUM_THREADS": 8}',
        "--device_groups",
        groups,
        "--api_key",
        "hunter4",
    ]
    given += ["--env.HF_TOKEN=hunter2", "--judge_token=hunter5", "--learning_rate", "1e-5"]
    found = origin.without_secrets(given, config)
    assert "hunter" not in " ".join(found)
    assert found[1] == '{"HF_TOKEN": "***", "OMP_NUM_THREADS": 8}'
    assert found[-5:] == ["***", "--env.HF_TOKEN=***", "--judge_token=***", "--learning_rate", "1e-5"]


def test_what_ctrl_c_ends_says_what_is_saved_and_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stepped(opened(tmp_path / "none", num_steps=5), 2)
    with pytest.raises(KeyboardInterrupt), run:
        raise KeyboardInterrupt
    assert "interrupted after step 2 of 5; nothing is saved. save_on_interrupt: true" in capsys.readouterr().out
    run = stepped(opened(tmp_path / "one", num_steps=5), 2)
    run.save_checkpoint(Nothing().save, Nothing())
    stepped(run)
    with pytest.raises(KeyboardInterrupt), run:
        raise KeyboardInterrupt
    told = (
        f"interrupted after step 3 of 5; saved before: {tmp_path / 'one' / 'checkpoint-2'}. To continue, run the same"
    )
    assert told in capsys.readouterr().out


def test_rows_passed_in_python_do_not_fill_the_file_of_the_run(tmp_path: Path) -> None:
    rows = [{"text": "a" * 10_000, "image": b"0" * 10_000}] * 1000
    config = TrainConfig(model="m", dataset=rows, eval_dataset=rows[:1], output_dir=str(tmp_path), report_to=["none"])
    object.__setattr__(config, "eval_dataset", pd.DataFrame(rows[:2]))  # compares number by number
    origin.begin(tmp_path, config, trainer="sft", first_step=0, num_steps=1)
    assert (tmp_path / "run.json").stat().st_size < 50_000
    changed = recorded(tmp_path).origin["changed"]
    assert changed["dataset"][0] == {"text": "a" * 500 + " ...", "image": "10000 bytes"}
    assert changed["dataset"][-1] == "... 1000 in all"
    assert {"eval_dataset", "model", "output_dir", "report_to"} <= set(changed)
    assert "learning_rate" not in changed


# Curves


def test_a_long_curve_is_thinned_and_keeps_its_peaks() -> None:
    points = [(step, 100.0 if step == 77_777 else -50.0 if step == 5 else 0.0) for step in range(100_000)]
    few = thinned(points)
    assert len(few) <= 400
    assert (77_777, 100.0) in few
    assert (5, -50.0) in few
    assert few == sorted(few)
    assert smoothed([(step, float(step)) for step in range(200)])[100] == (100, 100.0)
    assert len(lines("a", [Line("a", points)])) < 40_000


def test_layers_lie_on_one_another() -> None:
    html = stack("t", [Line("a", [(1, 1.0), (2, 1.0)]), Line("b", [(1, 3.0), (2, 1.0)]), Line("c", [(1, 0.0)])], "s")
    polygons = re.findall(r'<polygon class="area s(\d)" points="([^"]+)"', html)
    assert polygons == [
        ("0", "0.0,225.0 1000.0,225.0 1000.0,300.0 0.0,300.0"),
        ("1", "0.0,0.0 1000.0,150.0 1000.0,225.0 0.0,225.0"),
    ]


def test_every_metric_has_one_place_and_one_without_a_place_is_among_the_others() -> None:
    names = [
        "loss",
        "reward",
        "rewards/a/mean",
        "rewards/b/mean",
        "time/step",
        "eval_loss",
        "clip_ratio/low_mean",
        "my/own",
    ]
    found = groups(names)
    assert [heading for heading, _ in found] == ["Rewards and completions", "Learning", "Other metrics"]
    placed = [name for _, charts in found for chart in charts for name in chart.metrics]
    assert sorted(placed) == sorted(set(names) - {"time/step", "eval_loss"})
    assert ["rewards/a/mean", "rewards/b/mean"] in [chart.metrics for chart in found[0][1]]


@pytest.mark.parametrize(
    ("value", "told"),
    [(0.0, "0"), (0.12345678, "0.1235"), (12345.6, "12,346"), (3e-9, "3e-09"), (-2.5e8, "-2.5e+08"), (1.0, "1")],
)
def test_numbers_are_short(value: float, told: str) -> None:
    assert short(value) == told
