"""How many of another project's scripts does ``rayhelper translate`` write in our keys, and why not others?

    python -m benchmarks.translated FOLDER_OR_FILE ... [--from SYSTEM] [--show]

Each script is translated. What is written is read back by the trainer's own reader, model and data replaced by names
that need no files, and planned. Reported are the counts, and each reason with the number of scripts that it stops.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import re
import tempfile
from collections import Counter
from pathlib import Path

from rayhelper import ConfigError
from rayhelper.planning.dry_run import make_plan
from trainers.configuration.reading.command_line import load_config
from trainers.configuration.reading.folders import configuration_named
from trainers.translate.command import main as translate

SUFFIXES = (".sh", ".yaml", ".yml")


def outcome(script: Path, system: str | None, folder: Path) -> tuple[str, list[str]]:
    """``translated``, ``refused`` (with the reasons) or ``broken`` (what was written is no configuration)."""
    out, err = io.StringIO(), io.StringIO()
    arguments = [str(script), *(["--from", system] if system else [])]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = translate(arguments)
    if code:
        lines = err.getvalue().removeprefix("error: ").strip().splitlines()
        return "refused", [line.strip(" -") for line in (lines[1:] if len(lines) > 1 else lines)]
    file = folder / "ours.yaml"
    written = re.sub(
        r"(?m)^(model|dataset|eval_dataset|resume_from_checkpoint|report_to|ref_model|value_model): .*$",
        "",
        out.getvalue(),
    )
    written = re.sub(r"(?m)^reward_model: (\[?).*?(\]?)  #.*$", r"reward_model: \1r\2", written)
    file.write_text(f"{written}\nmodel: m\ndataset: d\n" + ("eval_dataset: d\n" if "eval_steps:" in written else ""))
    found = re.search(r"rayhelper (\w+)", written)
    kind = configuration_named(found[1]) if found else None
    try:
        assert kind is not None
        load_config(
            kind, ["--config", str(file), *(["--eval_dataset", "d"] if "val_before_train: true" in written else [])]
        )
        plan = make_plan(str(file), None, None, None, 80.0, None)
    except ConfigError as error:
        return "broken", str(error).splitlines()[-1:]
    mistakes = [str(one) for one in plan.findings.mistakes]
    return ("broken", mistakes) if mistakes else ("translated", [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("places", nargs="+", type=Path)
    parser.add_argument("--from", dest="system", help="whose scripts they are")
    parser.add_argument("--show", action="store_true", help="list every script")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    scripts = [
        file
        for place in options.places
        for file in (sorted(place.rglob("*")) if place.is_dir() else [place])
        if file.suffix in SUFFIXES
    ]
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for script in scripts:
            word, why = outcome(script, options.system, Path(folder))
            counts[word] += 1
            reasons.update({f"{word}: {re.sub(r'^/[^ ]*/', '', line)[:150]}" for line in why})
            if options.show:
                print(f"{word:10} {script.name:60} {'; '.join(why)[:200]}")
    print(f"{len(scripts)} scripts:", ", ".join(f"{word} {count}" for word, count in counts.most_common()))
    for reason, count in reasons.most_common():
        print(f"{count:4}  {reason}")


if __name__ == "__main__":
    main()
