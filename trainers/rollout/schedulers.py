"""Schedulers written for ms-swift play the turns of episodes: ``multi_turns["name"] = Scheduler`` in a plugin.

    class Recheck(MultiTurnScheduler):           # swift.rollout.multi_turn; swift_stand_in.py gives the class below
        def check_finished(self, infer_request, response_choice, current_turn): ...     # no further turn?
        def step(self, infer_request, response_choice, current_turn):                   # puts messages behind the turn
            infer_request.messages.append({"role": "user", "content": "Check it again."})
            return {"infer_request": infer_request}

One scheduler plays all episodes of a process; ``ScheduledEpisode`` is one of them, as an ``Environment``. The order of
calls is ms-swift's (4.6, ``swift/rollout``): ``on_trajectory_start``, and after each turn ``on_turn_end``,
``check_finished`` and ``step``. ``rollout_infos`` go to reward functions; ``total_reward`` in them is the environment's
reward. Tokens that an engine sampled stay as they are: a step may drop the last ones, put others behind them that are
not learned, and say by ``response_loss_mask`` which are learned. A step that adds no message lets the model continue
its own. ``images`` that it puts into the request are shown in the places ``<image>`` of its messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from trainers.data.rows import prompt_of
from trainers.plugins import ENVIRONMENTS, GAMES, exits_are_errors, named
from trainers.rollout import openenv
from trainers.rollout.environments import Environment, Message, Opening, Reply, Rewritten, answered, resolve_environment
from trainers.rollout.games import Env, MathEnv
from trainers.rollout.request_pictures import pictures_of, placed

UNSEEN = ("videos", "audios")  # media of requests that no model is shown


@dataclass
class RolloutInferRequest:
    """A conversation that is to be continued; ``data_dict`` has the other columns of its row."""

    messages: list[Message] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)  # paths, base64 texts or PIL images
    audios: list[str] = field(default_factory=list)
    videos: list[str] = field(default_factory=list)
    tools: Any = None
    objects: dict[str, Any] = field(default_factory=dict)
    data_dict: dict[str, Any] = field(default_factory=dict)
    uuid: str | None = None


@dataclass
class ChatMessage:
    """What the model wrote."""

    role: str
    content: str
    tool_calls: Any = None
    reasoning_content: str | None = None


@dataclass
class ChatCompletionResponseChoice:
    """One turn of the model; ``token_ids`` are without the token that ended it."""

    index: int
    message: ChatMessage
    finish_reason: str | None
    logprobs: dict[str, list[dict[str, Any]]] | None = None
    token_ids: list[int] | None = None


class RolloutScheduler:
    """What is called around the turns of episodes."""

    def __init__(self, infer_engine: Any = None, max_turns: int | None = None, *args: Any, **kwargs: Any) -> None:
        self.infer_engine, self.max_turns = infer_engine, max_turns
        self._tokenizer = kwargs.get("tokenizer")

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """May change the messages of requests before their first turn."""

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """May give ``done``, which then decides in place of ``check_finished``, and ``rollout_infos``."""
        return {}

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        """Whether the episode ends with this turn: one that was cut, or the last of ``max_turns``."""
        is_last = bool(self.max_turns) and current_turn >= (self.max_turns or 0)
        return response_choice.finish_reason == "length" or is_last

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """The request of the next turn, as ``infer_request``; see the top of the file for what else."""
        raise NotImplementedError(f"{type(self).__name__} has no step")

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
        """Never called: episodes.py plays the turns. A class with a ``run`` of its own is refused."""
        raise NotImplementedError("RayHelper does not call run: check_finished and step define the turns")


class MultiTurnScheduler(RolloutScheduler):
    """The base class of schedulers with ``step``."""


class MathTipsScheduler(MultiTurnScheduler):
    """Lets the model doubt a wrong answer once, in the middle of its own message: ``math_tip_trick``.

    Rows have a ``solution``. A wrong answer loses what stands from ``<answer>`` or ``</think>`` on.
    """

    tips_prompt = "But wait... It seems I made a mistake,"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.acc_func = kwargs.get("acc_function") or _accuracy

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        text = infer_request.messages[-1]["content"]
        if self.tips_prompt in text:
            return True
        if "solution" not in infer_request.data_dict:
            raise ValueError(f"{type(self).__name__} compares with the column 'solution', and a row has none. Add it.")
        is_right = self.acc_func([text], [infer_request.data_dict["solution"]])[0] == 1
        return is_right or super().check_finished(infer_request, response_choice, current_turn)

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        text, ids = response_choice.message.content, list(response_choice.token_ids or [])
        end = min((text.index(mark) for mark in ("<answer>", "</think>") if mark in text), default=len(text))
        if end < len(text):
            lengths = (len(self.tokenizer.decode(ids[:k], skip_special_tokens=False)) for k in range(1, len(ids) + 1))
            ids = ids[: next((k for k, length in enumerate(lengths, start=1) if length >= end), len(ids))]
        tip = self.tokenizer.encode(self.tips_prompt, add_special_tokens=False)
        infer_request.messages[-1]["content"] = text[:end] + self.tips_prompt
        mask = [1] * len(ids) + [0] * len(tip)
        return {"infer_request": infer_request, "response_token_ids": ids + tip, "response_loss_mask": mask}


class GYMScheduler(MultiTurnScheduler):
    """Plays a game of the registry ``envs`` with each episode: ``gym_scheduler``.

    Which one: the row's ``env_config: {name: ...}``, or ``gym_env``. Its first observation replaces the prompt.
    """

    def __init__(self, infer_engine: Any = None, max_turns: int | None = None, **kwargs: Any) -> None:
        super().__init__(infer_engine, max_turns, **kwargs)
        self.gym_env_name = kwargs.get("gym_env")
        self.games: dict[str | None, Env] = {}
        self.rewards: dict[str | None, list[float]] = {}
        self.shown: dict[str | None, str] = {}  # the observation of the next turn

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        for request in requests:
            env_config = request.data_dict.get("env_config") or {}
            game = self._create_env(env_config)
            observation, _, system = await game.reset(request)
            opening = [{"role": "system", "content": system}] if system else []
            request.messages = [*opening, {"role": "user", "content": observation}]
            self.games[request.uuid], self.rewards[request.uuid] = game, []

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        number = infer_request.uuid
        observation, reward, done, _ = await self.games[number].step(deepcopy(infer_request.messages))
        rewards = self.rewards[number]
        rewards.append(float(reward))
        infos = {"total_reward": sum(rewards), "step_rewards": list(rewards), "gym_done": done}
        self.shown[number] = observation
        if done or (self.max_turns and current_turn >= self.max_turns):
            await self.games.pop(number).close()
            del self.rewards[number], self.shown[number]
        return {"done": done, "rollout_infos": infos}

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        infer_request.messages.append({"role": "user", "content": self.shown.pop(infer_request.uuid)})
        return {"infer_request": infer_request}

    def _create_env(self, env_config: Mapping[str, Any]) -> Env:
        name = str(env_config.get("name") or self.gym_env_name)
        if name not in GAMES:
            raise ValueError(unknown_game(name))
        game: Env = GAMES[name](env_config)
        if isinstance(game, MathEnv):
            game.tokenizer = self.tokenizer
        return game


class OpenEnvScheduler(GYMScheduler):
    """Plays a game on a server of OpenEnv with each episode: ``openenv_scheduler``.

    Rows have ``env_config: {base_url: ..., system_message: ..., reset_kwargs: ...}``. A class of yours turns the
    model's text into an action (``parse_action``) and an observation into text (``format_observation``). The names of
    its state are ms-swift's, for the classes that read it.
    """

    def __init__(self, infer_engine: Any = None, max_turns: int | None = None, **kwargs: Any) -> None:
        super().__init__(infer_engine, max_turns, **kwargs)
        self._envs: dict[str | None, Any] = {}
        self._total_rewards: dict[str | None, float] = {}
        self._step_rewards: dict[str | None, list[float]] = {}
        self._pending_obs: dict[str | None, str | None] = {}

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        for request in requests:
            number, own = request.uuid, request.data_dict.get("env_config") or {}
            env_config = {**getattr(self, "env_config_defaults", {}), **own}
            game: Any = self._create_env(env_config)
            observation, _ = await asyncio.to_thread(game.reset)
            system = env_config.get("system_message")
            opening = [{"role": "system", "content": system}] if system else []
            request.messages = [*opening, {"role": "user", "content": self.format_observation(observation)}]
            self._envs[number], self._total_rewards[number] = game, 0.0
            self._step_rewards[number], self._pending_obs[number] = [], None

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        number = infer_request.uuid
        action = self.parse_action(response_choice.message.content)
        observation, reward, done, _ = await asyncio.to_thread(self._envs[number].step, action)
        self._total_rewards[number] += float(reward)
        self._step_rewards[number].append(float(reward))
        self._pending_obs[number] = None if done else self.format_observation(observation)
        infos = {"total_reward": self._total_rewards[number], "step_rewards": [*self._step_rewards[number]]}
        if done:
            await self._close_and_remove(number)
        return {"done": done, "rollout_infos": {**infos, "gym_done": done}}

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        observation = self._pending_obs.get(infer_request.uuid)
        if observation is not None:
            infer_request.messages.append({"role": "user", "content": observation})
            self._pending_obs[infer_request.uuid] = None
        return {"infer_request": infer_request}

    def parse_action(self, text: str) -> Any:
        """The action that the model's text asks for: a mapping in JSON, fenced or not, else {"message": text}."""
        text = text.strip()
        lines = text.splitlines()
        if len(lines) > 1 and lines[0].startswith("```") and lines[-1].strip().startswith("```"):
            text = "\n".join(lines[1:-1]).strip()
        try:
            found = json.loads(text)
        except ValueError:
            return {"message": text}
        return found if isinstance(found, dict) else {"message": str(found)}

    def format_observation(self, observation: Any) -> Any:
        """What the model reads of an observation: JSON."""
        return json.dumps(observation, ensure_ascii=False, default=str)

    def _create_env(self, env_config: Mapping[str, Any]) -> Any:
        return openenv.OpenEnvGame(env_config)

    async def _close_and_remove(self, uuid: str | None) -> None:
        game = self._envs.pop(uuid, None)
        if game is not None:
            await asyncio.to_thread(game.close)
        for state in (self._total_rewards, self._step_rewards, self._pending_obs):
            state.pop(uuid, None)


def _accuracy(completions: Sequence[str], solution: Sequence[str]) -> list[float]:
    from trainers.rewards.ms_swift import ms_swift_accuracy

    return ms_swift_accuracy(completions, solution)


def unknown_game(name: Any) -> str:
    return (
        f"gym_env {name!r} is not in the registry envs (known: {', '.join(sorted(GAMES)) or 'none'}). Register it in a "
        "file of external_plugins: envs['name'] = Class"
    )


class Scheduled:
    """A scheduler's class, as it stands in the registry of environments."""

    def __init__(self, name: str, kind: Any) -> None:
        self.name, self.kind = name, kind
        self.__wrapped__ = kind  # whose signature and origin it has

    def __call__(self, **_: Any) -> Any:
        raise TypeError(f"{self.name} is a scheduler: environment_named makes its episodes")

    def episodes(self, *, max_turns: int | None, tokenizer: Any, **arguments: Any) -> Callable[[], ScheduledEpisode]:
        """What makes the episodes; all have one scheduler, which is made for the first.

        Raises ValueError for a class that plays the turns itself, or a game that nobody registered.
        """
        if not (inspect.isclass(self.kind) and issubclass(self.kind, RolloutScheduler)):
            bases = ", ".join(base.__name__ for base in getattr(self.kind, "__bases__", ()))
            raise ValueError(
                f"multi_turn_scheduler {self.name!r} is {self.kind!r} ({bases}), not a class of MultiTurnScheduler, "
                "MathTipsScheduler or GYMScheduler. Write it as one of these."
            )
        if issubclass(self.kind, OpenEnvScheduler) and not openenv.is_installed():
            raise ValueError(
                f"multi_turn_scheduler {self.name!r} uses servers of OpenEnv, whose client is not installed. pip "
                "install openenv."
            )
        for method in ("run", "async_infer"):
            owner = next((kind for kind in self.kind.__mro__ if method in vars(kind)), RolloutScheduler)
            if owner.__module__ != __name__:
                raise ValueError(
                    f"multi_turn_scheduler {self.name!r}: {owner.__name__} has a {method} of its own, which RayHelper "
                    "does not support. Write check_finished and step, or an environment (@register_environment)."
                )
        game = arguments.get("gym_env")
        if game is not None and game not in GAMES:
            raise ValueError(unknown_game(game))

        @functools.cache
        def scheduler() -> Any:
            return self.kind(max_turns=max_turns, tokenizer=tokenizer, **arguments)

        return lambda: ScheduledEpisode(scheduler(), max_turns)


def is_scheduler(spec: Any) -> bool:
    """Whether ``environment`` names a scheduler, or a game that one plays."""
    name, _ = named(spec)
    return isinstance(name, str) and (isinstance(ENVIRONMENTS.get(name), Scheduled) or name in GAMES)


def environment_named(spec: Any, *, max_turns: int | None, tokenizer: Any = None) -> Callable[[], Environment]:
    """What makes an environment, as ``resolve_environment``, or the episodes of a scheduler.

    Raises: ValueError as ``resolve_environment`` and ``Scheduled.episodes`` do.
    """
    name, arguments = named(spec)
    if isinstance(name, str) and name not in ENVIRONMENTS and name in GAMES:
        spec = {"name": "gym_scheduler", "gym_env": name, **arguments}
    made = resolve_environment(spec)
    kind = made.func if isinstance(made, functools.partial) else None
    if isinstance(kind, Scheduled):
        return kind.episodes(max_turns=max_turns, tokenizer=tokenizer, **made.keywords)  # type: ignore[attr-defined]
    return made


def _plugins_imports() -> contextlib.AbstractContextManager[None]:
    """Inside, methods of a plugin's scheduler may import from ``swift`` as the plugin did."""
    from trainers.swift_stand_in import shown

    return shown.importable()


class ScheduledEpisode:
    """One episode that a scheduler plays."""

    def __init__(self, scheduler: Any, max_turns: int | None) -> None:
        self.scheduler, self.max_turns = scheduler, max_turns
        self.name = type(scheduler).__name__
        self.request = RolloutInferRequest()
        self.images: list[Any] = []  # that the model has seen
        self.infos: dict[str, Any] = {}
        self.num_turns = 0

    async def reset(self, row: Mapping[str, Any]) -> Opening | None:
        """The messages that ``on_trajectory_start`` put in place of the row's."""
        prompt = prompt_of(row)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else deepcopy(list(prompt))
        columns = {name: value for name, value in row.items() if name not in ("messages", "tools", "data_dict")}
        columns = {name: deepcopy(value) for name, value in columns.items() if value is not None}
        data = {**columns, **(row.get("data_dict") or {})}
        told: dict[str, Any] = {"tools": row.get("tools"), "data_dict": data, "uuid": uuid.uuid4().hex}
        self.request = RolloutInferRequest(messages, pictures_of(row), **told)
        self.images = list(self.request.images)
        before = deepcopy(messages)
        with exits_are_errors(f"{self.name}.on_trajectory_start"), _plugins_imports():
            await answered(self.scheduler.on_trajectory_start([self.request]))
        if self._new_images():
            raise ValueError(
                f"{self.name}.on_trajectory_start added images. Put them into the rows, or add them in step."
            )
        return None if self.request.messages == before else Opening(deepcopy(self.request.messages))

    def step(self, text: str) -> Reply:
        raise TypeError("a scheduler sees the tokens of a turn: call step_turn")

    async def step_turn(self, text: str, turn: Any) -> Reply:
        """The reply to a ``Turn``, whose text is ``text``."""
        with _plugins_imports():
            return await self._step_turn(text, turn)

    async def _step_turn(self, text: str, turn: Any) -> Reply:
        self.num_turns += 1
        number, request, scheduler = self.num_turns, self.request, self.scheduler
        ids = turn.ids if turn.truncated else turn.ids[:-1]
        choice = ChatCompletionResponseChoice(
            0,
            ChatMessage("assistant", text),
            "length" if turn.truncated else "stop",
            {"content": [{"logprob": logp} for logp in turn.logps[: len(ids)]]},
            list(ids),
        )
        if request.messages[-1]["role"] == "assistant":
            request.messages[-1]["content"] += text
        else:
            request.messages.append({"role": "assistant", "content": text})
        ended = await answered(scheduler.on_turn_end(request, choice, number)) or {}
        reward = self._note(ended.get("rollout_infos"))
        is_finished = scheduler.check_finished(request, choice, number)
        if ended.get("done", is_finished) or (self.max_turns and number >= self.max_turns):
            if isinstance(scheduler, OpenEnvScheduler):
                await scheduler._close_and_remove(request.uuid)
            return Reply(done=True, reward=reward, infos=dict(self.infos))
        before = deepcopy(request.messages)
        result = await answered(scheduler.step(request, choice, number))
        if not isinstance(result, Mapping) or "infer_request" not in result:
            raise TypeError(f"{self.name}.step must return a dict with infer_request, got {type(result).__name__}")
        more = self._note(result.get("rollout_infos"))
        rewards = [one for one in (reward, more) if one is not None]
        self.request = result["infer_request"]
        images = self._new_images()
        added = placed(self._added(before), images, f"{self.name}.step")
        self.images += images
        has_ids = result.get("response_token_ids") is not None
        if self.request.messages[len(before) - 1] != before[-1] and not has_ids:
            raise ValueError(
                f"{self.name}.step changed the text of the model's turn and gave no response_token_ids. Sampled tokens "
                "are not tokenized again. Give the ids, with response_loss_mask 0 on your own tokens."
            )
        return Reply(
            added,
            reward=sum(rewards) if rewards else None,
            infos=dict(self.infos),
            turn=self._rewritten(turn, ids, result, self.request.messages[len(before) - 1]["content"], not added),
            goes_on=True,
        )

    def _note(self, infos: Mapping[str, Any] | None) -> float | None:
        """Adds to the infos; by how much ``total_reward`` in them has grown."""
        old = self.infos.get("total_reward")
        self.infos |= {**(infos or {}), "num_turns": self.num_turns}
        if self.infos.pop("images", self.request.images) != self.request.images:
            raise ValueError(f"{self.name}: rollout_infos has other images than the request. Leave them out.")
        if media := [name for name in UNSEEN if self.infos.get(name)]:
            raise ValueError(f"{self.name}: rollout_infos has {media[0]}, which schedulers cannot pass to a model")
        new = (infos or {}).get("total_reward")
        return None if new is None else float(new) - float(old or 0.0)

    def _new_images(self) -> list[Any]:
        """Those that the scheduler put behind the request's. Raises ValueError for what else it did to its media."""
        if media := [name for name in UNSEEN if getattr(self.request, name, None)]:
            raise ValueError(f"{self.name} put {media[0]} into a request, which schedulers cannot pass to a model")
        images, size = list(self.request.images or []), len(self.images)
        if images[:size] != self.images:
            raise ValueError(f"{self.name} changed images that the model has seen. Put new ones behind them.")
        return images[size:]

    def _added(self, before: Sequence[Message]) -> list[Message]:
        """The messages that a step put behind the model's. Raises ValueError if it changed older ones."""
        messages, size = self.request.messages, len(before)
        if len(messages) > size and messages[-1]["role"] == "assistant" and not messages[-1].get("content"):
            messages.pop()  # where the model is to write
        added = deepcopy(messages[size:])
        if messages[: size - 1] != before[:-1] or len(messages) < size or messages[size - 1]["role"] != "assistant":
            raise ValueError(
                f"{self.name}.step changed messages before the model's last turn; their tokens are there already. Put "
                "messages behind it."
            )
        if any(message["role"] == "assistant" for message in added):
            raise ValueError(f"{self.name}.step wrote a turn of the assistant, which the model did not sample")
        return added

    def _rewritten(
        self, turn: Any, ids: Sequence[int], result: Mapping[str, Any], text: str, continues: bool
    ) -> Rewritten | None:
        """What becomes of the tokens of a turn; None: they stay."""
        given = result.get("response_token_ids")
        given = list(ids if given is None else given)
        mask = result.get("response_loss_mask")
        mask = [1] * len(given) if mask is None else list(mask)
        if len(mask) != len(given):
            raise ValueError(
                f"{self.name}.step gave response_loss_mask of {len(mask)} for {len(given)} response_token_ids: one each"
            )
        if any(one not in (0, 1) for one in mask):
            raise ValueError(f"{self.name}.step gave response_loss_mask {mask}. Give 0 or 1 for each token.")
        same = (one == other for one, other in zip(given, turn.ids, strict=False))
        num_sampled = next((k for k, is_same in enumerate(same) if not is_same), min(len(given), len(turn.ids)))
        if any(mask[num_sampled:]):
            raise ValueError(
                f"{self.name}.step gave response_token_ids that the engine did not sample, from place {num_sampled} "
                "on. The policy would learn them. Give a response_loss_mask with 0 for these tokens."
            )
        logps = result.get("rollout_logprobs")
        if logps and list(logps) != turn.logps[: len(logps)]:
            raise ValueError(f"{self.name}.step gave rollout_logprobs that are not the engine's. Leave them out.")
        if not continues and given == list(ids):  # its end is sampled too
            end = turn.ids[len(ids) :]
            given, num_sampled = [*given, *end], num_sampled + len(end)
            mask += (mask[-1:] or [1]) * len(end)
        if not continues and given == turn.ids and all(mask):
            return None
        return Rewritten(given, num_sampled, [bool(one) for one in mask], text, continues)


NAMES = (  # of ms-swift's classes, for plugins
    *(RolloutInferRequest, ChatMessage, ChatCompletionResponseChoice, Env),
    *(RolloutScheduler, MultiTurnScheduler, MathTipsScheduler, GYMScheduler, OpenEnvScheduler),
)
BUILT_IN = {
    "math_tip_trick": MathTipsScheduler,
    "gym_scheduler": GYMScheduler,
    "openenv_scheduler": OpenEnvScheduler,
}
for _name, _kind in BUILT_IN.items():
    ENVIRONMENTS.register(_name)(Scheduled(_name, _kind))


def register_schedulers(multi_turns: Mapping[str, Any], envs: Mapping[str, Any]) -> None:
    """Puts what a plugin registered with ms-swift under our names. Raises ValueError for a name that is taken."""
    for name, kind in multi_turns.items():
        if BUILT_IN.get(name) is not kind:
            ENVIRONMENTS.register(name)(Scheduled(name, kind))
    for name, kind in envs.items():
        GAMES.register(name)(kind)
