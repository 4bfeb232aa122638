"""``python -m trainers NAME --config x.yaml``: see ``commands.py`` for what NAME may be. Or ``translate``."""

from __future__ import annotations

import sys

from trainers.cli import main
from trainers.commands import commands

if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name == "translate":
        from trainers.translate.command import main as translate

        sys.exit(translate(sys.argv[2:]))
    if name and not name.startswith("-"):
        main(name, sys.argv[2:])
    else:
        print("usage: python -m trainers NAME --config FILE [--key VALUE ...]", file=sys.stderr)
        print(f"NAME is one of {', '.join(commands())},", file=sys.stderr)
        print("or translate FILE|-- COMMAND, which writes another system's in our keys,", file=sys.stderr)
        print("or your own trainer: my_package.my_module:MyTrainer, or path/to/file.py:MyTrainer.", file=sys.stderr)
        sys.exit(0 if name in ("-h", "--help") else 2)
