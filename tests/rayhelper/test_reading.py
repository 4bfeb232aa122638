"""The page that says through which files a call on Ray passes names all of them, and none that it does not enter."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from rayhelper import RayHelper
from rayhelper.runtimes.ray import waiting
from tests.conftest import RaySession

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = str(ROOT / "rayhelper") + "/"
GROUPS = {"followed": {"device": "CPU", "ranks": 2, "workers": ["followed"]}}
entered: set[str] = set()  # files of the package, in this process


def note(frame: FrameType, event: str, _: Any) -> None:
    if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
        entered.add(frame.f_code.co_filename.removeprefix(PACKAGE))


@RayHelper.worker(group="followed")
class Followed:
    @RayHelper.function(group="followed", dispatch="slice", collect="flatten")
    def double(self, items: Any) -> Any:
        return items * 2

    @RayHelper.function(group="followed", execute="first")
    def follow(self) -> None:
        sys.setprofile(note)

    @RayHelper.function(group="followed", execute="first")
    def followed(self) -> set[str]:
        sys.setprofile(None)
        return entered


def test_a_call_on_ray_enters_the_files_that_the_page_names(
    ray_session: RaySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_FAST_S", 60.0)  # a slow machine would look for what is late
    page = (ROOT / "docs" / "core.md").read_text().partition("## Reading the code")[2]
    table, _, rest = page.partition("A call without a failure")
    read = re.findall(r"^\| `([\w/]+\.py)`", table, re.MULTILINE)
    asked = re.findall(r"`([\w/]+\.py)`", rest)
    with ray_session(GROUPS):
        followed = Followed()
        followed.double(np.ones(4))  # what is done once
        followed.follow()
        outer = sys.getprofile()
        sys.setprofile(note)
        try:
            followed.double(np.ones(4))
        finally:
            sys.setprofile(outer)
        found = entered | followed.followed()
    assert found == {*read, *asked}
    assert len(read) == len(set(read)) == 12
