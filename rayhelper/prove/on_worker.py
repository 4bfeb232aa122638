"""What a worker notes of its calls while ``prove`` compares runtimes: arguments, value, generators, and settings.

A worker begins to note when it is first asked for its state (``WorkerRuntime.state``), which ``prove`` alone does.
"""

from __future__ import annotations

import copy
import decimal
import hashlib
import os
import random
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rayhelper.prove.held import Held, held_of
from rayhelper.roles.methods import RoleMethod
from rayhelper.roles.names import names_of_roles
from rayhelper.roles.parts import Identity, placement_of
from rayhelper.values.calls import parameter_names
from rayhelper.values.dispatch import bare
from rayhelper.worker.ambient import flags_of
from rayhelper.worker.patches import generators

State = dict[str, dict[str, Held]]  # of an object and its parts, by name: what each attribute holds


@dataclass
class Note:
    """One call on one worker."""

    title: str
    arguments: dict[str, Held]
    changed: tuple[str, ...] = ()  # arguments that the method changed in place
    value: Held | None = None  # None: it raised
    before: dict[str, bytes] = field(default_factory=dict)  # where the random generators were
    drawn: tuple[str, ...] = ()  # those from which the method drew
    settings: dict[str, str] = field(default_factory=dict)  # of the process, inside the method


@dataclass
class OnWorker:
    """One worker after a call: what its object holds, and the calls that it made since it was asked last."""

    state: State
    notes: list[Note] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)  # of the process, after the call


class Notes:
    """The calls of one worker."""

    def __init__(self) -> None:
        self.taken: list[Note] = []

    def of(self, identity: Identity) -> OnWorker:
        """What is known of an object here; the calls are handed over."""
        taken, self.taken = self.taken, []
        return OnWorker(state_of(identity), taken, settings())

    def noting(self, method: RoleMethod[..., Any]) -> RoleMethod[..., Any]:
        """The same method, whose calls are noted."""
        noted: Any = copy.copy(method)
        noted.finished_call = lambda *given: self._call(method, *given)
        noted.coroutine = lambda *given: self._coroutine(method, *given)
        return noted  # type: ignore[no-any-return]

    def _call(
        self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *rest: Any
    ) -> Any:
        noting = Noting(method, args, kwargs)
        self.taken.append(noting.note)
        try:
            value = method.finished_call(target, args, kwargs, *rest)
            noting.note.value = held_of(value)
            return value
        finally:
            noting.end()

    async def _coroutine(
        self, method: RoleMethod[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        noting = Noting(method, args, kwargs)
        self.taken.append(noting.note)
        try:
            value = await method.coroutine(target, args, kwargs)
            noting.note.value = held_of(value)
            return value
        finally:
            noting.end()


class Noting:
    """A call that is being noted."""

    def __init__(self, method: RoleMethod[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.given = named_arguments(method, args, kwargs)
        arguments = {name: held_of(value) for name, value in self.given.items()}
        self.note = Note(method.__name__, arguments, before=random_digests(), settings=settings())

    def end(self) -> None:
        """The call has ended."""
        note, now = self.note, random_digests()
        note.drawn = tuple(name for name, digest in now.items() if digest != note.before.get(name, digest))
        changed = [name for name, value in self.given.items() if held_of(value).unlike(note.arguments[name])]
        note.changed = tuple(changed)
        self.given = {}


def named_arguments(method: RoleMethod[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of the method's parameters."""
    names = parameter_names(method)
    labels = [names[k] if k < len(names) else str(k + 1) for k in range(len(args))]
    return {name: bare(value) for name, value in (*zip(labels, args, strict=True), *kwargs.items())}


def state_of(identity: Identity) -> State:
    """What an object of this process and its parts hold, in the attributes that methods of roles read or set."""
    found: State = {}
    for instance in identity.instances():
        known = names_of_roles(type(instance))
        name = instance._rayhelper.identity.name
        found[name] = {
            attribute: held_of(value, of_arrays_alone=not _is_plain(value))
            for attribute, value in vars(instance).items()
            if attribute in known and placement_of(value) is None
        }
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, bytes, list, tuple, dict, type(None)))


def random_digests() -> dict[str, bytes]:
    """Where the random generators of this process are, by library."""
    torch = sys.modules.get("torch")
    with generators.paused:
        told: dict[str, Any] = {"python": repr(random.getstate()).encode(), "numpy": _of_numpy()}
        if torch is not None:
            told["torch"] = torch.get_rng_state().numpy().tobytes()
    return {name: hashlib.blake2b(one, digest_size=8).digest() for name, one in told.items()}


def _of_numpy() -> bytes:
    state: Any = np.random.get_state()
    return repr([one.tobytes() if isinstance(one, np.ndarray) else one for one in state]).encode()


ENVIRONMENT = "environment variable "  # before a variable's name, in settings
FOLDER, HASH_SEED = "working folder", "seed of hash()"
AMBIENT = (  # settings that code of a role need not ask for: they act on it
    *("default dtype", "default device", "matmul precision", "deterministic algorithms", "anomaly detection"),
    *("cudnn", "grad mode", "inference mode", "autocast", "precision of decimal", "attention kernels"),
    *("numpy's floating-point errors", "mkldnn", "numpy's print options"),
)
THREADS = "threads of torch"


def settings() -> dict[str, str]:
    """What is set in this process, as text, beside the variables of the user's code. The environment's are hashed."""
    context = decimal.getcontext()
    found = {
        "precision of decimal": f"{context.prec} {context.rounding}",
        "numpy's print options": repr(sorted(np.get_printoptions().items(), key=lambda one: one[0])),
        "warnings filters": str(len(warnings.filters)),
        FOLDER: os.getcwd(),
        HASH_SEED: str(hash("a text")),
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        found |= {name: str(value) for name, value in flags_of(torch).items()}
        on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        found["grad mode"] = _on(torch.is_grad_enabled())
        found["inference mode"] = _on(torch.is_inference_mode_enabled())
        found["autocast"] = ", ".join(f"{one} {torch.get_autocast_dtype(one)}" for one in on) or "off"
        found["mkldnn"] = _on(torch.backends.mkldnn.enabled)
        found[THREADS] = str(torch.get_num_threads())
        cuda = torch.backends.cuda
        kernels = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())
        found["attention kernels"] = str(kernels)
    for name, value in os.environ.items():
        found[ENVIRONMENT + name] = hashlib.blake2b(value.encode(errors="replace"), digest_size=8).hexdigest()
    return found


def _on(value: bool) -> str:
    return "on" if value else "off"
