"""``rayhelper translate FILE|-- COMMAND [--from SYSTEM] [--trainer NAME] > ours.yaml``

Reads another system's command line, script or file, and prints ours. What has no equivalent stands at the end of the
file and on stderr. A key that nobody knows, a variable that nothing sets and a value that is not built are mistakes:
then nothing is printed, and the exit code is 2.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence

from rayhelper import ConfigError
from trainers.translate import flat, roll, siirl
from trainers.translate.sources import SYSTEMS, Source, read
from trainers.translate.table import Ours, Theirs
from trainers.translate.verl import names as verl_names
from trainers.translate.verl import sft as verl_sft
from trainers.translate.verl import translation as verl
from trainers.translate.writer import as_yaml

NAME = "translate"
USAGE = "usage: {program} translate FILE|-- COMMAND [--from SYSTEM] [--trainer NAME] > ours.yaml"
BY_KEYS: dict[str, tuple[Callable[[Theirs, Ours], None], dict[str, object]]] = {
    "verl": (verl.translate, verl_names.DEFAULTS),
    "siirl": (siirl.translate, siirl.DEFAULTS),
    "roll": (roll.translate, {}),
}
BY_ENTRY: dict[str, tuple[Callable[[Theirs, Ours], None], dict[str, object]]] = {
    "fsdp_sft_trainer": (verl_sft.translate, verl_sft.DEFAULTS),
    "sft_trainer": (verl_sft.translate_engine, verl_sft.ENGINE_DEFAULTS),
    "sft_trainer_ray": (verl_sft.translate_on_ray, verl_sft.ENGINE_DEFAULTS),
}


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 all is translated (what has no equivalent is told), 2 something was refused."""
    if not arguments or {"-h", "--help"} & {arguments[0]}:
        from trainers.cli import program_name

        print(
            USAGE.format(program=program_name()),
            f"SYSTEM is one of {', '.join(SYSTEMS)}. Without --from, the source decides.",
            sep="\n",
            file=sys.stderr,
        )
        return 0 if arguments else 2
    try:
        rest, system, trainer = _options(arguments)
        source = read(rest, system)
        ours = translation(source, trainer)
        if ours.mistakes:
            raise ConfigError("\n  - ".join(["this cannot be translated", *ours.mistakes]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, reason in ours.without.items():
        print(f"without an equivalent: {name}: {reason}", file=sys.stderr)
    with contextlib.suppress(BrokenPipeError):
        print("\n".join(as_yaml(ours, source.name, source.system)))
    return 0


def translation(source: Source, trainer: str | None = None) -> Ours:
    """Our keys of a source; what is wrong with it stands in ``mistakes``."""
    ours = Ours()
    if source.system not in BY_KEYS:
        flat.translate(source, ours, trainer)
        return ours
    if "sft" in source.entry and (source.system != "verl" or source.entry not in BY_ENTRY):
        ours.refuse(source.entry, f"it is not translated (known: {', '.join(BY_ENTRY)} of verl)")
        return ours
    function, defaults = BY_ENTRY.get(source.entry) or BY_KEYS[source.system]
    theirs = Theirs(source.system, source.keys, defaults)
    theirs.taken |= {"--config-name", "--config-path"}
    function(theirs, ours)
    ours.finish(theirs, defaults)
    ours.without |= source.left_out
    return ours


def _options(arguments: Sequence[str]) -> tuple[list[str], str | None, str | None]:
    """What is translated, and the values of ``--from`` and ``--trainer``: before ``--``, or beside a FILE."""
    rest: list[str] = []
    options: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        if word == "--":
            return [*rest, "--", *words], options.get("--from"), options.get("--trainer")
        name, _, value = word.partition("=")
        if name in ("--from", "--trainer"):
            options[name] = value or next(words, "")
        else:
            rest.append(word)
    return rest, options.get("--from"), options.get("--trainer")
