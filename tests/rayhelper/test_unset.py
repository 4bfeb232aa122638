"""An attribute that a role's method alone sets, read on the driver: the error says where it lives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rayhelper import RayHelper
from tests.conftest import session_of, without_runtime

GROUPS = {"g": {"device": "CPU", "ranks": 1, "workers": ["train"]}}


@RayHelper.worker(group="train")
class Trainer:
    @RayHelper.function(group="train")
    def build(self) -> None:
        self.model: Any = "built"

    @property
    def broken(self) -> Any:
        return None.weight  # type: ignore[attr-defined]


class Giving:
    """Has an answer to names of its own, as a module of torch has."""

    def __getattr__(self, name: str) -> Any:
        if name == "given":
            return "of the base class"
        raise AttributeError(f"nothing is known of {name}")


class Both(Trainer, Giving):
    pass


@pytest.fixture(params=["inprocess", "ray"])
def _session(request: pytest.FixtureRequest) -> Iterator[None]:
    with session_of(request, GROUPS):
        yield


@pytest.mark.usefixtures("_session")
def test_the_role_that_sets_an_attribute_is_named() -> None:
    trainer = Trainer()
    trainer.build()
    words = r"no attribute 'model'\. Trainer\.build \(role 'train'\) sets self\.model, which exists only on the workers"
    with pytest.raises(AttributeError, match=f"{words}.*read it in one$"):  # Python adds ". Did you mean: ..."
        _ = trainer.model
    assert getattr(trainer, "model", "none") == "none"


@pytest.mark.usefixtures("_session")
def test_other_errors_are_what_they_were() -> None:
    both: Any = Both()
    assert both.given == "of the base class"
    with pytest.raises(AttributeError, match="nothing is known of model"):
        _ = both.model
    trainer: Any = Trainer()
    with pytest.raises(AttributeError, match=r"'Trainer' object has no attribute 'other'$"):
        _ = trainer.other
    with pytest.raises(AttributeError, match=r"'NoneType' object has no attribute 'weight'$"):
        _ = trainer.broken


def test_with_ray_off_the_error_is_pythons_own() -> None:
    with without_runtime():
        trainer = Trainer()
        with pytest.raises(AttributeError, match=r"'Trainer' object has no attribute 'model'$"):
            _ = trainer.model
        trainer.build()
        assert trainer.model == "built"
