"""Whether an engine has the trainer's weights is found out; what the driver does when a worker has none.

``EngineUpdates`` is tried on doors that only take notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from rayhelper import Channel, ChannelError, DeadlineError
from tests.golden.tiny import save_tiny, tiny_tokenizer
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.configuration.completion import CompletionConfig
from trainers.parts.engine_updates import EngineUpdates, Room, channel_to
from trainers.parts.weights import (
    EngineLostError,
    Route,
    StaleWeightsError,
    built,
    check,
    copy,
    exported,
    receive,
    send,
    trained,
)
from trainers.rollout.hf import HfEngine
from trainers.run.timing import Stopwatch

K_PROJ = "model.layers.1.self_attn.k_proj.weight"
NORM = "model.norm.weight"
Weights = Iterable[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The policy's, and one with other weights."""
    policy, other = (tmp_path_factory.mktemp(name) for name in ("policy", "other"))
    return save_tiny(policy), save_tiny(other, seed=1)


@pytest.fixture(scope="module")
def backend(models: tuple[str, str]) -> FsdpBackend:
    backend = FsdpBackend(models[0], learning_rate=1e-3, num_training_steps=1)
    with torch.no_grad():
        dict(backend.named_weights())[NORM].add_(0.3)  # all ones would not show an error
    return backend


def config_of(model: str, **keys: Any) -> CompletionConfig:
    return CompletionConfig(model=model, dataset=[{"prompt": "a"}], dtype="float32", output_dir="unused", **keys)


class CarelessEngine(HfEngine):
    """Does something to weights before it takes them."""

    def __init__(self, model: str, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__(model, tiny_tokenizer())
        self.change = change

    def load_weights(self, named_weights: Weights, *, part: bool = False, version: int | None = None) -> None:
        changed = ((name, self.change(name, weight)) for name, weight in named_weights)
        kept = ((name, weight) for name, weight in changed if weight is not None)
        super().load_weights(kept, part=True, version=version)


def drops_one(name: str, weight: torch.Tensor) -> torch.Tensor | None:
    return None if name == K_PROJ else weight


def rounds_one(name: str, weight: torch.Tensor) -> torch.Tensor:
    return weight.bfloat16().float() if name == NORM else weight


def by_copy(config: CompletionConfig, backend: FsdpBackend, engine: HfEngine) -> None:
    copy(config, backend, engine, 1)


def by_channel(config: CompletionConfig, backend: FsdpBackend, engine: HfEngine) -> None:
    with Channel() as channel:
        send(config, backend, channel, 1)
        receive(engine, channel)


WAYS = [by_copy, by_channel]
CARELESS = [(drops_one, "model.layers.1"), (rounds_one, NORM)]


@pytest.mark.parametrize("way", WAYS)
def test_weights_arrive_whole(way: Any, models: tuple[str, str], backend: FsdpBackend) -> None:
    engine = HfEngine(models[1], tiny_tokenizer())
    way(config_of(models[0]), backend, engine)
    found = dict(engine.module.named_parameters())
    for name, weight in exported(backend).items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("change", "layer"), CARELESS, ids=["dropped", "rounded"])
def test_a_weight_that_was_dropped_or_rounded_is_found(
    way: Any, change: Any, layer: str, models: tuple[str, str], backend: FsdpBackend
) -> None:
    engine = CarelessEngine(models[1], change)
    with pytest.raises(StaleWeightsError, match=rf"1 of \d+ parts .* among them \['{layer}'\]"):
        way(config_of(models[0]), backend, engine)
    way(config_of(models[0], weight_checksum=False), backend, engine)  # whoever asked not to be told is not


def test_nothing_to_compare_with_is_nothing_wrong(models: tuple[str, str]) -> None:
    engine = HfEngine(models[0], tiny_tokenizer())
    check(engine, {})
    check(engine, engine.fingerprints())
    with pytest.raises(StaleWeightsError, match=r"\['model.layers.7'\]"):
        check(engine, engine.fingerprints() | {"model.layers.7": 1})


# --- who gets weights how


def test_the_route_follows_from_who_has_what(models: tuple[str, str], backend: FsdpBackend) -> None:
    apart = HfEngine(models[0], tiny_tokenizer())
    assert Route.between(apart, trains=False) == Route("sent", 1)
    assert Route.between(apart, trains=True) == Route("copied", 1)
    assert Route.between(HfEngine(backend.module, tiny_tokenizer()), trains=True) == Route("shared", 1)
    with pytest.raises(EngineLostError, match="took the place of one that died"):
        built(None)


# --- the driver's side


class Call:
    """A deferred call; it is made when its value is asked for."""

    def __init__(self, door: Callable[[], Any]) -> None:
        self.door = door

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self.door()


class Doors:
    """Take notes; each raises what stands in ``fails`` under its name, one error a call."""

    def __init__(self, **fails: list[Exception | None]) -> None:
        self.calls: list[str] = []
        self.fails = fails

    def door(self, name: str) -> Callable[..., Any]:
        def called(*_: Any) -> str:
            self.calls.append(name)
            error = self.fails[name].pop(0) if self.fails.get(name) else None
            if error is not None:
                raise error
            return name

        return called

    def updates(self, way: Any, *, in_flight: bool = False, shares_devices: bool = False) -> EngineUpdates:
        def open_channel(route: Route) -> Channel:
            self.calls.append("open")
            return channel_to(route, 1)

        doors: Any = {name: self.door(name) for name in ("meet", "copy", "send", "receive", "rebuild")}
        doors["send"].defer = lambda *_: Call(doors["send"])
        doors["receive"].defer = lambda *_: Call(self.door("receive later"))
        make = lambda part: self.door(f"room for {part}")()  # noqa: E731
        room = Room(make, self.door("wake"), self.door("rest"), self.door("reload"))
        route = Route(way, 2, shares_devices)
        doors |= {"room": room if shares_devices or way == "copied" else None, "in_flight": in_flight}
        return EngineUpdates(route, open_channel=open_channel, **doors)

    def since(self) -> list[str]:
        """The calls since the last time."""
        calls, self.calls = self.calls, []
        return calls


def lost() -> EngineLostError:
    return EngineLostError("it died")


def test_weights_are_sent_when_there_are_new_ones_and_over_one_channel() -> None:
    doors = Doors()
    engines = doors.updates("sent")
    engines.update()
    assert doors.since() == ["meet", "open", "receive", "send"]
    engines.update()
    engines.end_generation()
    assert doors.since() == []
    engines.learned()
    engines.update()
    assert doors.since() == ["meet", "receive", "send"]
    engines.close()
    engines.learned()
    engines.update()
    assert doors.since() == ["meet", "open", "receive", "send"]


def test_an_engine_beside_training_gets_them_before_every_generation() -> None:
    """It may have slept meanwhile."""
    doors = Doors()
    engines = doors.updates("copied")
    engines.update()
    engines.end_generation()
    engines.update()
    copied = ["room for weights", "copy", "room for kv_cache", "wake"]
    assert doors.since() == [*copied, "rest", "reload", *copied]
    engines = doors.updates("shared")
    engines.update()
    engines.end_generation()
    assert doors.since() == []


@pytest.mark.parametrize("door", ["room for weights", "copy", "wake"])
def test_a_worker_that_trains_and_generates_cannot_be_replaced(door: str) -> None:
    with pytest.raises(EngineLostError, match="what it had learned is gone"):
        Doors(**{door: [lost()]}).updates("copied").update()
    with pytest.raises(EngineLostError, match="took the place of one that died"):
        trained(None)


OFFLOADED = ["room for weights", "room for kv_cache", "wake", "rest", "reload"]
SENT_BESIDE = ["meet", "open", "room for weights", "receive", "send", "room for kv_cache", "wake"]


def test_engines_on_the_devices_of_the_policy_wake_when_it_has_made_room() -> None:
    doors = Doors()
    engines = doors.updates("sent", shares_devices=True)
    engines.update()
    assert doors.since() == SENT_BESIDE
    engines.update()
    assert doors.since() == []
    engines.end_generation()
    assert doors.since() == ["rest", "reload"]
    engines.update()
    assert doors.since() == [step for step in SENT_BESIDE if step != "open"]


def test_what_the_policy_gave_away_is_back_before_it_is_sent_once_more() -> None:
    """The engine that took the place of another has memory until it rests."""
    restored = ["rebuild", "rest", "reload", *SENT_BESIDE]
    doors = Doors(first=[lost()])
    engines = doors.updates("sent", shares_devices=True)
    assert engines.completed(Call(doors.door("first")), lambda: Call(doors.door("again"))) == "again"
    assert doors.since() == ["first", *restored, "again"]
    doors = Doors(receive=[lost()], wake=[lost()])
    doors.updates("sent", shares_devices=True).update()
    assert doors.since() == [*SENT_BESIDE[:5], *restored, *restored]


@pytest.mark.parametrize("error", [lost(), ChannelError("it went")])
def test_a_worker_lost_while_weights_are_sent_is_rebuilt_and_all_is_sent_again(error: Exception) -> None:
    """The sender is told first that a receiver will not come, or it would wait for it."""
    doors = Doors(receive=[error], send=[ChannelError("a receiver is gone")])
    engines = doors.updates("sent")
    engines.update()
    sent = ["meet", "open", "receive", "send"]
    assert doors.since() == [*sent, "rebuild", *sent]
    engines.update()
    assert doors.since() == []


def test_a_channel_that_fails_twice_is_told() -> None:
    doors = Doors(receive=[ChannelError("first"), ChannelError("second")])
    with pytest.raises(ChannelError, match="second"):
        doors.updates("sent").update()


def test_what_the_sender_failed_of_is_told_rather_than_that_it_failed() -> None:
    doors = Doors(receive=[ChannelError("the sender failed")], send=[MemoryError("no room")])
    with pytest.raises(MemoryError, match="no room"):
        doors.updates("sent").update()


def test_the_channel_is_closed_before_the_sender_is_waited_for() -> None:
    doors = Doors(receive=[StaleWeightsError("layer 3")])
    engines = doors.updates("sent")
    channels: list[Any] = []
    engines.send.defer = lambda channel, _: Call(lambda: channels.append(channel) or channel.send([]))
    with pytest.raises(StaleWeightsError, match="layer 3"):
        engines.update()
    with pytest.raises(ChannelError, match="was closed"):
        channels[0].send([])
    assert engines.channel is None


def test_completions_that_were_lost_are_asked_for_once_more() -> None:
    doors = Doors(first=[lost()])
    engines = doors.updates("sent")
    again = lambda: Call(doors.door("again"))  # noqa: E731
    assert engines.completed(Call(doors.door("first")), again) == "again"
    assert doors.since() == ["first", "rebuild", "meet", "open", "receive", "send", "again"]
    assert engines.completed(Call(doors.door("first")), again) == "first"
    assert doors.since() == ["first"]


def test_a_further_worker_may_die_meanwhile() -> None:
    doors = Doors(first=[lost()], receive=[lost()], again=[lost()])
    engines = doors.updates("sent")
    assert engines.completed(Call(doors.door("first")), lambda: Call(doors.door("again"))) == "again"
    restored = ["rebuild", "meet", "open", "receive", "send"]
    assert doors.since() == ["first", *restored, *restored, "again", *restored, "again"]


def test_weights_in_flight_have_arrived_when_the_policy_learns_on() -> None:
    """What engines find behind their generations is looked at when it is done; until then nobody waits for it."""
    doors = Doors()
    engines = doors.updates("sent", in_flight=True)
    engines.learned()
    assert doors.since() == []  # engines that have nothing yet generate nothing
    engines.update()
    assert doors.since() == ["meet", "open", "receive", "send"]
    engines.learned()
    assert doors.since() == ["send"]
    engines.update()
    assert doors.since() == ["receive later"]
    engines.learned()
    engines.close()
    assert doors.since() == ["send", "receive later"]
    assert engines.version == 3


@pytest.mark.parametrize("fails", ["send", "receive later"])
@pytest.mark.parametrize("error", [lost(), DeadlineError("nobody took them: all waited for their environments")])
def test_weights_in_flight_that_were_lost_are_sent_again(fails: str, error: Exception) -> None:
    doors = Doors()
    engines = doors.updates("sent", in_flight=True)
    engines.update()
    doors.since()
    doors.fails = {fails: [error]}
    engines.learned()
    engines.update()
    noted = ["send", "receive later"][: 1 if fails == "send" else 2]
    assert doors.since() == [*noted, "rebuild", "meet", "open", "receive", "send"]
    engines.update()
    assert doors.since() == []


def test_the_sender_does_not_begin_before_every_engine_can_receive() -> None:
    """An engine in the middle of long completions is waited for without the sender's deadline, and may die."""
    doors = Doors(meet=[lost()])
    engines = doors.updates("sent")
    engines.update()
    assert doors.since() == ["meet", "rebuild", "meet", "open", "receive", "send"]


@pytest.mark.parametrize(
    ("way", "phases"),
    [
        ("sent", {"generate": ["meet"], "sync": ["send", "receive"], "offload": []}),
        ("beside", {"generate": ["meet"], "sync": ["send", "receive"], "offload": OFFLOADED}),
        ("copied", {"generate": [], "sync": ["copy"], "offload": OFFLOADED}),
    ],
)
def test_seconds_count_in_the_phase_of_what_they_are_spent_on(way: str, phases: dict[str, list[str]]) -> None:
    """Every call of a door takes a second."""
    doors = Doors()
    engines = doors.updates("copied" if way == "copied" else "sent", shares_devices=way == "beside")
    stopwatch = Stopwatch(lambda: len(doors.calls) - doors.calls.count("open"))
    engines.phase = stopwatch.phase
    engines.update()
    engines.end_generation()
    found = stopwatch.lap()
    assert found == {"idle": 0, **{phase: len(calls) for phase, calls in phases.items() if calls}}


def test_weights_in_flight_are_no_part_of_the_update() -> None:
    doors = Doors()
    engines = doors.updates("sent", in_flight=True)
    engines.update()
    stopwatch = Stopwatch(lambda: len(doors.calls))
    engines.phase = stopwatch.phase
    engines.learned()
    assert stopwatch.lap() == {"idle": 0, "sync": 1}


@pytest.mark.parametrize("way", ["copied", "shared"])
def test_a_worker_that_trains_as_well_is_not_replaced(way: str) -> None:
    doors = Doors(first=[lost()])
    with pytest.raises(EngineLostError, match="resume_from_checkpoint: auto"):
        doors.updates(way).completed(Call(doors.door("first")), lambda: Call(doors.door("again")))
    assert doors.since() == ["first"]
