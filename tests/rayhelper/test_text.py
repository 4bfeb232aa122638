"""YAML that people write: what is a mistake is one however the text is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rayhelper.text import Loader, read_yaml

ROOT = Path(__file__).resolve().parents[2]
MISTAKES = {
    "a: 1\na: 2": "written twice",
    "a: 0x10": "not a number in decimal digits",
    "a: [1, 1_000]": "not a number in decimal digits",
    "a: b: c": "mapping values are not allowed",
    "a: 'x": "end of stream",
    "a: *nope": "undefined alias",
    "!!python/object:os.system x": "could not determine a constructor",
    "a: \x01": "special characters are not allowed",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_told_with_its_line(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match=MISTAKES[text]) as raised:
        read_yaml(text)
    if isinstance(raised.value, yaml.MarkedYAMLError):
        mark = raised.value.problem_mark or raised.value.context_mark
        assert mark is not None
        assert text.splitlines()[mark.line].strip() in (mark.get_snippet() or "")


@pytest.mark.parametrize("text", ["[" * 5000, "- " * 5000])
def test_text_of_many_brackets_ends_in_an_error_that_can_be_caught(text: str) -> None:
    with pytest.raises(RecursionError):
        read_yaml(text)


def test_files_have_the_values_that_pyyaml_reads() -> None:
    texts = [path.read_text() for folder in ("examples", "deploy") for path in (ROOT / folder).rglob("*.yaml")]
    texts = [text for text in texts if "\n---" not in text]
    texts += ["x: 1e-6", "a: &x {b: 1}\nc: {<<: *x, b: 2}", "", "a: |\n  x\n  y\n", "\ufeffa: \U0001f600"]
    texts += ["{'a':1,\"b\":yes, c: .5, d: null}", 'a: "\\ud83d\\ude00"']
    assert len(texts) > 20
    for text in texts:
        assert read_yaml(text) == yaml.load(text, Loader)
