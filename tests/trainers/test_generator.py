"""When engines get the policy's weights, who makes room for whom, and what happens if a worker has no engine.

A generator's own doors and those of its policy are replaced by ones that only take notes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayhelper import Channel, ChannelError, DeadlineError, Future, WorkerDiedError
from rayhelper.roles.futures import finished
from trainers.configuration.completion import CompletionConfig
from trainers.parts.generator import Generator, Pending
from trainers.parts.policy import ModelLostError, Policy
from trainers.parts.weights import EngineLostError, StaleWeightsError
from trainers.run.timing import Stopwatch


class Call:
    """A deferred call; it is made when its value is asked for."""

    def __init__(self, door: Callable[[], Any]) -> None:
        self.door = door
        self.made: Future[Any] | None = None

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        self.made = self.made or finished(self.door)
        return self.made.result()

    def exception(self) -> Exception | None:
        self.made = self.made or finished(self.door)
        return self.made.exception()


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

    def generator(self, way: Any, *, in_flight: bool = False) -> Generator:
        """Of two engines; ``way``: how weights get to them."""
        policy: Any = SimpleNamespace(
            send=self.door("send"),
            make_room=lambda part: self.door(f"room for {part}")(),
            reload=self.door("reload"),
        )
        policy.send.defer = lambda *_: Call(policy.send)
        config = CompletionConfig(model="unused", dataset="unused", output_dir="unused", weight_bucket_mb=1)
        generator: Any = Generator(config, policy, sync_interval=1 if in_flight else None)
        generator.path, generator.way, generator.num_engines = "unused", way, 2
        for name in ("start", "meet", "copy", "receive", "wake", "sleep"):
            setattr(generator, name, self.door(name))
        generator.receive.defer = lambda _, unless=None: Call(
            self.door("receive" if unless is None else "receive later")
        )
        open_channel = generator.open_channel

        def opened() -> Channel:
            self.calls.append("open")
            channel: Channel = open_channel()
            return channel

        generator.open_channel = opened
        return generator  # type: ignore[no-any-return]

    def pending(self) -> Pending:
        """Completions that were asked for once, by the door ``first``; once more, it is by ``again``."""
        return Pending(lambda: Call(self.door("again")), Call(self.door("first")), 0)

    def since(self) -> list[str]:
        """The calls since the last time."""
        calls, self.calls = self.calls, []
        return calls


def lost() -> EngineLostError:
    return EngineLostError("it died")


def test_weights_are_sent_when_there_are_new_ones_and_over_one_channel() -> None:
    doors = Doors()
    generator = doors.generator("sent")
    generator.update()
    assert doors.since() == ["meet", "open", "receive", "send"]
    generator.update()
    generator.rest()
    assert doors.since() == []
    generator.learned()
    generator.update()
    assert doors.since() == ["meet", "receive", "send"]
    generator.close()
    generator.learned()
    generator.update()
    assert doors.since() == ["meet", "open", "receive", "send"]


def test_an_engine_beside_training_gets_them_before_every_generation() -> None:
    """It may have slept meanwhile."""
    doors = Doors()
    generator = doors.generator("copied")
    generator.update()
    generator.rest()
    generator.update()
    copied = ["room for weights", "copy", "room for kv_cache", "wake"]
    assert doors.since() == [*copied, "sleep", "reload", *copied]
    generator = doors.generator("shared")
    generator.update()
    generator.rest()
    assert doors.since() == []


@pytest.mark.parametrize("door", ["room for weights", "copy", "wake"])
def test_a_worker_that_trains_and_generates_cannot_be_replaced(door: str) -> None:
    with pytest.raises(EngineLostError, match="its learned state is lost"):
        Doors(**{door: [lost()]}).generator("copied").update()


OFFLOADED = ["room for weights", "room for kv_cache", "wake", "sleep", "reload"]
SENT_BESIDE = ["meet", "open", "room for weights", "receive", "send", "room for kv_cache", "wake"]


def test_engines_on_the_devices_of_the_policy_wake_when_it_has_made_room() -> None:
    doors = Doors()
    generator = doors.generator("beside")
    generator.update()
    assert doors.since() == SENT_BESIDE
    generator.update()
    assert doors.since() == []
    generator.rest()
    assert doors.since() == ["sleep", "reload"]
    generator.update()
    assert doors.since() == [step for step in SENT_BESIDE if step != "open"]


def test_what_the_policy_gave_away_is_back_before_it_is_sent_once_more() -> None:
    """The engine that took the place of another has memory until it rests."""
    restored = ["start", "sleep", "reload", *SENT_BESIDE]
    doors = Doors(first=[lost()])
    generator = doors.generator("beside")
    assert generator.finished(doors.pending()) == "again"
    assert doors.since() == ["first", *restored, "again"]
    doors = Doors(receive=[lost()], wake=[lost()])
    doors.generator("beside").update()
    assert doors.since() == [*SENT_BESIDE[:5], *restored, *restored]


@pytest.mark.parametrize("error", [lost(), ChannelError("it went")])
def test_a_worker_lost_while_weights_are_sent_is_rebuilt_and_all_is_sent_again(error: Exception) -> None:
    """The sender is told first that a receiver will not come, or it would wait for it."""
    doors = Doors(receive=[error], send=[ChannelError("a receiver is gone")])
    generator = doors.generator("sent")
    generator.update()
    sent = ["meet", "open", "receive", "send"]
    assert doors.since() == [*sent, "start", *sent]
    generator.update()
    assert doors.since() == []


def test_a_channel_that_fails_twice_is_told() -> None:
    doors = Doors(receive=[ChannelError("first"), ChannelError("second")])
    with pytest.raises(ChannelError, match="second"):
        doors.generator("sent").update()


def test_what_the_sender_failed_of_is_told_rather_than_that_it_failed() -> None:
    doors = Doors(receive=[ChannelError("the sender failed")], send=[MemoryError("no room")])
    with pytest.raises(MemoryError, match="no room"):
        doors.generator("sent").update()


def test_a_learner_that_died_is_told_rather_than_the_channel_that_engines_lost() -> None:
    """Engines that wait for a dead learner are not waited for: their call ends when the channel is closed."""
    doors = Doors(send=[WorkerDiedError("the learner died")])
    generator: Any = doors.generator("sent")
    channels: list[Channel] = []

    class Waiting(Call):
        def done(self) -> bool:
            return bool(channels) and generator.channel is None

    def receive(channel: Channel) -> Call:
        channels.append(channel)
        return Waiting(lambda: list(channel.receive()))

    generator.receive.defer = receive
    with pytest.raises(WorkerDiedError, match="the learner died"):
        generator.update()
    assert doors.since() == ["meet", "open", "send"]


def test_the_channel_is_closed_before_the_sender_is_waited_for() -> None:
    doors = Doors(receive=[StaleWeightsError("layer 3")])
    generator = doors.generator("sent")
    channels: list[Any] = []
    policy: Any = generator.policy
    policy.send.defer = lambda channel, _: Call(lambda: channels.append(channel) or channel.send([]))
    with pytest.raises(StaleWeightsError, match="layer 3"):
        generator.update()
    with pytest.raises(ChannelError, match="was closed"):
        channels[0].send([])
    assert generator.channel is None


def test_completions_that_were_lost_are_asked_for_once_more() -> None:
    doors = Doors(first=[lost()])
    generator = doors.generator("sent")
    assert generator.finished(doors.pending()) == "again"
    assert doors.since() == ["first", "start", "meet", "open", "receive", "send", "again"]
    assert generator.finished(doors.pending()) == "first"
    assert doors.since() == ["first"]


def test_a_further_worker_may_die_meanwhile() -> None:
    doors = Doors(first=[lost()], receive=[lost()], again=[lost()])
    generator = doors.generator("sent")
    assert generator.finished(doors.pending()) == "again"
    restored = ["start", "meet", "open", "receive", "send"]
    assert doors.since() == ["first", *restored, *restored, "again", *restored, "again"]


def test_weights_in_flight_have_arrived_when_the_policy_learns_on() -> None:
    """What engines find behind their generations is looked at when it is done; until then nobody waits for it."""
    doors = Doors()
    generator = doors.generator("sent", in_flight=True)
    generator.learned()
    assert doors.since() == []  # engines that have nothing yet generate nothing
    generator.update()
    assert doors.since() == ["meet", "open", "receive", "send"]
    generator.learned()
    assert doors.since() == ["send"]
    generator.update()
    assert doors.since() == ["receive later"]
    generator.learned()
    generator.close()
    assert doors.since() == ["send", "receive later"]
    assert generator.version == 3


@pytest.mark.parametrize("fails", ["send", "receive later"])
@pytest.mark.parametrize("error", [lost(), DeadlineError("nobody took them: all waited for their environments")])
def test_weights_in_flight_that_were_lost_are_sent_again(fails: str, error: Exception) -> None:
    doors = Doors()
    generator = doors.generator("sent", in_flight=True)
    generator.update()
    doors.since()
    doors.fails = {fails: [error]}
    generator.learned()
    generator.update()
    noted = ["send", "receive later"][: 1 if fails == "send" else 2]
    assert doors.since() == [*noted, "start", "meet", "open", "receive", "send"]
    generator.update()
    assert doors.since() == []


def test_the_sender_does_not_begin_before_every_engine_can_receive() -> None:
    """An engine in the middle of long completions is waited for without the sender's deadline, and may die."""
    doors = Doors(meet=[lost()])
    generator = doors.generator("sent")
    generator.update()
    assert doors.since() == ["meet", "start", "meet", "open", "receive", "send"]


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
    generator = doors.generator(way)
    stopwatch = Stopwatch(lambda: len(doors.calls) - doors.calls.count("open"))
    generator.phase = stopwatch.phase
    generator.update()
    generator.rest()
    found = stopwatch.lap()
    assert found == {"idle": 0, **{phase: len(calls) for phase, calls in phases.items() if calls}}


def test_weights_in_flight_are_no_part_of_the_update() -> None:
    doors = Doors()
    generator = doors.generator("sent", in_flight=True)
    generator.update()
    stopwatch = Stopwatch(lambda: len(doors.calls))
    generator.phase = stopwatch.phase
    generator.learned()
    assert stopwatch.lap() == {"idle": 0, "sync": 1}


def test_a_worker_without_a_model_is_told_from_one_that_has_died() -> None:
    """Whatever is done about an engine, a policy that is lost is lost: nobody tries again."""
    config = CompletionConfig(model="unused", dataset="unused", output_dir="unused")
    policy = Policy(config, loss=lambda: 1 / 0)
    generator = Generator(config, policy)
    with pytest.raises(EngineLostError, match="it replaced a worker that died"):
        generator.meet()
    for door in (policy.reload, lambda: policy.make_room("weights"), lambda: policy.export(Path("unused"))):
        with pytest.raises(ModelLostError, match=r"this worker has no policy: .*resume_from_checkpoint"):
            door()
    lost_policy = ModelLostError("it died")
    for doors in (Doors(reload=[lost_policy], meet=[lost()]), Doors(**{"room for weights": [lost_policy]})):
        with pytest.raises(ModelLostError, match="it died"):
            doors.generator("beside").update()


@pytest.mark.parametrize("way", ["copied", "shared"])
def test_a_worker_that_trains_as_well_is_not_replaced(way: str) -> None:
    doors = Doors(first=[lost()])
    with pytest.raises(EngineLostError, match="resume_from_checkpoint: auto"):
        doors.generator(way).finished(doors.pending())
    assert doors.since() == ["first"]
