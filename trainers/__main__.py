"""``python -m trainers NAME --config x.yaml``: as ``python -m trainers.NAME``; NAME may be ``rlhf`` too."""

from __future__ import annotations

import sys

from rayhelper.text import nearest
from trainers.cli import RLHF, TRAINERS, main

if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    commands = [*TRAINERS, RLHF]
    if name not in commands:
        print(f"usage: python -m trainers {{{','.join(commands)}}} --config FILE [--key VALUE ...]", file=sys.stderr)
        if name and not name.startswith("-"):
            print(f"error: there is no trainer {name!r}{nearest(name, commands)}", file=sys.stderr)
        sys.exit(0 if name in ("-h", "--help") else 2)
    main(name, sys.argv[2:])
