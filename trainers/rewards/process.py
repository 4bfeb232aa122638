"""What runs in a process of a ``RewardPool``: reward functions, found by what the configuration calls them.

Imports nothing heavy, so that ``begin`` comes before the libraries that read how many threads they may have.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import parent_process
from multiprocessing.connection import wait
from typing import Any

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


def begin() -> None:
    """This process has one thread for arithmetic, and ends with its parent, however that ends, and by Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of its own; whatever it has started hears it too
    parent = parent_process()
    assert parent is not None, "a pool starts its processes with multiprocessing"
    threading.Thread(target=_follow, args=(parent.sentinel,), daemon=True).start()
    os.environ.update(ONE_THREAD)
    if "torch" in sys.modules:  # by the parent's main module, which is imported first
        sys.modules["torch"].set_num_threads(1)


def _follow(parent: int) -> None:
    """Ends this process when the parent's end of a pipe is closed, as it is even if the parent was killed."""
    wait([parent])
    os._exit(1)


@functools.cache  # a task finds nothing else of its process
def resolved(settings: bytes) -> tuple[Any, Any]:
    """The functions with their names, and what async ones run in; ``settings`` are those of a ``RewardPool``."""
    import asyncio

    from trainers.plugins import load_plugins
    from trainers.rewards.functions import resolve_rewards

    external_plugins, reward_funcs = pickle.loads(settings)
    load_plugins(external_plugins)
    pairs, _ = resolve_rewards(pickle.loads(reward_funcs))  # those of plugins can be unpickled now
    return pairs, asyncio.Runner()


def get_ready(settings: bytes) -> None:
    """The functions are found, or it is told with the first completions why not."""
    resolved(settings)


def scored(
    settings: bytes,
    limit_s: float | None,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
) -> tuple[Any, float]:
    """The rewards (B, K) float32 of ``functions.score``, and the seconds that it took. Raises what that raises."""
    from trainers.rewards.functions import score

    try:
        pairs, runner = resolved(settings)
        started = time.perf_counter()
        rewards_BK = score(pairs, prompts, completions, completion_ids, columns, runner=runner, limit_s=limit_s)
        return rewards_BK, time.perf_counter() - started
    except (Exception, SystemExit) as error:  # the latter of a plugin as it is imported
        raise _sendable(error) from error


def _sendable(error: Exception | SystemExit) -> Exception:
    """The error, or one that says the same, if its own type cannot go to another process, or would end that."""
    try:
        if isinstance(error, Exception) and type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # whatever a constructor, or what it was given, may raise
        pass
    return RuntimeError("".join(traceback.format_exception_only(error)).strip())
