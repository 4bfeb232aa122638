"""The commands of a shell script with their variables filled in, without running anything.

Understood are assignments, ``export``, arrays, quotes, continued lines, comments, ``$NAME``, ``${NAME}``,
``${NAME:-default}``, ``${NAME[@]}``, ``$((arithmetic))`` and ``$(expr A op B)``. What cannot
be known without running the script (the output of another command, a variable that a condition sets, one that nobody
sets) is marked, and is a mistake where it is used.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

MARK = "\0"  # around the name of what is not known
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
BRACED = re.compile(r"(?P<name>\w+|@|\*)(?P<index>\[[@*]\])?(?:(?P<sign>:?[-=+])(?P<default>.*))?", re.DOTALL)
OPENS = ("if", "for", "while", "until", "case")
CLOSES = ("fi", "done", "esac")
ENDS = (";", "&&", "||", "|", "&", "\n")
ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
PASSED_ON = ("@", "*")  # what the script itself was given


@dataclass
class Script:
    """Variables as they are set so far, arrays among them."""

    environment: Mapping[str, str]
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)

    def value(self, name: str) -> str | None:
        return self.variables.get(name, self.environment.get(name))

    def words(self, raw: str) -> list[str]:
        """The words that one written word stands for: quotes taken away, variables filled in."""
        done: list[str] = []
        current: list[str] | None = None
        for text, is_quoted in self._fragments(raw):
            if isinstance(text, list):  # an array: its first joins what stands before it, its last what follows
                for number, item in enumerate(text):
                    if number and current is not None:
                        done.append("".join(current))
                        current = None
                    current = [*(current or []), item]
            elif is_quoted:
                current = [*(current or []), text]
            else:
                parts = re.split(r"\s+", text)
                for number, part in enumerate(parts):
                    if number and current is not None:
                        done.append("".join(current))
                        current = None
                    if part:
                        current = [*(current or []), part]
        return done if current is None else [*done, "".join(current)]

    def text(self, raw: str) -> str:
        """The same as one text: no word is split."""
        return "".join(" ".join(one) if isinstance(one, list) else one for one, _ in self._fragments(raw))

    def _fragments(self, raw: str) -> Iterator[tuple[str | list[str], bool]]:
        place, quote, plain = 0, "", []
        while place < len(raw):
            char = raw[place]
            if quote == "'":
                end = raw.find("'", place)
                end = len(raw) if end < 0 else end
                yield raw[place:end], True
                place, quote = end + 1, ""
            elif char == "\\" and place + 1 < len(raw):
                yield raw[place + 1], True
                place += 2
            elif char == "'" and not quote:
                yield "", True
                place, quote = place + 1, "'"
            elif char == '"':
                yield "", True
                place, quote = place + 1, "" if quote else '"'
            elif char == "$" or char == "`":
                found, place = self._expanded(raw, place)
                if found is not None:
                    yield found, bool(quote) or MARK in found
            else:
                plain.append(char)
                yield char, bool(quote)
                place += 1

    def _expanded(self, raw: str, place: int) -> tuple[str | list[str] | None, int]:
        """What stands at a ``$`` or a backquote, and where the text goes on."""
        rest = raw[place:]
        if rest.startswith("`"):
            end = raw.find("`", place + 1)
            return self._output(raw[place + 1 : end], raw[place : end + 1]), (end + 1 if end > 0 else len(raw))
        if rest.startswith("$(("):
            end = raw.find("))", place)
            return self._arithmetic(raw[place + 3 : end]), end + 2
        if rest.startswith("$("):
            end = _closing(raw, place + 1, "(", ")")
            return self._output(raw[place + 2 : end], raw[place : end + 1]), end + 1
        if rest.startswith("${"):
            end = _closing(raw, place + 1, "{", "}")
            return self._braced(raw[place + 2 : end]), end + 1
        name = re.match(r"\$(\w+|[@*?#])", rest)
        if name is None:
            return "$", place + 1
        return self._variable(name[1]), place + name.end()

    def _variable(self, name: str) -> str | None:
        if name in PASSED_ON:
            return None
        if name in self.arrays and name not in self.variables:
            return (self.arrays[name] or [""])[0]
        found = self.value(name)
        return _unknown(name) if found is None else found

    def _braced(self, inside: str) -> str | list[str] | None:
        match = BRACED.fullmatch(inside)
        if inside.startswith(PASSED_ON):
            return None
        if match is None:
            return _unknown(f"${{{inside}}}")
        name = match["name"]
        if match["index"]:
            return self.arrays.get(name, [_unknown(name)])
        if match["sign"] is None:
            return self._variable(name)
        found = self.value(name)
        is_empty = found is None or (match["sign"].startswith(":") and not found)
        if match["sign"].endswith("+"):
            return "" if is_empty else self.text(match["default"])
        return self.text(match["default"]) if is_empty else found

    def _output(self, command: str, written: str) -> str | None:
        """What a command prints, if it is one that this file knows."""
        program, _, arguments = command.strip().partition(" ")
        if command.strip() == "pwd":
            return self.environment.get("PWD")
        return _calculated(self.text(arguments), written) if program == "expr" else _unknown(written)

    def _arithmetic(self, written: str) -> str:
        return _calculated(self.text(re.sub(r"(?<![\w${])([A-Za-z_]\w*)", r"$\1", written)), f"$(({written}))")


def commands(text: str, environment: Mapping[str, str]) -> list[list[str]]:
    """The words of every command of a script, in order, variables filled in as they are at its place."""
    script = Script(environment)
    found: list[list[str]] = []
    inside: list[str] = []  # the conditions, loops and functions that are open
    for raw in _commands(text):
        words, is_eval = list(raw), "eval" in raw
        while words and words[0] in ("then", "do", "else", "elif", "{", "!", "(", "time", "exec", "eval", "nohup"):
            if words[0] == "{":
                inside.append("{")
            words.pop(0)
        if not words:
            continue
        if words[0] in OPENS:
            inside.append(words[0])
            continue
        if words[0] in CLOSES or words[0] == "}":
            inside = inside[:-1]
            continue
        if words[0].endswith("()") or words[0] == "function":
            if "{" in words:
                inside.append("{")
            continue
        if words[0] in ("export", "local", "declare", "readonly", "set", "unset"):
            is_own = words[0] == "local"
            words = [] if words[0] in ("set", "unset") else [word for word in words[1:] if not word.startswith("-")]
            if is_own:
                continue
        if all(ASSIGNMENT.match(word) for word in words):
            for word in words:
                _assign(script, word, inside)
            continue
        expanded = [one for word in words for one in script.words(word)]
        if is_eval:  # which reads its words a second time
            expanded = [
                again
                for one in expanded
                for again in (script.words(one.replace("'", "\\'")) if "$" in one and MARK not in one else [one])
            ]
        found.append(expanded)
    return found


def unknown_in(word: str) -> list[str]:
    """The names of what is not known in a word."""
    return re.findall(f"{MARK}([^{MARK}]*){MARK}", word)


def _assign(script: Script, word: str, inside: list[str]) -> None:
    match = ASSIGNMENT.match(word)
    assert match is not None
    name, adds, raw = match[1], match[2], match[3]
    if raw.startswith("("):
        listed = [one for item in _words(raw[1:-1]) for one in script.words(item)]
        script.arrays[name] = [*script.arrays.get(name, []), *listed] if adds else listed
        return
    value = (script.variables.get(name, "") if adds else "") + script.text(raw)
    conditional = [one for one in inside if one != "{"]
    if conditional and script.variables.get(name) != value:
        value = _unknown(f"{name}, which the script sets under a condition")
    if "{" not in inside or conditional:
        script.variables[name] = value


def _commands(text: str) -> Iterator[list[str]]:
    command: list[str] = []
    skips = False
    for word in _words(text, operators=True):
        if word in ENDS:
            if command:
                yield command
            command, skips = [], False
        elif re.fullmatch(r"\d*>>?&?\d*|&>>?|<", word):
            skips = not re.search(r"&\d$", word)
        elif skips:
            skips = False
        elif not re.fullmatch(r"\d*>&\d|\d*>>?[^(].*", word):
            command.append(word)
    if command:
        yield command


def _words(text: str, operators: bool = False) -> Iterator[str]:
    """Written words, quotes and variables as they stand; with ``operators`` also what ends a command."""
    place, word, is_begun = 0, "", False
    while place < len(text):
        char = text[place]
        if text.startswith("\\\n", place):
            place += 2
        elif char == "\\":
            word, is_begun, place = word + text[place : place + 2], True, place + 2
        elif char in "'\"`":
            end = _quoted(text, place)
            word, is_begun, place = word + text[place:end], True, end
        elif text.startswith(("${", "$("), place):
            end = _closing(text, place + 1, text[place + 1], {"{": "}", "(": ")"}[text[place + 1]]) + 1
            word, is_begun, place = word + text[place:end], True, end
        elif char == "(" and word.endswith("="):
            end = _closing(text, place, "(", ")") + 1
            word, place = word + text[place:end], end
        elif char == "#" and not is_begun:
            end = text.find("\n", place)
            place = len(text) if end < 0 else end
        elif char in " \t" or (char == "\n" and not operators):
            if is_begun:
                yield word
            word, is_begun, place = "", False, place + 1
        elif operators and char in ";\n|&" and not (char == "&" and word.endswith(">")):
            if is_begun:
                yield word
            length = 2 if text[place : place + 2] in ("&&", "||", ";;") else 1
            yield text[place : place + length].replace(";;", ";")
            word, is_begun, place = "", False, place + length
        else:
            word, is_begun, place = word + char, True, place + 1
    if is_begun:
        yield word


def _quoted(text: str, place: int) -> int:
    """Where what begins with a quote has ended."""
    quote, place = text[place], place + 1
    while place < len(text) and text[place] != quote:
        place += 2 if text[place] == "\\" and quote != "'" else 1
    return min(place + 1, len(text))


def _closing(text: str, place: int, opens: str, closes: str) -> int:
    """The place of the bracket that closes the one at ``place``."""
    depth = 0
    while place < len(text):
        char = text[place]
        if char in "'\"" and depth:
            place = _quoted(text, place)
            continue
        if char == "#" and opens == "(" and text[place - 1] in " \t\n":  # a comment among the items of an array
            end = text.find("\n", place)
            place = len(text) if end < 0 else end
            continue
        depth += (char == opens) - (char == closes)
        if not depth:
            return place
        place += 2 if char == "\\" else 1
    return len(text)


def _calculated(filled: str, written: str) -> str:
    """The value of an expression, variables filled in; where one is not known, that variable is what is not known."""
    try:
        return str(_number(ast.parse(filled.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        inner = re.search(f"{MARK}([^{MARK}]*){MARK}", filled)
        return _unknown(inner[1] if inner else written)


def _number(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        return int(ARITHMETIC[type(node.op)](_number(node.left), _number(node.right)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    raise ValueError("no arithmetic")


def _unknown(name: str) -> str:
    return f"{MARK}{name}{MARK}"
