"""Changes to other libraries that have no public switch. One function a patch; delete when upstream has one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray

try:
    from ray._private.worker import global_worker
except ImportError:  # another version: ``current_task`` asks Ray's public context
    global_worker = None  # type: ignore[assignment]


@contextlib.contextmanager
def ray_on_loopback() -> Iterator[None]:
    """Inside, ``ray.init`` starts its processes on 127.0.0.1 and nothing listens on an outside address.

    Ray (2.49 to 2.60) replaces a loopback ``_node_ip_address`` by the machine's outward one, and binds to loopback only
    where it forbids clusters, as it does by default on macOS and Windows: RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER
    (ray-project/ray issue 18730). The flag is read at import, hence the attribute. Delete when ``ray.init`` honours a
    loopback address.
    """
    from ray._private import ray_constants

    before = getattr(ray_constants, "ENABLE_RAY_CLUSTER", None)
    if before is None:  # another version: Ray decides
        yield
        return
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def listen_to_lines(note: Callable[[Mapping[str, Any]], None]) -> Callable[[], None] | None:
    """Has ``note`` called with each batch of lines of workers, after Ray has shown it; the reply ends this.

    None: Ray shows no lines here, or is another version. Ray (2.49 to 2.60) has no public way to know what it has
    shown. Delete when ``ray.shutdown`` waits for what workers have printed.
    """
    try:
        from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

        is_shown = any(name == "ray_print_logs" for name, _ in dispatcher.handlers)
    except (ImportError, AttributeError):
        return None
    if not is_shown:
        return None
    name = f"rayhelper-{id(note)}"
    dispatcher.add_handler(name, note)
    return functools.partial(dispatcher.remove_handler, name)


def current_task() -> Any:
    """The id of the task that runs in this thread of a worker.

    Ray (2.49 to 2.60) gives it out as text alone, after further checks (``get_runtime_context().get_task_id``); another
    version is asked for that. Each call is spared some microseconds. Delete when the public way is as quick.
    """
    core: Any = getattr(global_worker, "core_worker", None)
    if hasattr(core, "get_current_task_id"):
        return core.get_current_task_id()
    return ray.TaskID(bytes.fromhex(ray.get_runtime_context().get_task_id() or ""))


def id_of_actor(actor: Any) -> str:
    """The id of an actor, as Ray's errors name it; empty where a version keeps it elsewhere.

    Ray (2.49 to 2.60) has no public name for it outside of the actor. Delete when a handle has one.
    """
    known = getattr(actor, "_actor_id", None)
    return "" if known is None else str(known.hex())


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """What each live node has free, by its id; all that it has, where a version does not say what is free.

    Ray (2.49 to 2.60) says it of the whole cluster alone (``ray.available_resources``). With all that a node has, a
    reservation that does not fit fails later, and is tried again. Delete when Ray says it of each node.
    """
    state: Any = getattr(getattr(ray, "_private", None), "state", None)
    if hasattr(state, "available_resources_per_node"):
        free: Mapping[str, Mapping[str, float]] = state.available_resources_per_node()
        return free
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
