"""Writes defaults.json: the defaults of ms-swift's arguments, as its source says them, by file.

pip install ms-swift==4.6.0 --no-deps --target FOLDER
python -m tests.golden.ms_swift.record_defaults FOLDER > tests/golden/ms_swift/defaults.json
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

from trainers.configuration.defaults import TABLE

THEIR_KEYS = {"use_bnb_nested_quant": "bnb_4bit_use_double_quant"}  # ours: theirs


def main(folder: str) -> None:
    rows = [default for defaults in TABLE.values() for default in defaults]
    found = {file: _fields(Path(folder) / file) for file in sorted({default.file for default in rows})}
    keys = {THEIR_KEYS.get(default.key, default.key) for default in rows}
    kept = {file: {key: value for key, value in fields.items() if key in keys} for file, fields in found.items()}
    print(json.dumps(kept, indent=1))


def _fields(file: Path) -> dict[str, Any]:
    """Fields of dataclasses whose default is a plain value; a later class of the file wins."""
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            value: ast.expr = node.value
            if isinstance(value, ast.Call):  # field(default=...)
                value = next((one.value for one in value.keywords if one.arg == "default"), value)
            try:
                found[node.target.id] = ast.literal_eval(value)
            except ValueError:
                continue
    return found


if __name__ == "__main__":
    main(sys.argv[1])
