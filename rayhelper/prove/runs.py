"""One program in several runtimes, and the first thing in which the runs differ.

    off                     as a script of one process
    one worker, strict      what crosses a role's border is packed, and has no memory in common
    two workers             in this process, one after the other
    two workers on Ray      in processes of their own
    roles apart             each role on a worker of its own, or as the configuration's device groups place roles
    two workers per role    the same with two workers, of roles that meet in no collectives
    two under torchrun      in two processes that are started for it

Where workers meet in collectives, which takes processes, one worker on Ray stands in for two in this process. Runs of
equally many workers must agree to the last bit. One worker and two sum real numbers in another order, so that their
values agree within a tolerance. A whole number that is the number of workers in both runs counts as the same.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import tempfile
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from rayhelper.device_groups import DeviceGroups
from rayhelper.errors import ConfigError, RayHelperError
from rayhelper.helper import RayHelper
from rayhelper.planning.role_kinds import default_hosts
from rayhelper.prove.comparing import Difference, Ended, differences
from rayhelper.prove.evidence import Evidence, Observer, kept
from rayhelper.prove.held import held_of
from rayhelper.prove.under_torchrun import CannotRunError, UnderTorchrun
from rayhelper.prove.watching import WatchedOff, Watcher, in_role, rank_of_error
from rayhelper.roles.runtime import state
from rayhelper.runtimes.inprocess import ProcessesNeededError
from rayhelper.worker.random_streams import RandomState

TORCHRUN = "two processes of torchrun"
APART = "roles apart"
TWO_APART = "two workers per role"
TOLERANCE = 1e-4  # between one worker and two
_NAME_OF_GROUP = "workers_"  # and a number
_ENTRIES = ("train", "run", "fit", "main")  # methods that are looked for, in order
_PLACEMENT_KEYS = ("use_ray", "device_groups", "ray_address", "colocate_groups")


logger = logging.getLogger(__name__)


class Proof(NamedTuple):
    """What came of comparing the runs of a program."""

    differences: list[Difference]
    runs: tuple[str, ...]  # that were made
    left_out: dict[str, str]  # by name, runs that could not be made, and why


def prove(
    program: Callable[[], Any],
    roles: Collection[str],
    *,
    ray: bool = True,
    torchrun: bool | None = None,
    groups: Sequence[Collection[str]] | None = None,
) -> list[Difference]:
    """The first difference of each pair of runs; none: the program gives the same everywhere.

    Real numbers that were only added up in another order are told as well, with ``is_error`` False. A run that could
    not be made is logged.

    Args:
        program: What a script would do: it constructs objects and makes calls. It is called once a run.
        roles: All roles of its classes.
        ray: Whether it also runs on Ray, with workers on CPUs.
        torchrun: Whether it also runs under torchrun, in two processes that are started for it; None: as ``ray``.
        groups: Which roles share workers in the run with roles apart. None, or one group: there is no such run.

    Raises:
        What the program raises with Ray off. What it raises elsewhere is a difference.
    """
    return _reported(proof_of(program, roles, ray=ray, torchrun=torchrun, groups=groups))


def _reported(proof: Proof) -> list[Difference]:
    for name, why in proof.left_out.items():
        logger.warning("prove leaves out the run %r: %s", name, why)
    return proof.differences


def proof_of(
    program: Callable[[], Any],
    roles: Collection[str],
    *,
    ray: bool = True,
    torchrun: bool | None = None,
    groups: Sequence[Collection[str]] | None = None,
) -> Proof:
    """As ``prove``, with the runs that were made and those that could not be."""
    began_with = RandomState.here()
    with_torchrun = ray if torchrun is None else torchrun
    under_torchrun = UnderTorchrun() if with_torchrun else None
    kept_before = {key: held_of(data) for key, data in kept()}
    runs: dict[str, Ended] = {}
    left_out: dict[str, str] = {}
    apart = groups or []
    for name, workers, options in _RUNS:
        if ("Ray" in name and not ray) or (name == "one worker on Ray" and "two workers" in runs):
            continue
        if name == APART and len(apart) < 2:
            continue
        began_with.restore()
        run = watched(program, apart if name == APART else [roles], workers, options)
        if run.error is not None and not workers:
            raise run.error  # there is nothing to compare with
        if isinstance(run.error, ProcessesNeededError):
            if (not ray and not with_torchrun) or name == APART:
                left_out[name] = _MEET
        else:
            runs[name] = run
    alike = True
    if len(apart) > 1:
        run, alike = _two_apart(program, apart, began_with)
        if isinstance(run.error, ProcessesNeededError):
            left_out[TWO_APART] = _MEET
        else:
            runs[TWO_APART] = run
    began_with.restore()
    if under_torchrun is not None:
        try:
            runs[TORCHRUN] = under_torchrun.run(program, roles)
        except CannotRunError as error:
            left_out[TORCHRUN] = str(error)

    @functools.cache
    def watch(number: int) -> Evidence:
        began_with.restore()
        observer = Observer(number, in_role, kept_before)
        watched(program, [roles], 0, {}, observer)
        return observer.evidence

    found: list[Difference] = []
    for one, other, tolerance in _pairs(runs, alike=alike):
        is_apart = other in (APART, TWO_APART)
        found += differences((one, other), runs[one], runs[other], tolerance, watch, is_apart=is_apart)
    began_with.restore()
    return Proof(found, tuple(runs), left_out)


_RUNS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("off", 0, {}),
    ("one worker, strict", 1, {"runtime": "inprocess", "strict": True}),
    ("two workers", 2, {"runtime": "inprocess"}),
    ("one worker on Ray", 1, {"runtime": "ray"}),  # where two workers need processes
    ("two workers on Ray", 2, {"runtime": "ray"}),
    (APART, 1, {"runtime": "inprocess", "strict": True}),
)
_PAIRS = (  # the second of a pair is compared with the first, by this tolerance
    ("off", "one worker, strict", 0.0),
    ("one worker, strict", "two workers", TOLERANCE),
    ("one worker, strict", "one worker on Ray", 0.0),
    ("two workers", "two workers on Ray", 0.0),
    ("one worker on Ray", "two workers on Ray", TOLERANCE),
    ("two workers", TORCHRUN, 0.0),
    ("two workers on Ray", TORCHRUN, 0.0),  # where two workers need processes
    ("one worker, strict", TORCHRUN, TOLERANCE),
    ("one worker, strict", APART, 0.0),
    ("two workers", TWO_APART, 0.0),  # where each role has two
    ("one worker, strict", TWO_APART, TOLERANCE),
)
_MEET = "its workers call collectives, which need separate processes"


def _pairs(runs: Collection[str], *, alike: bool) -> list[tuple[str, str, float]]:
    """The pairs that are compared. The runs under torchrun, and with two workers per role, have one pair each.

    ``alike``: every role has two workers there.
    """
    pairs = [pair for pair in _PAIRS if pair[0] in runs and pair[1] in runs]
    if not alike:
        pairs = [pair for pair in pairs if pair[:2] != ("two workers", TWO_APART)]
    once = (pair for name in (TORCHRUN, TWO_APART) for pair in [one for one in pairs if one[1] == name][1:])
    left = set(once)
    return [pair for pair in pairs if pair not in left]


def _two_apart(
    program: Callable[[], Any], groups: Sequence[Collection[str]], began_with: RandomState
) -> tuple[Ended, bool]:
    """The run of two workers per group of roles, and whether each group has two: one whose workers meet has one.

    The error of the run is ProcessesNeededError if all have one.
    """
    workers = [2] * len(groups)
    while True:
        began_with.restore()
        run = watched(program, groups, workers, {"runtime": "inprocess"})
        if not isinstance(run.error, ProcessesNeededError):
            return run, min(workers) == 2
        workers[int(run.error.group.removeprefix(_NAME_OF_GROUP))] = 1
        if max(workers) == 1:
            return run, False


def watched(
    program: Callable[[], Any],
    groups: Sequence[Collection[str]],
    workers: int | Sequence[int],
    options: dict[str, Any],
    observer: Observer | None = None,
) -> Ended:
    """A run of so many workers per group of roles; 0: with Ray off, which an ``observer`` may watch."""
    counts = [workers] * len(groups) if isinstance(workers, int) else workers
    sizes = {role: count for roles, count in zip(groups, counts, strict=True) for role in roles if count}
    watcher = Watcher(sizes, observer)
    ended: Exception | None = None
    if state.active is not None:
        raise RayHelperError("prove makes its own sessions. Call it outside of RayHelper.session, after teardown.")
    if workers:
        names = [f"{_NAME_OF_GROUP}{k}" if len(groups) > 1 else "workers" for k in range(len(groups))]
        RayHelper.initialize(
            {
                name: {"device": "CPU", "ranks": count, "workers": list(roles)}
                for name, roles, count in zip(names, groups, counts, strict=True)
            },
            **options,
        )
        runtime: Any = state.active
        runtime.watcher = watcher
    else:
        state.active = WatchedOff(watcher)
    try:
        if observer is not None:
            observer.begin()
        program()
    except Exception as error:
        ended = error
    finally:
        if observer is not None:
            observer.close()
        RayHelper.teardown()
    if len(groups) > 1:
        for seen in watcher.seen:  # first the worker that ran the call
            seen.workers.sort(key=lambda worker: all(note.title != seen.name for note in worker.notes))
    return Ended(watcher.seen, ended, None if ended is None else rank_of_error(ended))


# By the class's name


def prove_class(
    cls: type,
    settings: Mapping[str, Any],
    *,
    entry: str = "",
    steps: int = 3,
    ray: bool = True,
    torchrun: bool | None = None,
) -> list[Difference]:
    """``prove`` of a class: see ``proof_of_class``."""
    return _reported(proof_of_class(cls, settings, entry=entry, steps=steps, ray=ray, torchrun=torchrun))


def proof_of_class(
    cls: type,
    settings: Mapping[str, Any],
    *,
    entry: str = "",
    steps: int = 3,
    ray: bool = True,
    torchrun: bool | None = None,
) -> Proof:
    """``proof_of`` a class: it is constructed, and its method ``entry`` is called.

    The constructor is given the settings as keywords, or as the dataclass of its one annotated parameter. ``max_steps``
    of a dataclass becomes ``steps``, and ``output_dir`` a folder of its own a run. What places roles is left out.

    Raises:
        ConfigError: the class has no such method, or its constructor does not take the settings.
    """
    name = entry or next((name for name in _ENTRIES if callable(getattr(cls, name, None))), "")
    if not name or not callable(getattr(cls, name, None)):
        looked = f"{entry}()" if entry else ", ".join(f"{one}()" for one in _ENTRIES)
        raise ConfigError(f"{cls.__name__} has no method {looked}. Name the one that does the work: --entry METHOD.")
    plain = {key: value for key, value in settings.items() if key not in _PLACEMENT_KEYS}
    plain |= same_rows_per_step(cls, plain)
    config_type = _config_type(cls)
    _check_arguments(cls, name, plain if config_type is None else None)
    with tempfile.TemporaryDirectory(prefix="rayhelper-prove-") as folder:
        numbers = iter(range(100))

        def program() -> None:
            if config_type is None:
                instance = cls(**plain)
            else:
                own = dict(plain)
                names = {field.name for field in fields(config_type)}
                if "max_steps" in names:
                    own["max_steps"] = steps
                if "output_dir" in names:
                    launched = os.environ.get("TORCHELASTIC_RUN_ID", "")  # its processes share a folder
                    own["output_dir"] = os.path.join(folder, f"{next(numbers)}{launched}")
                try:
                    config = config_type(**own)
                except TypeError as error:
                    raise ConfigError(f"{config_type.__name__} does not take the configuration: {error}") from error
                instance = cls(config)
            getattr(instance, name)()

        return proof_of(program, roles_of(cls), ray=ray, torchrun=torchrun, groups=groups_of(cls, settings))


def _check_arguments(cls: type, entry: str, plain: Mapping[str, Any] | None) -> None:
    """Raises ConfigError if the constructor does not take ``plain`` (None: a dataclass), or the entry needs more."""
    try:
        if plain is not None:
            inspect.signature(cls).bind(**plain)
    except TypeError as error:
        raise ConfigError(
            f"{cls.__name__} cannot be constructed: {error}. Write the arguments of the constructor into a YAML file, "
            "and name the file: --config FILE."
        ) from None
    if not inspect.isfunction(inspect.getattr_static(cls, entry)):
        return  # a static or class method
    try:
        inspect.signature(getattr(cls, entry)).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"prove calls {cls.__name__}.{entry}() without arguments, but: {error}. Write a method that needs none, "
            "and name the method: --entry METHOD."
        ) from None


def groups_of(cls: type, settings: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The roles of a class that share workers, as ``device_groups`` of its settings says.

    Without device groups each role stands apart, except those that the class declares to live with another one.
    """
    roles, hosts = roles_of(cls), default_hosts(cls)
    if placed := settings.get("device_groups"):
        groups = DeviceGroups.parse(placed).with_default_hosts(hosts).groups
        found = [tuple(role for role in group.roles if role in roles) for group in groups]
        return [group for group in found if group]
    alone = [role for role in roles if role not in hosts]
    return [(role, *(other for other, host in hosts.items() if host == role)) for role in alone]


def same_rows_per_step(cls: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Further settings by which two workers take the rows of one: ``global_batch_size`` of a trainer that has it.

    Empty: the settings give it, or the configuration of the class has no such field.
    """
    config_type = _config_type(cls)
    sizes = {one.name: settings.get(one.name, one.default) for one in fields(config_type)} if config_type else {}
    if "global_batch_size" not in sizes or sizes["global_batch_size"] is not None:
        return {}
    count, rounds = sizes.get("per_device_train_batch_size"), sizes.get("gradient_accumulation_steps", 1)
    if type(count) is not int or type(rounds) is not int:
        return {}
    alone = {"gradient_accumulation_steps": 1} if rounds != 1 else {}  # the two are not given together
    return {"global_batch_size": count * rounds, **alone}


def roles_of(cls: type) -> tuple[str, ...]:
    """The roles of a class. Raises ConfigError if it has none."""
    roles = getattr(cls, "__rayhelper_roles__", ())
    if not roles:
        raise ConfigError(f"{cls.__name__} is not decorated with @RayHelper.worker(group=...), so it has no roles.")
    return tuple(roles)


def _config_type(cls: type) -> Any:
    """The dataclass that a constructor takes as its one parameter; None: it takes something else."""
    init: Any = cls.__init__  # type: ignore[misc]
    hints = typing.get_type_hints(getattr(init, "__wrapped__", init))
    hints.pop("return", None)
    first = next(iter(hints.values()), None)
    return first if isinstance(first, type) and is_dataclass(first) else None
