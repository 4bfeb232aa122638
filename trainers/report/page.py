"""The page of a report: the run, or several over one another, in sections; whatever a run wrote is escaped.

Two walls keep what a model wrote from running: it stands escaped in elements and attributes, never in a script; and the
page's policy runs the one script whose hash it names.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from trainers.report.charts import Line, groups, lines, phases_of, short, stack
from trainers.report.completions import OfStep, Shown, completions
from trainers.report.recorded import EVAL, Recorded

COMPARED = 2  # runs from which on curves lie over one another
SHARES = ("accuracy", "accuracies", "rewards/", "ratio")  # words of metrics that may be shown as per cent


def page(runs: Sequence[Recorded]) -> str:
    """The HTML of the report of one run, or of several side by side."""
    script = files("trainers.report").joinpath("page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    kept = {id(run): completions(run) for run in runs}  # which may add to the problems
    sections = [
        ("result", "Result", _result(runs)),
        ("curves", "Curves", _curves(runs)),
        ("time", "Where the time went", _time(runs)),
        ("completions", "Completions", "".join(_completions(run, kept[id(run)], len(runs) > 1) for run in runs)),
        ("settings", "Settings", _settings(runs)),
        ("origin", "How it was run", _origin(runs)),
    ]
    sections = [section for section in sections if section[2]]
    body = "".join(
        f'<section aria-labelledby="{name}">\n<h2 id="{name}">{heading}</h2>\n{content}</section>\n'
        for name, heading, content in sections
    )
    title = " and ".join(run.name for run in runs)
    template = Template(files("trainers.report").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        hash=f"sha256-{digest}",
        title=escape(f"{title} - report"),
        head=_head(runs, title, [(name, heading) for name, heading, _ in sections]),
        body=_problems(runs) + body,
        script=script,
    )


# The sections


def _head(runs: Sequence[Recorded], title: str, sections: Sequence[tuple[str, str]]) -> str:
    links = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, heading in sections)
    states = "".join(f"<p>{escape(_state(run, with_name=len(runs) > 1))}</p>\n" for run in runs)
    button = ""
    if len(runs) == 1 and runs[0].ended is None:
        button = '<p><button id="follow" type="button" hidden>Read the page again every 20 seconds</button></p>\n'
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        f"<h1>{escape(title)}</h1>\n{states}{button}<p class=quiet>Written {written}.</p>\n"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>'
    )


def _state(run: Recorded, *, with_name: bool) -> str:
    """What was trained, and how far it is."""
    trainer, model = run.origin.get("trainer"), run.settings.get("model")
    what = " ".join(filter(None, [str(trainer or ""), "on" if trainer and model else "", str(model or "")]))
    of_all = f" of {run.num_steps:,}" if run.num_steps else ""
    how = run.ended or ("no end is recorded: the run continues, or was killed" if run.origin else "")
    parts = [what, f"step {run.last_step:,}{of_all}", how]
    told = "; ".join(part for part in parts if part)
    return f"{run.name}: {told}." if with_name else f"{told[:1].upper()}{told[1:]}."


def _problems(runs: Sequence[Recorded]) -> str:
    told = [
        f"{run.name}: {problem}" if len(runs) > 1 else problem
        for run in runs
        for problem in dict.fromkeys(run.problems)
    ]
    if not told:
        return ""
    items = "".join(f"<li>{escape(one)}</li>" for one in told)
    return f'<section class="problems" aria-label="Problems"><p>To know first:</p><ul>{items}</ul></section>\n'


def _result(runs: Sequence[Recorded]) -> str:
    """What evaluation found first and last; without one, what the first and the last steps gave."""
    found = [_before_and_after(run) for run in runs]
    names = list(dict.fromkeys(name for one, _ in found for name in one))
    if not names:
        return ""
    several = len(runs) > 1
    head = ["number"]
    for run, (_, of_what) in zip(runs, found, strict=True):
        own = f"{run.name}, " if several else ""
        head += [f"{own}{of_what[0]}", f"{own}{of_what[1]}", "change"]
    rows: dict[bool, list[list[str]]] = {True: [], False: []}
    for name in names:
        row = [name]
        for one, _ in found:
            pair = one.get(name)
            row += ["", "", ""] if pair is None else _compared(name, *pair)
        rows[_rank(name.removeprefix(EVAL)) < 2].append(row)
    html = _table(head, rows[True], numbers=True) if rows[True] else ""
    if rows[False]:
        more = _table(head, rows[False], numbers=True)
        html += f"<details><summary>Lengths and spreads ({len(rows[False])})</summary>{more}</details>\n"
    return html


def _before_and_after(run: Recorded) -> tuple[dict[str, tuple[float, float]], tuple[str, str]]:
    """(before, after) by name, and which steps these are."""
    evaluations = {name: points for name, points in run.evaluations().items() if points}
    if evaluations:
        first = min(points[0][0] for points in evaluations.values())
        last = max(points[-1][0] for points in evaluations.values())
        important = sorted(evaluations, key=lambda name: (_rank(name), name))
        pairs = {f"{EVAL}{name}": (evaluations[name][0][1], evaluations[name][-1][1]) for name in important}
        return pairs, (f"step {first:,}", f"step {last:,}")
    pairs = {}
    for name in ("reward", "loss", "mean_token_accuracy", "rewards/accuracies"):
        if points := run.series.get(name):
            count = max(1, len(points) // 10)
            values = [value for _, value in points]
            pairs[name] = (sum(values[:count]) / count, sum(values[-count:]) / count)
    return pairs, ("first tenth of the steps", "last tenth of the steps")


def _rank(name: str) -> int:
    """Rewards and losses first, lengths last."""
    if name.endswith(("_std", "/std")) or name.startswith(("completions/", "frac_")):
        return 2
    return 0 if name.startswith("rewards/") or name in ("reward", "loss") else 1


def _compared(name: str, before: float, after: float) -> list[str]:
    if any(word in name for word in SHARES) and min(before, after) >= 0 and max(before, after) <= 1:
        return [f"{before:.1%}", f"{after:.1%}", f"{100 * (after - before):+.1f} points"]
    return [short(before), short(after), f"{'+' if after >= before else ''}{short(after - before)}"]


def _curves(runs: Sequence[Recorded]) -> str:
    names = dict.fromkeys(name for run in runs for name in run.series)
    parts = []
    evaluated = dict.fromkeys(name for run in runs for name in run.evaluations())
    of_evaluation = sorted((name for name in evaluated if _rank(name) < 2), key=lambda name: (_rank(name), name))
    figures = [
        lines(name, [Line(run.name if len(runs) > 1 else name, run.series.get(f"{EVAL}{name}", [])) for run in runs])
        for name in of_evaluation
    ]
    if figures:
        parts.append(("Evaluation", figures))
    for heading, charts in groups(names):
        figures = []
        for chart in charts:
            if len(runs) < COMPARED:
                curves = [Line(name, runs[0].series[name]) for name in chart.metrics]
                figures.append(lines(chart.title, curves, chart.unit))
                continue
            for name in chart.metrics:
                figures.append(lines(name, [Line(run.name, run.series.get(name, [])) for run in runs], chart.unit))
        parts.append((heading, figures))
    html = []
    for heading, figures in parts:
        drawn = f'<div class="charts">\n{"".join(figures)}</div>\n'
        if heading == "Other metrics":
            html.append(f"<details><summary>{heading} ({len(figures)})</summary>\n{drawn}</details>\n")
        else:
            html.append(f"<h3>{heading}</h3>\n{drawn}")
    return "".join(html)


def _time(runs: Sequence[Recorded]) -> str:
    html = []
    for run in runs:
        phases = phases_of(run.series)
        seconds = {phase.label: sum(value for _, value in phase.points) for phase in phases}
        total = sum(seconds.values())
        if not total:
            continue
        phases = [phase for phase in phases if seconds[phase.label] > 0]
        colours = {phase.label: index % 8 for index, phase in enumerate(phases)}
        bar = "".join(
            f'<span class="s{colours[name]}" style="width: {100 * seconds[name] / total:.2f}%"></span>'
            for name in colours
        )
        rows = [[name, f"{seconds[name]:,.1f}", f"{seconds[name] / total:.1%}"] for name in colours]
        rows.append(["all steps", f"{total:,.1f}", ""])
        if len(runs) > 1:
            html.append(f"<h3>{escape(run.name)}</h3>\n")
        figure = stack("Seconds of a step by phase", phases, "s")
        table = _table(["phase", "seconds", "share"], rows, numbers=True)
        html.append(f'<div class="bar" aria-hidden="true">{bar}</div>\n<div class="charts">\n{figure}{table}</div>\n')
    return "".join(html)


def _completions(run: Recorded, steps: Sequence[OfStep], several: bool) -> str:
    if not steps:
        told = "This run kept no completions. Set log_completions: true to keep some."
        return "" if several or not _generates(run) else f"<p>{told}</p>\n"
    name = f"<h3>{escape(run.name)}</h3>\n" if several else ""
    search = ""
    if not several:
        search = (
            '<p><label for="search">Search in the completions below:</label><br>'
            '<input id="search" type="search"> <span id="count" role="status"></span></p>\n'
        )
    html = [name, search]
    for place, step in enumerate(steps):
        inner = "".join(map(_completion, step.shown))
        told = f"step {step.step:,}: {len(step.shown)} of {step.num_all:,} completions"
        html.append(
            f'<details class="step"{" open" if place == 0 else ""}><summary>{told}</summary>\n{inner}</details>\n'
        )
    return "".join(html)


def _generates(run: Recorded) -> bool:
    return "log_completions" in run.settings


def _completion(shown: Shown) -> str:
    numbers = [f"{name} {'none' if value is None else short(value)}" for name, value in shown.rewards.items()]
    if shown.total is not None and len(shown.rewards) > 1:
        numbers.insert(0, f"reward {short(shown.total)}")
    if shown.advantage is not None:
        numbers.append(f"advantage {short(shown.advantage)}")
    first = next((text for _, text in reversed(shown.turns) if text.strip()), "")
    start = " ".join(first.split())[:80]
    turns = "".join(
        f'<div class="turn s{0 if who in ("model", "assistant") else 1}"><p class="who">{escape(who)}</p>'
        f'<pre dir="auto">{escape(text)}</pre></div>'
        for who, text in shown.turns
    )
    return (
        f'<details class="completion"><summary><span class="kind">{shown.kind}</span> '
        f'<span class="quiet">{escape(", ".join(numbers))}</span> <span dir="auto">{escape(start)}</span></summary>\n'
        f'<p class="who">prompt</p><pre dir="auto">{escape(shown.prompt)}</pre>{turns}</details>\n'
    )


def _settings(runs: Sequence[Recorded]) -> str:
    html = []
    if len(runs) > 1:
        keys = dict.fromkeys(key for run in runs for key in run.settings)
        differing = [key for key in keys if len({_value(run.settings.get(key, _ABSENT)) for run in runs}) > 1]
        rows = [[key, *(_value(run.settings.get(key, _ABSENT)) for run in runs)] for key in differing]
        told = "" if rows else "<p>All settings are equal.</p>\n"
        html += [
            "<h3>Keys that differ</h3>\n",
            told,
            _table(["key", *(run.name for run in runs)], rows) if rows else "",
        ]
    else:
        changed = runs[0].origin.get("changed")
        if isinstance(changed, Mapping) and changed:
            html.append("<p>Keys that differ from the defaults of the trainer:</p>\n")
            html.append(_table(["key", "value"], [[str(key), _value(value)] for key, value in changed.items()]))
    for run in runs:
        if run.settings_text:
            whose = f" of {run.name}" if len(runs) > 1 else ""
            text = escape(run.settings_text)
            html.append(
                f"<details><summary>All settings{escape(whose)} (config.yaml)</summary><pre>{text}</pre></details>\n"
            )
    return "".join(html)


_ABSENT = object()


def _value(value: Any) -> str:
    if value is _ABSENT:
        return "not a key of this run"
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _origin(runs: Sequence[Recorded]) -> str:
    html = []
    for run in runs:
        if not run.starts:
            continue
        if len(runs) > 1:
            html.append(f"<h3>{escape(run.name)}</h3>\n")
        last = run.starts[0]
        versions = last.get("versions")
        gpus, commits = last.get("gpus"), last.get("commits")
        rows = [
            ["command", str(last.get("command", ""))],
            ["folder", str(last.get("folder", ""))],
            ["machine", f"{last.get('host', '')}, {last.get('cpus', '?')} CPUs, {last.get('system', '')}"],
            ["GPUs of this machine", "; ".join(map(str, gpus)) if isinstance(gpus, list) and gpus else "none"],
            ["processes of torchrun", str(last.get("torchrun_processes", 1))],
        ]
        if isinstance(commits, Mapping):
            rows += [[f"commit of {what}", str(commit)] for what, commit in commits.items()]
        if isinstance(versions, Mapping):
            rows.append(["versions", ", ".join(f"{name} {version}" for name, version in versions.items())])
        rows += [
            [
                "started" if not start.get("first_step") else f"resumed after step {start['first_step']}",
                str(start["at"]),
            ]
            for start in reversed(run.starts)
            if "at" in start
        ]
        html.append(_table(["", "this run"], rows))
    return "".join(html)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """A table whose first cells name their rows."""
    kind = ' class="number"' if numbers else ""
    first, *others = head
    top = "<td></td>" if not first else f'<th scope="col">{escape(first)}</th>'
    top += "".join(f'<th scope="col"{kind}>{escape(cell)}</th>' for cell in others)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td{kind}>{escape(cell)}</td>" for cell in cells)}</tr>\n'
        for name, *cells in rows
    )
    return f'<div class="table"><table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>\n'
