"""The sentences that people read: of README and pages, of ``--help``, of errors and warnings.

python -m tests.sentences SEED [NUMBER]     NUMBER of them (50) drawn by the seed, each with its place, for a judge
faults(sentence)                            the rules that it breaks, of those that a machine can decide
"""

from __future__ import annotations

import ast
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from trainers.configuration.reading.folders import configurations
from trainers.configuration.reading.keys import keys_of

ROOT = Path(__file__).resolve().parents[1]
FEWEST = 6  # words: fewer are a name or a cell of a table
MOST = 22  # words, code counted as one: style.md asks for 20, and this is never a false alarm
WARNS = {"warning", "warn", "warn_once"}
ENDS = re.compile(
    r"(?:(?<=[.!?])|(?<=[.!?][)*]))(?<!e\.g\.|i\.e\.)(?<!\.\.\.)(?<!\.\.\.\))\s+(?=\S)|(?<=:)\s+(?=[A-Z])"
)
CODE = re.compile(r"``[^`]*``|`[^`]*`|\$[^$]*\$|\{[^{}]*\}")
IDIOM = {
    r"\bgenerations? ahead\b": "off-policy",
    r"\blikeliest\b": "top-k",
    r"\bunder way\b": "in flight, or running",
    r"\bmakes? room\b": "sleeps, or is offloaded",
    r"\b(is|are|was|were|be) told\b": "RayHelper reports, or raises",
    r"\bas there\b": "name the place",
    r"\b(the )?other's\b": "repeat the noun",
    r"—": "a full stop, a comma or a colon",
}


def sentences() -> list[tuple[str, str, str]]:
    """Kind, place and text of every sentence, each text once."""
    found = {text: (kind, place) for kind, place, block in _blocks() for text in _split(block)}
    return [(kind, place, text) for text, (kind, place) in found.items()]


def faults(text: str) -> list[str]:
    """What breaks a rule of plain English, without doubt; an empty list does not say that the sentence is good."""
    prose = re.sub(r"\]\([^)]*\)", "]", CODE.sub("code", text))
    words = [word for word in prose.split() if re.search(r"\w", word)]
    found = [f"{len(words)} words"] if len(words) > MOST else []
    found += ["two semicolons"] if prose.count(";") > 1 and prose.endswith(".") else []
    return found + [f"write: {better}" for idiom, better in IDIOM.items() if re.search(idiom, prose)]


def _blocks() -> Iterator[tuple[str, str, str]]:
    yield from (("page", *block) for block in _of_pages())
    for name, config_type in configurations().items():
        for key in keys_of(config_type).values():
            yield "help", f"rayhelper {name} --help {key.name}", key.text
    for package in ("rayhelper", "trainers"):
        for file in sorted((ROOT / package).rglob("*.py")):
            yield from (("error", *block) for block in _of_code(file))


def _of_pages() -> Iterator[tuple[str, str]]:
    """The paragraphs, list items and cells of tables; without code, headings and the changelog."""
    folders = ("*.md", "guides/*.md", "trainers/*.md")
    pages = [ROOT / "README.md", *sorted(ROOT.glob("examples/*/*.md"))]
    pages += [page for folder in folders for page in sorted((ROOT / "docs").glob(folder))]
    for page in pages:
        text = re.sub(r"^```.*?^```", "\n", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=[#|])", text):
            if page.name != "changelog.md" and not block.startswith(("#", "{{", "![")):
                for cell in re.split(r"(?<!\\)\|", block) if block.startswith("|") else [block]:
                    yield str(page.relative_to(ROOT)), re.sub(r"^\s*(?:[-*]|\d+\.) ", "", cell)


def _of_code(file: Path) -> Iterator[tuple[str, str]]:
    """The texts of errors that are raised and of warnings; what is put into them at run time stays ``{name}``."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        call = node.exc if isinstance(node, ast.Raise) else node
        is_warning = isinstance(node, ast.Call) and getattr(node.func, "attr", "") in WARNS
        if isinstance(call, ast.Call) and (isinstance(node, ast.Raise) or is_warning):
            for told in call.args[:1]:
                yield f"{file.relative_to(ROOT)}:{node.lineno}", _text(told)


def _text(told: ast.expr) -> str:
    if isinstance(told, ast.JoinedStr):
        return "".join(map(_text, told.values))
    if isinstance(told, ast.FormattedValue):
        return "{" + re.sub(r"[{}`]", "", ast.unparse(told.value)) + "}"
    return told.value if isinstance(told, ast.Constant) and isinstance(told.value, str) else ""


def _split(block: str) -> list[str]:
    text = " ".join(block.split())
    parts = [part.strip() for part in ENDS.split(text)]
    return [part for part in parts if len(part.split()) >= FEWEST]


def main(seed: str, number: str = "50") -> None:
    drawn = random.Random(int(seed)).sample(sentences(), int(number))
    for place, (kind, where, text) in enumerate(drawn, start=1):
        print(f"{place:3} {kind:5} {where}\n    {text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
