"""Changes to other libraries that have no public switch. One function a patch; delete when upstream has one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


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
