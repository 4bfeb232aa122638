"""The process that ``multiprocessing`` forks ranks from: ``-m tests.warm.ranks ADDRESS``, until its input ends.

It is a fork of the server of warm Pythons, which has imported everything but Ray.
"""

from __future__ import annotations

import os
import socket
import sys
from multiprocessing import forkserver

import ray.cloudpickle  # noqa: F401  # what ranks send

from tests.frozen import freeze_heap


def main() -> None:
    freeze_heap()
    sys.dont_write_bytecode = False  # each rank imports the tests that it is from
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen(128)
    until = os.dup(0)  # ``main`` closes its input
    os.write(1, b"ready\n")
    os.dup2(2, 1)  # nobody reads more from that pipe: ranks that print would wait for ever
    forkserver.main(listener.detach(), until, [])


if __name__ == "__main__":
    main()
