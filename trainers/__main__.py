"""``python -m trainers NAME --config x.yaml``: the same as ``python -m trainers.NAME``."""

from __future__ import annotations

import sys

from trainers.cli import TRAINERS, main, nearest

if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in TRAINERS:
        print(f"usage: python -m trainers {{{','.join(TRAINERS)}}} --config FILE [--key VALUE ...]", file=sys.stderr)
        if name and not name.startswith("-"):
            print(f"error: there is no trainer {name!r}{nearest(name, TRAINERS)}", file=sys.stderr)
        sys.exit(0 if name in ("-h", "--help") else 2)
    main(name, sys.argv[2:])
