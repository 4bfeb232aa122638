"""Completions from any engine (role rollout), always under the policy's newest weights.

    generator = Generator(config, policy)              # policy: a part of the same trainer
    generator.build(path)                              # an engine per rollout worker
    rollouts = generator.complete(prompts, step)       # Rollouts, in order; ``step`` is a part of the seed
    with generator.following(run): ...                 # around the steps of a run, and
    generator.learned()                                # after each optimizer step

Asynchronously: ``pending = generator.begin(prompts, step)``, ``generator.finished(pending)`` and, when all completions
of a round are there, ``generator.rest()``. A worker that dies and is replaced gets an engine and weights, and completes
its prompts once more. How weights get from worker to worker is ``weights.py``; the seconds that all of this takes
count in the run's phases ``generate`` (waiting for completions), ``sync`` and ``offload``.

Policy and engine on the same devices make room for each other:

    policy.make_room("weights") ► (weights) ► policy.make_room("kv_cache") ► wake ► generate ► sleep ► policy.reload
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from rayhelper import Channel, ChannelError, DeadlineError, RayHelper
from trainers.batch import Prompts, Rollouts, Tasks
from trainers.configuration.completion import CompletionConfig
from trainers.data.images.pictures import Pictures
from trainers.data.images.processor import ImageReader
from trainers.data.rows import prompt_of
from trainers.parts.engine import build_engine, check_shards_are_here, numbered, prompts_of, sampling_of, seed_of
from trainers.parts.policy import Policy
from trainers.parts.rewarder import Rewarder
from trainers.parts.tokenizer import load_tokenizer
from trainers.parts.weights import EngineLostError, Way, arrivals, copy, first_of, receive, rest, way_of
from trainers.plugins import load_plugins
from trainers.rewards.pool import RewardPool
from trainers.rewards.texts import chat_completions
from trainers.rollout.base import Completion, Engine, Sampling
from trainers.rollout.environments import Environment
from trainers.rollout.episodes import Stage
from trainers.run.run import Run

TIMEOUT_S = 600.0  # how long one side waits for the other: engines do nothing else then, or look now and then
NOT_SENT = (EngineLostError, ChannelError, DeadlineError)  # an engine is lost, or busy with what is no decoding


@dataclass
class Pending:
    """Completions that engines are asked for."""

    begin: Callable[[], Any]  # asks for them once more
    rollouts: Any  # a future of Rollouts
    version: int  # optimizer steps that the policy had made when they were begun
    images: list[Pictures] | None = None  # of the prompts


@RayHelper.worker(group="rollout")
class Generator:
    """Engines that complete prompts, or play episodes if there is an ``environment``, with the weights of ``policy``.

    ``rewarder``: where its functions run in processes, those run beside the engines, and rollouts come with rewards.
    ``environment`` is called on a worker with its tokenizer. It returns a function that makes the environment of an
    episode. An episode has at most ``turn_limit`` turns. ``limits_each_turn``: ``max_completion_length`` applies to
    each turn.
    ``sync_interval``: the number of decoding steps after which engines look for new weights. ``learned`` then sends
    weights at once. Each engine also finds a call of ``receive`` behind its generations, which does nothing if the
    weights have come. None: new weights wait until all that was begun has ended.
    """

    def __init__(
        self,
        config: CompletionConfig,
        policy: Policy,
        rewarder: Rewarder | None = None,
        *,
        environment: Callable[[Any], Callable[[], Environment]] | None = None,
        turn_limit: int | None = None,
        limits_each_turn: bool = False,
        sync_interval: int | None = None,
    ) -> None:
        self.config, self.policy, self.rewarder = config, policy, rewarder
        self.environment, self.turn_limit, self.sync_interval = environment, turn_limit, sync_interval
        self.limits_each_turn = limits_each_turn
        # On a worker of role rollout
        self.engine: Engine | None = None
        self.stage: Stage | None = None  # where there is an environment
        self.pool: RewardPool | None = None  # where the rewarder has processes
        # On the driver
        self.images: ImageReader | None = None  # of a model that sees the pictures of episodes
        self.way: Way = "sent"
        self.num_engines = 1  # workers of role rollout
        self.phase: Callable[[str], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.channel: Channel | None = None
        self.receiving: list[Any] = []  # futures of the calls of ``receive`` behind generations
        self.run: Run | None = None  # that ``following`` was given
        self.version = 0  # optimizer steps that the policy has made
        self.is_due = True  # engines have older weights than the policy, or rest

    # The driver's part: completions

    def build(self, path: str, images: ImageReader | None = None) -> None:
        """Every worker of role rollout has an engine for the model; call it after ``policy.build``.

        ``images``: of a model that sees the pictures of episodes.
        """
        self.path, self.images = path, images
        self.start(path, images)
        self.way, self.num_engines = self.meet()

    @contextlib.contextmanager
    def following(self, run: Run) -> Iterator[None]:
        """Inside, seconds count in the run's phases; afterwards connections and reward processes are closed."""
        self.run, self.version, self.phase = run, run.step, run.phase
        try:
            yield
            self.close()
        finally:
            self.close_own_pool()

    def starts(
        self, rows: Any, tokenizer: Any, groups: np.ndarray | None = None, images: ImageReader | None = None
    ) -> Prompts | Tasks:
        """The argument of ``begin``: the rows' prompts as token ids, or whole rows if an environment plays them.

        Completions with the same number in ``groups`` are rewarded together. None: each one separately. ``images``: for
        a vision model.
        """
        groups = np.arange(len(rows)) if groups is None else groups
        if self.environment is not None:
            return Tasks(list(rows), groups)
        prompts = prompts_of(self.config, rows, tokenizer, images)
        if self.rewarder is None or not self.rewarder.num_processes:
            return prompts
        return replace(prompts, rows=list(rows), groups=groups)

    def complete(self, starts: Prompts | Tasks, *numbers: int, temperature: float | None = None) -> Rollouts:
        """One completion per prompt, in order. Then the engines sleep. See ``begin``."""
        rollouts = self.finished(self.begin(starts, *numbers, temperature=temperature))
        self.rest()
        return rollouts

    def begin(self, starts: Prompts | Tasks, *numbers: int, temperature: float | None = None) -> Pending:
        """The engines start to complete the prompts with the current policy.

        ``numbers`` become part of the seed. They are the step of the run (-1 in evaluation) and the number of the call.
        The completion of a prompt depends on them and on its index, not on the number of workers. ``temperature``
        None: the configuration's.

        Raises EngineLostError as ``finished`` does, and ChannelError if weights do not arrive at the second attempt.
        """
        self.update()
        sampling = sampling_of(self.config, temperature)
        own = numbered(starts)

        def begin() -> Any:
            channel = self.channel if self.in_flight else None  # by which weights may come meanwhile
            return self.generate.defer(own, sampling, channel, *numbers)

        with self.phase("generate"):
            return Pending(begin, begin(), self.version, getattr(own, "images", None))

    def finished(self, pending: Pending) -> Rollouts:
        """The completions. If a worker has died and was replaced in between, they are from the current policy.

        Each death uses one of the ``restarts`` of the group.

        Raises:
            EngineLostError: the worker that died trains as well.
        """
        with self.phase("generate"):
            while True:
                try:
                    rollouts: Rollouts = pending.rollouts.result()
                except EngineLostError as lost:
                    self._restore(lost)
                    pending.rollouts, pending.version = pending.begin(), self.version
                else:
                    return rollouts if pending.images is None else replace(rollouts, images=pending.images)

    # The driver's part: weights

    @property
    def in_flight(self) -> bool:
        """Whether new weights reach engines in the middle of completions."""
        return self.sync_interval is not None

    def learned(self) -> None:
        """Call it after each optimizer step of the policy. Engines with completions in flight get its weights now.
        Raises the same errors as ``begin``."""
        self.version += 1
        self.is_due = True
        if self.in_flight and self.channel is not None:
            try:
                with self.phase("sync"):  # the policy can do nothing else meanwhile
                    sent = self.policy.send.defer(self.channel, self.version)
                    self.receiving.append(self.receive.defer(self.channel, self.version))
                    sent.result()
            except NOT_SENT as lost:
                self._restore(lost)

    def update(self) -> None:
        """After it, the engines hold the policy's weights and are ready to generate. Raises the same errors as
        ``begin``."""
        if self.run is not None and self.run.step > self.version:
            raise RuntimeError(
                f"the run has made {self.run.step} optimizer steps, but generator.learned() was called after "
                f"{self.version}: engines would continue with old weights. Call it after every policy.step."
            )
        if not self.is_due:
            return
        with self.phase("sync"):
            try:
                if self.way == "copied":
                    self._fill(partial(self.copy, self.version))
                elif self.in_flight and self.channel is not None:
                    self._look()
                elif self.way != "shared":
                    self._send()
            except NOT_SENT as lost:
                self._restore(lost)
        self.is_due = False

    def rest(self) -> None:
        """Gives the engines' memory back to the training on the same devices."""
        if self._makes_room:
            self._rest()
            self.is_due = True

    def close(self) -> None:
        """Closes connections and reward processes; the next completions open others."""
        with contextlib.suppress(*NOT_SENT):  # nobody is left to need the weights
            self._look()
        self._close_channel()
        if self.rewarder is not None and self.rewarder.num_processes:
            self.close_pool()

    @property
    def _makes_room(self) -> bool:
        """Whether policy and engines hold a model each on the same devices."""
        return self.way in ("copied", "beside")

    def _restore(self, lost: Exception) -> None:
        """Workers that took the place of others have engines, and all engines the policy's weights."""
        if self.way in ("shared", "copied"):
            raise EngineLostError(
                "a worker died that trains and generates. Another one replaced it, but its learned state is lost. "
                "Continue from a checkpoint (resume_from_checkpoint: auto). Or give role rollout its own group, "
                "whose restarts replace single workers."
            ) from lost
        while True:
            self._close_channel()
            self.start(self.path, self.images)
            try:
                if self._makes_room:  # the policy may be offloaded
                    self._rest()
                self._send()
            except EngineLostError:  # a further one died
                continue
            self.is_due = False
            return

    def _rest(self) -> None:
        with self.phase("offload"):
            self.sleep()
            self.policy.reload()

    def _send(self) -> None:
        with self.phase("generate"):  # for as long as it takes: the sender waits TIMEOUT_S at most
            self.meet()
        if self.channel is None:
            self.channel = self.open_channel()
        self._fill(partial(self._transfer, self.channel))

    def _transfer(self, channel: Channel) -> None:
        """Train worker 0 sends while the engines receive.

        The first error of one side ends the other side too. Errors of the channel only say that the other side ended.
        """
        sent = self.policy.send.defer(channel, self.version)
        calls = [self.receive.defer(channel), sent]
        try:
            for call in RayHelper.as_completed(calls):
                call.result()
        except Exception as first:
            self._close_channel()  # or the other side would wait TIMEOUT_S
            errors = [call.exception() for call in calls]
            told = next(
                (error for error in errors if not isinstance(error, ChannelError | DeadlineError | None)), first
            )
            if told is first:
                raise
            raise told from first
        except BaseException:  # an interrupt: nobody waits
            self._close_channel()
            raise

    def _fill(self, load: Callable[[], Any]) -> None:
        """Engines load weights, and then have their KV cache; what is in their way on the same devices is offloaded."""
        if self._makes_room:
            with self.phase("offload"):
                self.policy.make_room("weights")
        with self.phase("sync"):
            load()
        if self._makes_room:
            with self.phase("offload"):
                self.policy.make_room("kv_cache")
                self.wake()

    def _look(self) -> None:
        """Raises what went wrong of the calls of ``receive`` that are done."""
        done = [call for call in self.receiving if call.done()]
        self.receiving = [call for call in self.receiving if call not in done]
        for call in done:
            call.result()

    def _close_channel(self) -> None:
        """Ends what is under way as well."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        self.receiving = []

    @RayHelper.function(group="driver", execute="first")
    def open_channel(self) -> Channel:
        """A channel to all engines."""
        under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # its process 0 is both the driver and train worker 0
        network: Literal["nccl", "gloo"] = "nccl" if torch.cuda.is_available() else "gloo"
        transport = network if under_torchrun else "auto"
        bucket_mb = self.config.weight_bucket_mb
        return Channel(self.num_engines, bucket_mb=bucket_mb, timeout_s=TIMEOUT_S, transport=transport)

    # Role rollout

    @RayHelper.function(group="rollout")
    def start(self, path: str, images: ImageReader | None = None) -> None:
        """Builds the engine of this worker and its reward processes, unless there is one.

        Raises:
            ConfigError: the engine needs the shards of train workers that have no engine and would wait for ever.
        """
        if self.engine is not None:
            return
        config, backend = self.config, self.policy.backend
        check_shards_are_here(config, backend)
        load_plugins(config.external_plugins)
        self.tokenizer = tokenizer = load_tokenizer(config, path) if images is None else images.plain
        environment = None if self.environment is None else self.environment(tokenizer)
        self.engine = self.new_engine(path, tokenizer, gathers=environment is None)
        self.pool = None if self.rewarder is None else self.rewarder.new_pool()
        if environment is not None:
            gather = None if backend is None else backend.whole_weights
            limits = (self.turn_limit, config.max_prompt_length)
            each = self.limits_each_turn
            self.stage = Stage(environment, tokenizer, *limits, config.chat_template_kwargs, gather, each, images)

    def new_engine(self, path: str, tokenizer: Any, *, gathers: bool) -> Engine:
        """The engine that ``start`` keeps. Subclasses that host something else override it. ``gathers``: see
        ``build_engine``."""
        return build_engine(self.config, path, tokenizer, self.policy.backend, gathers=gathers)

    @property
    def built(self) -> Engine:
        """The engine of this worker. Raises EngineLostError if there is none."""
        if self.engine is None:
            raise EngineLostError("this worker has no engine: it replaced a worker that died")
        return self.engine

    @RayHelper.function(group="rollout", collect=first_of)
    def meet(self) -> tuple[Way, int]:
        """How weights get to the engines, and how many engines there are.

        It returns when every engine has completed its earlier requests.
        """
        return way_of(self.built, self.policy.backend), RayHelper.current().world_size

    @RayHelper.function(group="rollout", dispatch="slice", collect="flatten")
    def generate(self, starts: Prompts | Tasks, sampling: Sampling, channel: Channel | None, *numbers: int) -> Rollouts:
        """One completion per prompt, or one episode per task. New weights may arrive through ``channel`` in the
        meantime."""
        engine = self.built
        between = arrivals(engine, channel, self.sync_interval)
        if isinstance(starts, Prompts):
            seed = seed_of(self.config.seed, *numbers)
            return completed(engine, starts, sampling, self.pool, self.tokenizer, seed=seed, **between)
        assert self.stage is not None, "tasks are for an environment"
        seeds = partial(seed_of, self.config.seed, *numbers)
        play = partial(self.stage.play, engine, starts.rows, sampling, seeds, numbers=starts.numbers, **between)
        if self.pool is None:
            return play()
        with self.pool.scoring(starts.rows, starts.groups) as scoring:
            return scoring.rewarded(play(finished=scoring.add))

    @RayHelper.function(group="rollout")
    def copy(self, version: int) -> None:
        """Loads the policy's weights from the same process."""
        if self.policy.backend is not None:  # where it is trained as well
            copy(self.config, self.policy.backend, self.built, version)

    @RayHelper.function(group="rollout")
    def receive(self, channel: Channel, unless: int | None = None) -> None:
        """Loads the weights that the policy sends, unless the engine has those of version ``unless`` already."""
        receive(self.built, channel, unless)

    @RayHelper.function(group="rollout")
    def wake(self) -> None:
        """The engine gets its KV cache."""
        self.built.wake("kv_cache")

    @RayHelper.function(group="rollout")
    def sleep(self) -> None:
        """The engine frees the memory that it does not need."""
        if self.engine is not None:
            rest(self.engine)

    @RayHelper.function(group="rollout")
    def close_pool(self) -> None:
        """Ends the reward processes beside the engines."""
        self.close_own_pool()

    def close_own_pool(self) -> None:
        """Ends the reward processes of this process."""
        if self.pool is not None:
            self.pool.close()


def completed(
    engine: Engine,
    prompts: Prompts,
    sampling: Sampling,
    pool: RewardPool | None,
    tokenizer: Any,
    *,
    seed: int,
    **between: Any,
) -> Rollouts:
    """One completion per prompt, in order; with a pool rewarded, each group while others are still written."""
    if pool is None:
        return engine.generate(prompts, sampling, seed=seed, **between)
    rows, groups = prompts.rows, prompts.groups
    assert rows is not None, "prompts for a pool come with their rows"
    assert groups is not None
    with pool.scoring(rows, groups) as scoring:

        def finished(done: Completion) -> None:
            text = tokenizer.decode(done.ids, skip_special_tokens=True)
            (completion,) = chat_completions([prompt_of(rows[done.number])], [text])
            scoring.add(done.number, completion, done.ids)

        return scoring.rewarded(engine.generate(prompts, sampling, seed=seed, finished=finished, **between))
