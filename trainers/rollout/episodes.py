"""Completions of several turns: a model and an environment that write by turns, every episode at its own pace.

    episode:  reset ─► turn ─► step ─► turn ─► step ...        a task each
                        │ ▲
                        ▼ │
    TurnServer:  whoever waits when the engine is free is completed together
    TurnStream:  whoever waits enters while others are completed (engines that can: vllm)

An environment of a vision model may answer with pictures: parts ``{"type": "image", "image": ...}`` of a message.
So an episode whose environment is slow holds up no other, and with a ``TurnStream`` neither does one that writes long
turns. A completion's token ids are the engine's own, with the ids
of the environment's messages between them: what the model wrote is never tokenized again. What stands between a turn
and the next, markers of roles and the message itself, is what the chat template puts behind an assistant's turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError

from rayhelper.watch.interrupts import run
from trainers.batch import Prompts, Ragged, Rollouts
from trainers.data.images.conversations import COLUMNS, kinds_in
from trainers.data.images.pictures import Pictures
from trainers.data.images.processor import ImageReader
from trainers.data.rows import prompt_of, tokenize_prompts
from trainers.plugins import exits_are_errors
from trainers.rollout.base import Completion, ContinuousEngine, Engine, Sampling
from trainers.rollout.environments import Environment, Message, Opening, Reply, Rewritten, answered


@dataclass(frozen=True)
class Turn:
    """What the engine wrote for one request."""

    ids: list[int]
    logps: list[float]
    versions: list[int]  # of the policy that wrote each; -1: not known
    truncated: bool


Asked = tuple[int, list[int], int, Pictures, asyncio.Future[Turn]]  # episode, ids, most tokens, pictures of the ids


class TurnServer:
    """One engine for many episodes. What is waiting when it is free is one call of ``generate``.

    ``seed_of`` gives the seed of an episode's k-th turn, whatever is completed beside it.
    """

    def __init__(self, engine: Engine, sampling: Sampling, seed_of: Callable[[int, int], int], thread: Any) -> None:
        self.engine, self.sampling, self.seed_of, self.thread = engine, sampling, seed_of, thread
        self.waiting: list[Asked] = []
        self.serving: asyncio.Task[None] | None = None
        self.num_turns: dict[int, int] = {}  # of each episode

    async def complete(self, episode: int, context: list[int], limit: int, pictures: Pictures = ()) -> Turn:
        """At most ``limit`` tokens behind the ids of ``context``, which has these ``pictures``."""
        future: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self.waiting.append((episode, context, limit, pictures, future))
        if self.serving is None or self.serving.done():
            self.serving = asyncio.create_task(self._serve())
        return await future

    async def _serve(self) -> None:
        while True:
            await asyncio.sleep(0)  # whoever has just been answered, and answers at once, is aboard again
            if not self.waiting:
                return
            batch, self.waiting = sorted(self.waiting, key=lambda request: request[0]), []
            try:
                work = asyncio.get_running_loop().run_in_executor(self.thread, self._generate, batch)
                for (*_, future), turn in zip(batch, await work, strict=True):
                    if not future.done():  # its episode was given up
                        future.set_result(turn)
            except Exception as error:
                for *_, future in batch:
                    if not future.done():
                        future.set_exception(error)

    def _generate(self, batch: Sequence[Asked]) -> list[Turn]:
        contexts = Ragged.of([context for _, context, *_ in batch], np.int64)
        seeds = []
        for episode, *_ in batch:
            turn = self.num_turns.get(episode, 0)
            self.num_turns[episode] = turn + 1
            seeds.append(self.seed_of(episode, turn))
        longest = max(limit for _, _, limit, *_ in batch)
        sampling = dataclasses.replace(self.sampling, max_completion_length=longest)
        images = [pictures for *_, pictures, _ in batch]
        prompts = Prompts(contexts, numbers=np.array(seeds, np.int64), images=images if any(images) else None)
        rollouts = self.engine.generate(prompts, sampling, seed=0)
        version = -1 if self.engine.version is None else self.engine.version
        columns = zip(batch, rollouts.completion_ids, rollouts.rollout_logps, rollouts.truncated, strict=True)
        return [
            Turn(
                ids[:limit].tolist(),
                logps[:limit].tolist(),
                [version] * len(ids[:limit]),
                bool(truncated) or len(ids) > limit,
            )
            for (_, _, limit, *_), ids, logps, truncated in columns
        ]


class TurnStream:
    """One engine for many episodes, which it completes step by step: each is answered as soon as it has finished.

    ``seed_of`` gives the seed of an episode's k-th turn, whatever runs beside it. ``between`` is called after every
    ``interval`` steps.
    """

    def __init__(
        self,
        engine: ContinuousEngine,
        sampling: Sampling,
        seed_of: Callable[[int, int], int],
        thread: Any,
        between: Callable[[], object] | None = None,
        interval: int = 1,
    ) -> None:
        self.between, self.interval, self.num_steps = between, interval, 0
        self.engine, self.sampling, self.seed_of, self.thread = engine, sampling, seed_of, thread
        self.waiting: list[Asked] = []
        self.running: dict[int, asyncio.Future[Turn]] = {}
        self.num_turns: dict[int, int] = {}  # of each episode
        self.serving: asyncio.Task[None] | None = None
        self.is_over = False
        self.most_used = 0.0  # of the KV cache

    def __enter__(self) -> TurnStream:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever still runs, as an episode failed, is given up."""
        self.is_over = True
        self.thread.shutdown()
        self.engine.abort()

    async def complete(self, episode: int, context: list[int], limit: int, pictures: Pictures = ()) -> Turn:
        """At most ``limit`` tokens behind the ids of ``context``, which has these ``pictures``."""
        future: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self.waiting.append((episode, context, limit, pictures, future))
        if self.serving is None or self.serving.done():
            self.serving = asyncio.create_task(self._serve())
        return await future

    async def _serve(self) -> None:
        await asyncio.sleep(0)  # whoever begins in the same moment is aboard
        while self.waiting or self.running:
            entering, self.waiting = self.waiting, []
            try:
                work = asyncio.get_running_loop().run_in_executor(self.thread, self._advance, entering)
                for completion in await work:
                    future = self.running.pop(completion.number)
                    if not future.done():  # its episode was given up
                        future.set_result(
                            Turn(
                                completion.ids.tolist(),
                                completion.logps.tolist(),
                                completion.versions.tolist(),
                                completion.truncated,
                            )
                        )
                await asyncio.sleep(0)  # whoever answers at once is aboard again
            except Exception as error:
                self.engine.abort()
                for future in [*self.running.values(), *(future for *_, future in entering)]:
                    if not future.done():
                        future.set_exception(error)
                self.running.clear()

    def _advance(self, entering: Sequence[Asked]) -> list[Completion]:
        """Takes those in, and goes on until somebody has finished or others wait."""
        for episode, context, limit, pictures, future in entering:
            turn = self.num_turns.get(episode, 0)
            self.num_turns[episode] = turn + 1
            sampling = dataclasses.replace(self.sampling, max_completion_length=limit)
            prompts = Prompts(Ragged.of([context], np.int64), images=[pictures] if pictures else None)
            (number,) = self.engine.submit(prompts, sampling, seed=self.seed_of(episode, turn))
            self.running[number] = future
        finished: list[Completion] = []
        while not (finished or self.waiting or self.is_over) and self.engine.num_running:
            finished = self.engine.advance()
            self.most_used = max(self.most_used, self.engine.kv_cache_usage())
            self.num_steps += 1
            if self.between is not None and not self.num_steps % self.interval:
                self.between()
        return finished


@dataclass
class Episode:
    """One completion while it grows."""

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    truncated: bool = False
    rewards: list[float] = field(default_factory=list)
    num_turns: int = 0
    num_tool_calls: int = 0
    num_tool_failures: int = 0
    infos: dict[str, Any] | None = None
    pictures: Pictures = ()  # of prompt and replies, in the order of their tokens

    def add_turn(self, turn: Turn, text: str, continues: bool = False) -> None:
        """``continues``: in the message that the last turn began."""
        self.ids += turn.ids
        self.is_sampled += [True] * len(turn.ids)
        self.logps += turn.logps
        self.versions += turn.versions
        if continues:
            self.messages[-1]["content"] += text
        else:
            self.messages.append({"role": "assistant", "content": text})
        self.num_turns += 1

    def rewrite(self, turn: Turn, new: Rewritten) -> None:
        """Puts ``new`` in place of the turn that was added last."""
        start = len(self.ids) - len(turn.ids)
        num_others = len(new.ids) - new.num_sampled
        self.ids[start:] = new.ids
        self.is_sampled[start:] = new.is_learned
        self.logps[start:] = turn.logps[: new.num_sampled] + [0.0] * num_others
        self.versions[start:] = turn.versions[: new.num_sampled] + [-1] * num_others
        self.messages[-1]["content"] = new.text

    def end_without_room(self) -> None:
        """There is none for a further turn; what was put behind the last one for it is taken back."""
        self.truncated = True
        while self.ids and not self.is_sampled[-1] and self.versions[-1] == -1 and self.logps[-1] == 0.0:
            for column in (self.ids, self.is_sampled, self.logps, self.versions):
                column.pop()

    def add_reply(self, ids: list[int], messages: Sequence[Message], pictures: Pictures = ()) -> None:
        self.ids += ids
        self.is_sampled += [False] * len(ids)
        self.logps += [0.0] * len(ids)
        self.versions += [-1] * len(ids)
        self.messages += messages
        self.pictures = (*self.pictures, *pictures)

    def transcript(self, is_text: bool) -> Any:
        """The completion as messages, or as the text of all of them."""
        return "".join(str(message["content"]) for message in self.messages) if is_text else self.messages

    def note(self, reply: Reply) -> None:
        self.rewards += [] if reply.reward is None else [float(reply.reward)]
        self.num_tool_calls += reply.num_tool_calls
        self.num_tool_failures += reply.num_tool_failures
        self.infos = self.infos if reply.infos is None else dict(reply.infos)


@dataclass(frozen=True)
class Stage:
    """What all episodes of a run have in common."""

    environment: Callable[[], Environment]
    tokenizer: Any
    turn_limit: int | None = None
    max_prompt_length: int | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    whole_weights: Callable[[], contextlib.AbstractContextManager[None]] | None = None  # see ``HfEngine``; every worker
    limits_each_turn: bool = False  # ``max_completion_length`` is of a turn, not of all of them together
    images: ImageReader | None = None  # of a model that sees pictures

    def play(
        self,
        engine: Engine,
        rows: Sequence[Mapping[str, Any]],
        sampling: Sampling,
        seed_of: Callable[[int, int], int],
        *,
        numbers: np.ndarray | None = None,
        finished: Callable[[int, Any, list[int]], object] | None = None,
        **between: Any,
    ) -> Rollouts:
        """One episode a row, in order; ``seed_of`` takes a row's number and that of the turn, and gives a seed.

        ``numbers``: of the rows; None: their places. ``finished`` is called for each as soon as it is over, with its
        row's place, its transcript and its ids. ``between`` and ``interval`` are for continuous engines; see
        ``TurnStream``.

        The same weights, row and seeds give the same episode, whatever others are played beside it.
        """
        places = range(len(rows)) if numbers is None else numbers.tolist()

        def seed(episode: int, turn: int) -> int:
            return seed_of(places[episode], turn)

        kv_cache_usage: np.ndarray | None = None
        gathered = contextlib.nullcontext() if self.whole_weights is None else self.whole_weights()
        with gathered, _one_thread() as thread:
            if isinstance(engine, ContinuousEngine):
                with TurnStream(engine, sampling, seed, thread, **between) as stream:
                    episodes = run(self._play_all(stream, rows, finished))
                kv_cache_usage = np.full(len(rows), stream.most_used, np.float32)
            else:
                server = TurnServer(engine, sampling, seed, thread)
                episodes = run(self._play_all(server, rows, finished))
        rollouts = rollouts_of(episodes, [isinstance(prompt_of(row), str) for row in rows])
        pictures = None if self.images is None else [episode.pictures for episode in episodes]
        return dataclasses.replace(rollouts, kv_cache_usage=kv_cache_usage, images=pictures)

    async def _play_all(
        self,
        server: TurnServer | TurnStream,
        rows: Sequence[Mapping[str, Any]],
        finished: Callable[[int, Any, list[int]], object] | None,
    ) -> list[Episode]:
        async def played(number: int, row: Mapping[str, Any]) -> Episode:
            episode = await self._play(server, number, row)
            if finished is not None:
                finished(number, episode.transcript(isinstance(prompt_of(row), str)), episode.ids)
            return episode

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(played(k, row)) for k, row in enumerate(rows)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _play(self, server: TurnServer | TurnStream, number: int, row: Mapping[str, Any]) -> Episode:
        with exits_are_errors("an environment"):
            environment = self.environment()
        name = type(environment).__name__
        with exits_are_errors(f"{name}.reset"):
            opening = await answered(environment.reset(row))
        row = _opened(row, opening)
        (prompt_ids,) = tokenize_prompts(
            [row],
            self.tokenizer,
            max_prompt_length=self.max_prompt_length,
            chat_template_kwargs=self.chat_template_kwargs,
            images=self.images,
        )
        episode, continues = Episode(prompt_ids), False
        if self.images is not None:
            episode.pictures = self.images.prompt(row)[1]
        step_turn = getattr(environment, "step_turn", None)
        while True:
            room = min(server.sampling.max_completion_length, self._room(server, episode))
            context = episode.prompt_ids + episode.ids
            turn = await server.complete(number, context, max(1, room), episode.pictures)
            text = self.tokenizer.decode(turn.ids, skip_special_tokens=True)
            episode.add_turn(turn, text, continues)
            if getattr(environment, "keeps_special_tokens", False):
                text = self.tokenizer.decode(turn.ids, skip_special_tokens=False)
            with exits_are_errors(f"{name}.step"):
                reply = await answered(environment.step(text) if step_turn is None else step_turn(text, turn))
            if not isinstance(reply, Reply):
                raise TypeError(f"{name}.step must return a Reply, got {type(reply).__name__}")
            if reply.reward is not None and not math.isfinite(reply.reward):
                raise ValueError(
                    f"{name}.step gave the reward {reply.reward!r} in turn {episode.num_turns} of row {number}: "
                    "rewards must be finite. Give None for no reward."
                )
            episode.note(reply)
            episode.truncated = turn.truncated
            continues = reply.turn is not None and reply.turn.continues
            is_over = reply.done or not (reply.messages or continues) or episode.num_turns == self.turn_limit
            if is_over or (turn.truncated and not reply.goes_on):
                return episode
            messages, ids, ending = _messages(reply.messages), [], turn.ids
            shown, pictures = _seen(messages, self.images)
            if reply.turn is not None:
                ending = list(reply.turn.ids)
                episode.rewrite(turn, reply.turn)
            if messages:
                told = (self.tokenizer, self.chat_template_kwargs, reply.tool_calls, self.images)
                ids = reply_ids(row, messages, ending, *told)
            if len(ids) >= self._room(server, episode):
                episode.end_without_room()
                return episode
            episode.add_reply(ids, shown, pictures)

    def _room(self, server: TurnServer | TurnStream, episode: Episode) -> int:
        """Tokens that may still be put behind the episode's."""
        sampling, length = server.sampling, getattr(server.engine, "max_model_len", None)
        room = sys.maxsize if self.limits_each_turn else sampling.max_completion_length - len(episode.ids)
        if length is not None and (self.limits_each_turn or sampling.clips):
            room = min(room, length - len(episode.prompt_ids) - len(episode.ids))
        return room


def reply_ids(
    row: Mapping[str, Any],
    messages: Sequence[Message],
    turn_ids: Sequence[int],
    tokenizer: Any,
    chat_template_kwargs: Mapping[str, Any],
    tool_calls: Sequence[Message] = (),
    images: ImageReader | None = None,
) -> list[int]:
    """Token ids of what stands between a turn of the model, which ends as ``turn_ids`` do, and its next one.

    Of a conversation: what the template puts behind an assistant's turn with the messages. It is found by rendering two
    that differ in the turn alone, as what they end in alike. Of a text: the messages' contents.

    Some templates show an answer only behind the ``tool_calls`` that it answers; one that refuses these, or answers
    without calls, gets the messages as the user's.
    """
    if isinstance(prompt_of(row), str):
        text = "".join(str(message["content"]) for message in messages)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def alike(turns: Sequence[Message], messages: Sequence[Message]) -> list[int]:
        """What the prompts with each of two turns end in alike."""
        opening = {"role": "user", "content": "?"}
        beside = {name: value for name, value in row.items() if images is None or name not in COLUMNS}
        prompts = [{**beside, "prompt": [opening, {"role": "assistant", **turn}, *messages]} for turn in turns]
        one, other = tokenize_prompts(prompts, tokenizer, chat_template_kwargs=chat_template_kwargs, images=images)
        pairs = zip(reversed(one), reversed(other), strict=False)
        return one[len(one) - next(k for k, (a, b) in enumerate(pairs) if a != b) :]

    for turns in _calling(tool_calls):
        with contextlib.suppress(TypeError, TemplateError):  # of a template that shows calls otherwise
            ids = alike(turns, messages)
            if turn_ids and turn_ids[-1] in ids:  # behind the end of the call that stands in the prompts
                return ids[ids.index(turn_ids[-1]) + 1 :]
    plain = [{"content": "a"}, {"content": "b"}]
    try:
        ids = alike(plain, messages)
    except TemplateError:
        ids = alike(plain, [{**message, "role": "user"} for message in messages])
    return ids[1:] if turn_ids and ids and ids[0] == turn_ids[-1] else ids  # the model wrote the end of its turn itself


def _calling(tool_calls: Sequence[Message]) -> Iterator[list[Message]]:
    """Two turns that make the calls and differ in the last one's arguments; these as an object, then as JSON."""
    if not tool_calls:
        return
    *others, last = tool_calls
    for written in (dict, json.dumps):
        yield [
            {"content": "", "tool_calls": [*map(partial(_with_arguments, written), others), call]}
            for call in (_with_arguments(written, last, {"a": letter}) for letter in "ab")
        ]


def _with_arguments(
    written: Callable[[Any], Any], call: Message, arguments: Mapping[str, Any] | None = None
) -> Message:
    """The call with its arguments, or the given ones, as ``written`` makes them."""
    function = call["function"]
    given = function["arguments"] if arguments is None else arguments
    return {**call, "function": {**function, "arguments": written(given)}}


def rollouts_of(episodes: Sequence[Episode], are_texts: Sequence[bool]) -> Rollouts:
    """The episodes as a batch."""

    def counts(name: str) -> np.ndarray:
        return np.array([getattr(episode, name) for episode in episodes], np.int64)

    return Rollouts(
        prompt_ids=Ragged.of([episode.prompt_ids for episode in episodes], np.int64),
        completion_ids=Ragged.of([episode.ids for episode in episodes], np.int64),
        rollout_logps=Ragged.of([episode.logps for episode in episodes], np.float32),
        policy_versions=Ragged.of([episode.versions for episode in episodes], np.int64),
        truncated=np.array([episode.truncated for episode in episodes], bool),
        is_sampled=Ragged.of([episode.is_sampled for episode in episodes], bool),
        transcripts=[episode.transcript(is_text) for episode, is_text in zip(episodes, are_texts, strict=True)],
        environment_rewards=np.array(
            [sum(episode.rewards) if episode.rewards else np.nan for episode in episodes], np.float32
        ),
        num_turns=counts("num_turns"),
        num_tool_calls=counts("num_tool_calls"),
        num_tool_failures=counts("num_tool_failures"),
        rollout_infos=None if any(one.infos is None for one in episodes) else [one.infos for one in episodes],
    )


def _seen(messages: Sequence[Message], images: ImageReader | None) -> tuple[Sequence[Message], Pictures]:
    """The messages of a reply as a transcript has them, with places for pictures, and the pictures themselves."""
    if not any(kinds_in(message) for message in messages):
        return messages, ()
    if images is None:
        raise ValueError("an environment answers with an image, and a model of this run reads only texts")
    row, pictures = images.placed({"prompt": list(messages)})
    return row["prompt"], pictures


def _messages(messages: str | Sequence[Message]) -> list[Message]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)


def _opened(row: Mapping[str, Any], opening: str | Sequence[Message] | Opening | None) -> dict[str, Any]:
    """The row with what ``reset`` gave behind its prompt, or in its place."""
    beside = {name: value for name, value in row.items() if name != "messages"}
    if isinstance(opening, Opening):
        return {**beside, "prompt": list(opening.messages)}
    prompt = prompt_of(row)
    if not opening:
        return {**beside, "prompt": prompt}
    if isinstance(prompt, str):
        return {**beside, "prompt": prompt + "".join(str(message["content"]) for message in _messages(opening))}
    return {**beside, "prompt": [*prompt, *_messages(opening)]}


@contextlib.contextmanager
def _one_thread() -> Iterator[ThreadPoolExecutor]:
    """A thread for the engine, beside that of the environments, on the same GPU."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    set_device = (lambda: None) if device is None else (lambda: torch.cuda.set_device(device))
    with ThreadPoolExecutor(1, thread_name_prefix="engine", initializer=set_device) as thread:
        yield thread
