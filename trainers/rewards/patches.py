"""Changes to other libraries that have no public switch. One function a patch; delete when upstream has one."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing.process import BaseProcess
from threading import Thread


def processes_of(executor: ProcessPoolExecutor) -> list[BaseProcess]:
    """The processes of a pool: it has no other way to end one that is at work, or to tell how one ended.

    Python 3.14 can end them (``kill_workers``), but waits for none and tells of none. Where a version keeps them
    elsewhere there are none: those at work then end when they are done. Delete when a pool gives them out.
    """
    return list((getattr(executor, "_processes", None) or {}).values())


def manager_of(executor: ProcessPoolExecutor) -> Thread | None:
    """The thread of a pool that buries its processes, if they were started; None also where a version has none.

    Python (3.11 to 3.14) waits for it in ``shutdown(wait=True)`` alone, which waits for what is at work too. Delete
    when a shutdown can have a limit of time.
    """
    return getattr(executor, "_executor_manager_thread", None)
