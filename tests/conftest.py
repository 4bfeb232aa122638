"""One Ray cluster a session, and nothing left behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything that uses the cluster runs in one process, so that there is one cluster."""
    for item in items:
        if "ray_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ray"))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A cluster of this machine with eight invented GPUs."""
    import logging

    import ray

    from rayhelper.patches import ray_on_loopback

    with ray_on_loopback():
        ray.init(
            address="local",
            num_cpus=2,
            num_gpus=8,
            include_dashboard=False,
            object_store_memory=512 * 1024 * 1024,
            logging_level=logging.WARNING,
        )
    yield
    ray.shutdown()


@contextlib.contextmanager
def without_runtime() -> Iterator[None]:
    """Inside, this process is as before ``RayHelper.initialize``, whatever a wider fixture has started."""
    from rayhelper.runtime import state

    outer, state.active = state.active, None
    try:
        yield
    finally:
        state.active = outer


@pytest.fixture(scope="module", autouse=True)
def _off_afterwards() -> Iterator[None]:
    """A module whose tests leave workers running fails."""
    yield
    from rayhelper.runtime import state

    left, state.active = state.active, None
    if left is not None:
        left.teardown()
        pytest.fail("a test of this module left RayHelper initialized")
