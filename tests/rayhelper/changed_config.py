"""A user's module of settings, which a test changes before it constructs an object of ``changed_user``."""

from __future__ import annotations

import enum
import os
from argparse import Namespace
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

SCALE = 1
OPTIONS = {"lr": 1, "names": ["a"]}
NAMES = ["a", "b"]
CALLED = dict(lr=1)  # noqa: C408
ARGS: Any = None
CHOICE = SimpleNamespace(lr=1, process=os.getpid())
GIVEN = Namespace()
PROCESS = os.getpid()  # on every process its own
LATE = None
COUNT = 0
REGISTRY: dict[str, int] = {}
MODE = "plain"
if SCALE > 5:
    MODE = "large"


class Kind(enum.Enum):
    PLAIN = "plain"
    OTHER = 2


class Settings:
    lr = 1

    def __init__(self, rate: int = 1) -> None:
        self.kept = 1
        self.rate = rate
        self.process = 0
        self.process = os.getpid()
        self.cache: Any = None

    def cached(self) -> Any:
        self.cache = self.cache or os.getpid()
        return self.cache

    def own(self) -> Any:
        return 1

    @classmethod
    def of_class(cls) -> Any:
        return 1

    @staticmethod
    def static() -> Any:
        return 1

    @property
    def shown(self) -> Any:
        return 1


@dataclass
class Config:
    lr: float = 0.1
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Sizes:
    rows: int = 1
    points: int = 2


spread = Sizes(*(3, 4))
fixed = Sizes(rows=5)
settings = Settings()
faster = Settings(rate=2)
config = Config()
given = Config(lr=0.2)


def scaled(x: int) -> int:
    return x * SCALE


def counted() -> int:
    global COUNT
    COUNT += 1
    return COUNT


def registered(name: str) -> int:
    REGISTRY[name] = len(REGISTRY)
    return len(REGISTRY)


class Store:
    """Whether it has loaded something goes with what it has loaded."""

    def __init__(self) -> None:
        self.is_loaded = False
        self.size = 0
        self.data: object = None

    def load(self) -> None:
        self.data = object()
        self.is_loaded = True

    def set_size(self, size: int) -> None:
        self.size = size


store = Store()
