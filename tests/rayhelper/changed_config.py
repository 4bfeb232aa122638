"""A user's module of settings, which a test changes before it constructs an object of ``changed_user``."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

SCALE = 1
OPTIONS = {"lr": 1, "names": ["a"]}
NAMES = ["a", "b"]
PROCESS = os.getpid()  # on every process its own
LATE = None
COUNT = 0
REGISTRY: dict[str, int] = {}
MODE = "plain"
if SCALE > 5:
    MODE = "large"


class Settings:
    lr = 1

    def __init__(self) -> None:
        self.kept = 1


@dataclass
class Config:
    lr: float = 0.1
    names: list[str] = field(default_factory=list)


settings = Settings()
config = Config()


def scaled(x: int) -> int:
    return x * SCALE


def counted() -> int:
    global COUNT
    COUNT += 1
    return COUNT


def registered(name: str) -> int:
    REGISTRY[name] = len(REGISTRY)
    return len(REGISTRY)
