"""What an engine's start leaves of the environment, and what other threads see of it. vLLM's part is played."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainers.rollout.vllm import patches
from trainers.rollout.vllm.start import starting, variables

OURS = {"RANK": "0", "VLLM_RPC_BASE_PATH": "/somewhere"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What there is before; a test's own variables go with it."""
    for name in ("RANK", "NEW", "VLLM_NEW", "MEANWHILE", "VLLM_RPC_BASE_PATH"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("OLD", "before")
    monkeypatch.setenv("GONE", "there")
    monkeypatch.setenv("READ", "read")
    return seen()


def seen() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def in_another_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def vllm_starts() -> None:
    """Sets, changes and takes away variables as vLLM does."""
    assert os.environ["RANK"] == "0"
    os.environ["NEW"] = "new"
    os.environ.setdefault("VLLM_NEW", "kept")
    os.environ["VLLM_RPC_BASE_PATH"] = "elsewhere"
    os.environ.update(OLD="changed")
    os.environ.pop("GONE", None)
    assert os.environ.get("READ") == "read"


def test_what_vllm_changed_is_put_back_but_for_its_own_variables(environment: dict[str, str]) -> None:
    with variables(OURS):
        vllm_starts()
        assert (os.environ["OLD"], "GONE" in os.environ) == ("changed", False)
    assert seen() == environment | {"VLLM_NEW": "kept"}


def test_it_is_put_back_after_a_start_that_fails(environment: dict[str, str]) -> None:
    def failing() -> None:
        with variables(OURS):
            vllm_starts()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert seen() == environment | {"VLLM_NEW": "kept"}


def test_what_another_thread_sets_meanwhile_stays(environment: dict[str, str]) -> None:
    with variables(OURS):
        vllm_starts()
        in_another_thread(lambda: os.environ.update(MEANWHILE="mine", READ="written by another"))
        assert os.environ["MEANWHILE"] == "mine"  # vLLM looks at it, which is no change
    assert seen() == environment | {"VLLM_NEW": "kept", "MEANWHILE": "mine", "READ": "written by another"}


def test_no_variable_of_another_is_missing_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that ever happens to the environment of the process, name by name."""
    happened: list[str] = []

    def noted(call: Callable[..., None]) -> Callable[..., None]:
        def note(name: bytes, *value: bytes) -> None:
            happened.append(os.fsdecode(name))
            call(name, *value)

        return note

    with monkeypatch.context() as context:
        context.setattr(os, "putenv", noted(os.putenv))
        context.setattr(os, "unsetenv", noted(os.unsetenv))
        with variables(OURS):
            vllm_starts()
    assert set(happened) == {*OURS, "NEW", "VLLM_NEW", "OLD", "GONE"}


def test_a_python_that_encodes_elsewhere_puts_back_all_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"OLD": "before", "GONE": "there", "READ": "read"}
    monkeypatch.setattr(os, "environ", dict(plain))
    with variables(OURS):
        vllm_starts()
    assert os.environ == plain | {"VLLM_NEW": "kept"}


def test_the_environment_takes_no_more_notes_afterwards() -> None:
    environ: Any = os.environ
    before = environ.encodekey, environ.encodevalue
    with patches.changed_variables() as changed:
        assert (environ.encodekey, environ.encodevalue) != before
        assert changed() == {}
    assert (environ.encodekey, environ.encodevalue) == before


def test_threads_and_random_numbers_are_left_as_they_were() -> None:
    set_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with starting(True, alone=True, joins=False):
        torch.manual_seed(4)
        torch.set_num_threads(num_threads + 1)
        torch.set_num_threads = lambda number: None
    assert torch.set_num_threads is set_threads
    assert torch.get_num_threads() == num_threads
    assert torch.rand(2).tolist() == expected.tolist()


# --- changes to vLLM that an engine cannot do without


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module with the flag, as on a CPU that has oneDNN."""
    from vllm import _custom_ops

    monkeypatch.setattr(_custom_ops, "_supports_onednn", True)
    return _custom_ops


def test_weights_are_not_packed_while_an_engine_starts_on_a_cpu(operators: Any) -> None:
    with starting(True, alone=True, joins=False):
        assert operators._supports_onednn is False
    assert operators._supports_onednn is True


def test_a_vllm_without_the_flag_is_left_alone(operators: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(operators, "_supports_onednn")
    assert patches.pack_weights(False) is False
    assert not hasattr(operators, "_supports_onednn")


def test_a_process_of_vllms_own_packs_none_either(operators: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainers.rollout.vllm.cpu_worker import CPUWorker, CpuWorker

    monkeypatch.setattr(CPUWorker, "__init__", lambda self: None)
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: None)
    CpuWorker()
    assert operators._supports_onednn is False
