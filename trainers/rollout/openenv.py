"""A game on a server of OpenEnv, for ``OpenEnvScheduler``: ms-swift's ``swift/rollout/openenv_wrapper.py``.

    game = OpenEnvGame({"base_url": "http://127.0.0.1:8000", "reset_kwargs": {}})
    observation, _ = game.reset()
    observation, reward, done, _ = game.step({"message": "[1 2 3]"})

The client is OpenEnv's own, of the package openenv. Calls block until the server has answered.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import time
from collections.abc import Mapping
from typing import Any

URL = "http://localhost:8000"
TRIES = 3
DELAY_S = 2.0  # before the second try; twice as long before the third

logger = logging.getLogger(__name__)


def is_installed() -> bool:
    """Whether OpenEnv's client can be imported."""
    return importlib.util.find_spec("openenv") is not None


class OpenEnvGame:
    """One game; ``env_config`` of a row has the server's ``base_url``, and ``reset_kwargs``."""

    def __init__(self, env_config: Mapping[str, Any]) -> None:
        self.base_url = str(env_config.get("base_url") or URL)
        self.reset_kwargs = dict(env_config.get("reset_kwargs") or {})
        self.client: Any = None

    def reset(self) -> tuple[Any, Any]:
        """The first observation, and what the server says of it."""
        result = self._asked("reset", **self.reset_kwargs)
        return result.observation, getattr(result, "metadata", None)

    def step(self, action: Any) -> tuple[Any, float, bool, Any]:
        """The next observation, the reward, whether the game is over, and what the server says of it."""
        result = self._asked("step", action)
        return result.observation, float(result.reward or 0.0), bool(result.done), getattr(result, "metadata", None)

    def close(self) -> None:
        """Ends the connection. Nothing more is asked of the game."""
        client, self.client = self.client, None
        if client is not None:
            with contextlib.suppress(Exception):  # the server may be gone
                client.__exit__(None, None, None)

    def _asked(self, method: str, *arguments: Any, **options: Any) -> Any:
        for attempt in range(1, TRIES + 1):
            try:
                return getattr(self._connected(), method)(*arguments, **options)
            except Exception as error:
                if attempt == TRIES:
                    raise ConnectionError(f"the OpenEnv server at {self.base_url} gave no {method}: {error}") from error
                logger.warning("OpenEnv at %s, %s, try %d of %d: %s", self.base_url, method, attempt, TRIES, error)
                time.sleep(DELAY_S * attempt)
                self.close()
        raise AssertionError("the last try returns or raises")

    def _connected(self) -> Any:
        if self.client is None:
            from openenv.core.generic_client import GenericEnvClient

            self.client = GenericEnvClient(base_url=self.base_url).sync()
            self.client.__enter__()
        return self.client
