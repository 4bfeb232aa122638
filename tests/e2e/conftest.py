"""Ray workers that many tests share: most of what a worker costs is its start."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rayhelper import RayHelper
from rayhelper.runtime import state
from tests.conftest import may_stay, without_runtime

RaySession = Callable[[dict[str, Any]], contextlib.AbstractContextManager[None]]


@pytest.fixture(scope="session")
def ray_session(ray_cluster: None) -> Iterator[RaySession]:
    """``RayHelper.session``, but for equal groups with the same workers, which live as long as the cluster."""
    started: dict[str, Any] = {}

    @contextlib.contextmanager
    def session(groups: dict[str, Any]) -> Iterator[None]:
        name = json.dumps(groups)
        with without_runtime():
            if name not in started:
                with may_stay():
                    RayHelper.initialize(groups, runtime="ray")
                started[name] = state.active
            state.active = started[name]
            with may_stay("actor"):  # in the place of one that died
                yield

    yield session
    with without_runtime():
        for runtime in started.values():
            state.active = runtime
            RayHelper.teardown()
