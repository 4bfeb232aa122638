"""The commands in shell scripts, split as a shell would: variables, prefixes of the environment, continued lines.

    for command in commands_of(Path("train.sh").read_text()):
        command.words          # ["swift", "sft", "--model", ...]
        command.environment    # {"NPROC_PER_NODE": "4"}

Nothing is run. Loops and functions are read as if their lines were run once.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from operator import add, floordiv, mul

ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
NAMED = re.compile(r"\$\{(\w+)(?::?[-=]([^}]*))?\}|\$(\w+)")
COMPUTED = re.compile(r"\$\(expr [\d\s*/\\]+\)|\$\(\([\d\s*/+]+\)\)")
COMPUTES = {"/": floordiv, "*": mul, "+": add}
BARE = re.compile(r"\$\(\([\w\s*/+]+\)\)")  # where variables need no dollar
ENDS = ("&", "&&", "|", "||", ";", ">", ">>", "2>", "2>&1", "&>", "<")
LAUNCHED = re.compile(r"swift/cli/(_megatron/)?(sft|rlhf|pt|sample)\.py")


@dataclass(frozen=True)
class Command:
    """``words`` of a command, and what is set in front of it and exported before."""

    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def commands_of(script: str) -> list[Command]:
    """All commands of a script, in its order."""
    variables = {"WORLD_SIZE": "2", "RANK": "0"}  # nodes and this one's number, as the services of its scripts set them
    exported: dict[str, str] = {}
    found = []
    for line in logical_lines(script):
        try:
            words = shlex.split(_filled(line, variables))
        except ValueError:
            continue  # a piece of another language inside the script
        if words[:1] == ["export"]:
            pairs = [match for word in words[1:] if (match := ASSIGNED.fullmatch(word))]
            exported |= {match[1]: match[2] for match in pairs}
            variables |= {match[1]: match[2] for match in pairs}
            continue
        own: dict[str, str] = {}
        while words and (match := ASSIGNED.fullmatch(words[0])):
            own[match[1]] = match[2]
            words = words[1:]
        if not words:
            variables |= own
            continue
        end = next((place for place, word in enumerate(words) if word in ENDS), len(words))
        found.append(Command(words[:end], exported | own))
    return found


def launched(command: Command) -> Command | None:
    """The same command as ``swift NAME ...`` or ``megatron NAME ...``; None if it is no command of ms-swift.

    ``torchrun``, ``accelerate launch``, ``deepspeed`` and ``python -m torch.distributed.run`` start its scripts too.
    """
    words = command.words
    while words and words[0] in ("nohup", "do", "then", "time", "exec", "stdbuf", "-oL"):
        words = words[1:]
    if words[:1] and words[0].rpartition("/")[2] in ("swift", "megatron") and len(words) > 1:
        return Command([words[0].rpartition("/")[2], *words[1:]], command.environment)
    for place, word in enumerate(words):
        if match := LAUNCHED.search(word):
            processes = _processes(words[:place])
            program = "megatron" if match[1] else "swift"
            return Command([program, match[2], *words[place + 1 :]], command.environment | processes)
    return None


def uncommented(script: str) -> str:
    """The script with the commands in its comments: another terminal's, that run beside its own."""
    return re.sub(r"^#[ \t]?", "", script, flags=re.MULTILINE)


def logical_lines(script: str) -> list[str]:
    """Lines with what continues them: after a backslash, or inside quotes. A comment ends a continued line."""
    found: list[str] = []
    held = ""
    for written in script.splitlines():
        line = written if held and _is_open(held) else _without_comment(written)
        bare = line.strip() or written.strip()
        if bare.startswith("#"):
            if held and not _is_open(held):
                found.append(held)
                held = ""
            if not held:
                continue
        held = f"{held}\n{line}" if held and _is_open(held) else f"{held} {bare}"
        if _is_open(held):
            continue
        if held.endswith("\\"):
            held = held[:-1]
            continue
        found.append(held)
        held = ""
    return [line for line in [*found, held] if line.strip()]


def _computed(match: re.Match[str]) -> str:
    """``$(expr 16 / 4)`` and ``$((16 / 4))``, of whole numbers that are divided, multiplied or added in order."""
    words = re.findall(r"\d+|[*/+]", match[0])
    total = int(words[0])
    for operator, number in zip(words[1::2], words[2::2], strict=True):
        total = COMPUTES[operator](total, int(number))
    return str(total)


def _is_open(text: str) -> bool:
    """Whether a quote is open at the end of the text."""
    try:
        shlex.split(text.removesuffix("\\"))
    except ValueError:
        return True
    return False


def _without_comment(line: str) -> str:
    """The line up to a ``#`` at the beginning of a word outside quotes."""
    quote = ""
    for place, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (place == 0 or line[place - 1].isspace()):
            return line[:place]
    return line


def _filled(line: str, variables: dict[str, str]) -> str:
    """The line with its variables, but for what stands in single quotes. An unknown one is empty, or its default."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[2] or "")

    pieces = re.split(r"('[^']*')", line)
    filled = "".join(piece if piece.startswith("'") else NAMED.sub(value, piece) for piece in pieces)
    named = BARE.sub(lambda sum_: re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], ""), sum_[0]), filled)
    return COMPUTED.sub(_computed, named)


def _processes(words: list[str]) -> dict[str, str]:
    """What a launcher's options say of processes and nodes, in the variables of ``swift sft``."""
    names = {"nproc_per_node": "NPROC_PER_NODE", "nnodes": "NNODES", "num_processes": "NPROC_PER_NODE"}
    names |= {"num_gpus": "NPROC_PER_NODE", "num_nodes": "NNODES"}
    said: dict[str, str] = {}
    for place, word in enumerate(words):
        name, _, value = word.lstrip("-").replace("-", "_").partition("=")
        if word.startswith("--") and name in names:
            said[names[name]] = value or words[place + 1]
    return {name: value for name, value in said.items() if value.isdecimal()}
