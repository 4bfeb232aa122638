"""Wrong uses of a decorated class, one a line: checked by ``test_types.py``, never run."""

from __future__ import annotations

from rayhelper import RayHelper
from tests.typing.user_class import Careful, Trainer

GROUPS = {"g": {"device": "CPU", "ranks": 1, "workers": ["train"]}}


def arguments(trainer: Trainer, careful: Careful) -> None:
    Trainer("fast")  # error
    Careful()  # error
    trainer.update("text")  # error
    trainer.update([1], factor=2)  # error
    careful.update()  # error
    trainer.judge(5).close()  # error
    trainer.count("3")  # error
    trainer.shifted("1")  # error
    trainer.shifted(1, 2, 3)  # error
    trainer.scaled(1.0, by="2")  # error
    trainer.version(1)  # error
    trainer.name(3)  # error
    trainer.build("fast")  # error
    trainer.largest(["a"])  # error
    trainer.upper([1])  # error
    trainer.update.defer()  # error
    trainer.shifted.defer("1")  # error
    trainer.update.stream("text")  # error


def values(trainer: Trainer) -> None:
    scores: list[str] = trainer.update([1])  # error
    number: str = trainer.shifted.defer(1).result()  # error
    future: list[float] = trainer.update.defer([1])  # error
    trainer.loss()  # error
    trainer.loss = 1.0  # error
    trainer.updates([1])  # error
    for token in trainer.tokens("a b"):  # error
        print(scores, number, future, token)


def decorators() -> None:
    RayHelper.worker(group=3)  # error
    RayHelper.function(dispatch="slice")  # error
    RayHelper.function(group="train", dispatch="slices")  # error
    RayHelper.function(group="train", execute="one")  # error
    RayHelper.function(group="train", collect="flat")  # error
    RayHelper.balanced(cost="tokens")  # error


def facade() -> None:
    RayHelper.initialize(GROUPS, runtime="threads")  # error
    RayHelper.session(GROUPS, "ray")  # error
    RayHelper.shard("0", 2)  # error
    RayHelper.init_process_group(timeout_s="1h")  # error
    RayHelper.as_completed([1])  # error
