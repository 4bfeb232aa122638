"""``python -m trainers NAME --config x.yaml``: see ``commands.py`` for what NAME may be, and ``program.py``."""

from __future__ import annotations

import sys

from trainers.program import python_m_trainers

if __name__ == "__main__":
    sys.exit(python_m_trainers(sys.argv[1:]))
