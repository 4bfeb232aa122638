"""One program in several runtimes, and the first thing in which the runs differ.

    off                     as a script of one process
    one worker, strict      what crosses a role's border is packed, and has no memory in common
    two workers             in this process, one after the other
    two workers on Ray      in processes of their own

Where workers meet in collectives, which takes processes, one worker on Ray stands in for two in this process. Runs of
equally many workers must agree to the last bit. One worker and two sum real numbers in another order, so that their
values agree within a tolerance. A whole number that is the number of workers in both runs counts as the same.
"""

from __future__ import annotations

import os
import tempfile
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from rayhelper.errors import ConfigError, RayHelperError
from rayhelper.helper import RayHelper
from rayhelper.prove.watching import Seen, WatchedOff, Watcher
from rayhelper.roles.runtime import state
from rayhelper.runtimes.inprocess import ProcessesNeededError
from rayhelper.values.contents import Contents
from rayhelper.worker.random_streams import RandomState

TOLERANCE = 1e-4  # between one worker and two
_ENTRIES = ("train", "run", "fit", "main")  # methods that are looked for, in order
_PLACEMENT_KEYS = ("use_ray", "device_groups", "ray_address", "colocate_groups")


@dataclass(frozen=True)
class Difference:
    """The first thing in which two runs of a program differ."""

    runs: tuple[str, str]
    call: int  # the number of the call, or of the construction, from 1
    title: str
    what: str
    cause: str

    def __str__(self) -> str:
        one, other = self.runs
        return f"{one} | {other}: call {self.call}, {self.title}: {self.what}. Likely cause: {self.cause}"


def prove(program: Callable[[], Any], roles: Collection[str], *, ray: bool = True) -> list[Difference]:
    """The first difference of each pair of runs; none: the program gives the same everywhere.

    Args:
        program: What a script would do: it constructs objects and makes calls. It is called once a run.
        roles: All roles of its classes.
        ray: Whether it also runs on Ray, with workers on CPUs.

    Raises:
        What the program raises with Ray off. What it raises elsewhere is a difference.
    """
    began_with = RandomState.here()
    runs: dict[str, Ended] = {}
    for name, workers, options in _RUNS:
        if ("Ray" in name and not ray) or (name == "one worker on Ray" and "two workers" in runs):
            continue
        began_with.restore()
        run = _watched(program, roles, workers, options)
        if run.error is not None and not workers:
            raise run.error  # there is nothing to compare with
        if not isinstance(run.error, ProcessesNeededError):
            runs[name] = run
    began_with.restore()
    pairs = [pair for pair in _PAIRS if pair[0] in runs and pair[1] in runs]
    found = [_first_difference((one, other), runs[one], runs[other], tolerance) for one, other, tolerance in pairs]
    return [difference for difference in found if difference is not None]


_RUNS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("off", 0, {}),
    ("one worker, strict", 1, {"runtime": "inprocess", "strict": True}),
    ("two workers", 2, {"runtime": "inprocess"}),
    ("one worker on Ray", 1, {"runtime": "ray"}),  # where two workers need processes
    ("two workers on Ray", 2, {"runtime": "ray"}),
)
_PAIRS = (  # the second of a pair is compared with the first, by this tolerance
    ("off", "one worker, strict", 0.0),
    ("one worker, strict", "two workers", TOLERANCE),
    ("one worker, strict", "one worker on Ray", 0.0),
    ("two workers", "two workers on Ray", 0.0),
    ("one worker on Ray", "two workers on Ray", TOLERANCE),
)


@dataclass
class Ended:
    """What a run came to: its calls, and what ended it."""

    seen: list[Seen]
    error: Exception | None

    @property
    def how(self) -> str:
        return "" if self.error is None else f"{type(self.error).__name__}: {self.error}"


def _watched(program: Callable[[], Any], roles: Collection[str], workers: int, options: dict[str, Any]) -> Ended:
    """A run of so many workers; 0: with Ray off."""
    watcher = Watcher(max(1, workers))
    ended: Exception | None = None
    if state.active is not None:
        raise RayHelperError("prove makes sessions of its own. Call it outside of RayHelper.session, after teardown.")
    if workers:
        groups = {"workers": {"device": "CPU", "ranks": workers, "workers": list(roles)}}
        RayHelper.initialize(groups, **options)
        runtime: Any = state.active
        runtime.watcher = watcher
    else:
        state.active = WatchedOff(watcher)
    try:
        program()
    except Exception as error:
        ended = error
    finally:
        RayHelper.teardown()
    return Ended(watcher.seen, ended)


def _first_difference(runs: tuple[str, str], one: Ended, other: Ended, tolerance: float) -> Difference | None:
    seen, seen_there = one.seen, other.seen
    for number, (here, there) in enumerate(zip(seen, seen_there, strict=False), 1):
        for what, cause in _differences(here, there, tolerance):
            return Difference(runs, number, here.title, what, cause)
    number = min(len(seen), len(seen_there))
    if (one.error is None) != (other.error is None):
        name, failed = (runs[0], one) if one.error is not None else (runs[1], other)
        title = failed.seen[-1].title if failed.seen else "the program"
        return Difference(runs, number, title, f"{name} ended with {failed.how}", "what the error says")
    if len(seen) != len(seen_there):
        more = (seen if len(seen) > len(seen_there) else seen_there)[number].title
        return Difference(runs, number + 1, more, "only one of the runs makes this call", _OF_THE_DRIVER)
    return None


_OF_THE_DRIVER = (
    "the driver's own code: random numbers that main does not seed, an order of a set or of files, the time, or what a "
    "role changed in an object that the driver shares with it"
)
_OF_SEEDS = "random numbers without a seed of main, or what __init__ reads of the process (time, pid, environment)"
_OF_THE_ROLE = (
    "random numbers that both the driver and the role draw (dropout and a shuffle share one generator off: give one of "
    "them a torch.Generator of its own), an argument that was changed in place, or state outside of the object: a "
    "module's globals, a class's attributes, the clock, a uuid, a file that is written, the process (environment, pid, "
    "folder, hash() of a text, the order of a set)"
)
_OF_WORKERS = "the result depends on how the rows are divided: a mean over a shard, a random number a worker, a rank"


def _differences(here: Seen, there: Seen, tolerance: float) -> Iterator[tuple[str, str]]:
    """What differs of one call, with the likely cause."""
    if here.title != there.title:
        yield f"the other run calls {there.title}", _OF_THE_DRIVER
        return
    same = {name for name in here.relative.keys() & there.relative.keys() if _as_counts(name, here, there, tolerance)}
    for name in here.arguments.keys() - same:
        if name in there.arguments and not here.arguments[name].equals(there.arguments[name], tolerance):
            how = _how(here.arguments[name], there.arguments[name])
            at = here.arguments[name].differs_at(there.arguments[name], tolerance)
            yield f"argument {name!r}{at} {how}", _OF_THE_DRIVER
    if bool(here.raised) != bool(there.raised):
        yield f"only one of the runs raises {here.raised or there.raised}", "what the error says"
    is_constructor = here.title.endswith(".__init__")
    elsewhere = _OF_SEEDS if is_constructor else _OF_WORKERS if tolerance else _OF_THE_ROLE
    alike = here.num_workers == there.num_workers
    both = here.value is not None and there.value is not None and (alike or here.is_collected)
    if both and "value" not in same and not here.value.equals(there.value, tolerance):  # type: ignore[union-attr, arg-type]
        at = here.value.differs_at(there.value, tolerance)  # type: ignore[union-attr, arg-type]
        rank = at[1 : at.find("]")] if at and alike and not here.is_collected else ""
        told = f" (value{at}{f' of rank {rank}' if rank else ''})" if at else ""
        yield f"its value{told} {_how(here.value, there.value)}", elsewhere  # type: ignore[arg-type]
    if alike:
        for rank, (state_here, state_there) in enumerate(zip(here.states, there.states, strict=False)):
            for name in state_here.keys() & state_there.keys():
                for attribute in state_here[name].keys() & state_there[name].keys():
                    one, other = state_here[name][attribute], state_there[name][attribute]
                    if not one.equals(other, tolerance):
                        at = one.differs_at(other, tolerance)
                        yield f"afterwards {name}.{attribute}{at} of rank {rank} {_how(one, other)}", elsewhere


def _as_counts(name: str, here: Seen, there: Seen, tolerance: float) -> bool:
    """Whether an argument or the value is the same if the number of workers counts as the same."""
    return here.relative[name].equals(there.relative[name], tolerance)


def _how(one: Contents, other: Contents) -> str:
    if one.is_reordered(other):
        return "holds the same items in another order"
    if one.exact != other.exact:
        return "holds other items, or of another type or shape"
    pairs = [(a, b) for a, b in zip(one.sums, other.sums, strict=False) if a != b]
    if not pairs:
        return "holds other items"
    (_, size), (_, other_size) = pairs[0]
    return f"holds other numbers (their absolute values sum up to {size:.9g} and {other_size:.9g})"


# By the class's name


def prove_class(
    cls: type, settings: Mapping[str, Any], *, entry: str = "", steps: int = 3, ray: bool = True
) -> list[Difference]:
    """``prove`` of a class: it is constructed, and its method ``entry`` is called.

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
                    own["output_dir"] = os.path.join(folder, str(next(numbers)))
                try:
                    config = config_type(**own)
                except TypeError as error:
                    raise ConfigError(f"{config_type.__name__} does not take the configuration: {error}") from error
                instance = cls(config)
            getattr(instance, name)()

        return prove(program, roles_of(cls), ray=ray)


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
