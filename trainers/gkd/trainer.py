"""GKD: a student learns to predict as its teacher does, on completions of its own, of the teacher's or of a dataset.

    driver                rollout workers     teacher workers      train workers
    ------                ---------------     ---------------      -------------
    prompts ────────────► generate
    responses ◄────────── slice, flatten      (generate, seq_kd)
    samples ────────────────────────────────► ask ───────────────► top K tokens, from worker to workers
    samples ─────────────────────────────────────────────────────► update        one optimizer step
    metrics ◄───────────────────────────────────────────────────── slice, merge
                          receive_weights ◄─────────────────────── send_weights

The teacher is asked ahead of the step with ``gkd_logits_topk``. Without, it is in the train workers, which compare the
whole vocabulary, a chunk of tokens at a time. On-policy distillation, arXiv 2306.13649; the divergences are
``losses/distillation.py``. The loss is the mean over the response tokens of the optimizer step, over all workers.

Names, defaults and metrics are TRL's (GKDTrainer, DistillationTrainer). Departures from its GKDTrainer: ``temperature``
divides the logits in the loss too, as in its DistillationTrainer; and one draw decides for a whole optimizer step, the
same on all workers, whose completions are learned from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rayhelper import Channel, ConfigError, DeviceGroups, RayHelper
from trainers.backends.base import Backend
from trainers.batch import Prompts, Ragged, Rollouts, TopLogps
from trainers.configuration.mistakes import mistakes_of
from trainers.configuration.shared import SEQUENCES_PER_STEP, sequences_per_step, total_steps
from trainers.data.rows import Batches, prompt_of, tokenize_prompts
from trainers.gkd.config import GKDConfig
from trainers.gkd.divergences import TopDivergence, WholeDivergence, measure_divergence
from trainers.gkd.samples import (
    DistillationSamples,
    has_response,
    has_teacher_prompt,
    samples_of,
    teacher_prompts_of,
    tokenize_responses,
)
from trainers.gkd.teacher import VllmTeacher, check_vllm_teacher, shares_devices
from trainers.gkd.vocabularies import common_vocab_size
from trainers.losses.distillation import distillation_loss
from trainers.losses.tokens import sft_loss
from trainers.metrics import Metrics
from trainers.parts.checks import check_before_start, check_completions, check_prompts_fit, check_staleness
from trainers.parts.completion_metrics import rollout_metrics
from trainers.parts.engine import build_engine, sampling_of, seed_of
from trainers.parts.engine_updates import EngineUpdates
from trainers.parts.inputs import load_model_and_tokenizer, load_tokenizer, read_rows
from trainers.parts.models import build_backend, num_shards, resolved_models
from trainers.parts.weights import Route, built, copy, first_of, make_room, receive, rest, send, trained
from trainers.plugins import MODELS
from trainers.rollout.base import Engine, Sampling
from trainers.rollout.hf import check_stop_tokens
from trainers.run.run import Run, saved_order

Source = Literal["student", "teacher", "dataset"]
TokenIds = list[list[int]]


@dataclass
class Started:
    """Completions of a step that are under way."""

    rows: Any
    prompts: TokenIds
    teacher_prompts: TokenIds | None  # None: the teacher sees what the student sees
    begin: Callable[[], Any]  # begins them once more
    rollouts: Any  # a future of Rollouts
    num_learned: int  # steps that the student had learned when they began


@RayHelper.worker(group=["train", "rollout", "teacher"])
class GKDTrainer:
    """``GKDTrainer(config).train()``; roles ``train``, ``rollout`` and ``teacher``, together or on their own devices.

    The teacher shares the train workers unless ``gkd_logits_topk`` is set, and where no device group names it.
    """

    def __init__(self, config: GKDConfig) -> None:
        self.config = config
        self.backend: Backend | None = None
        self.teacher: Backend | VllmTeacher | None = None
        self.engine: Engine | None = None
        self.ahead: dict[int, Started] = {}  # of steps to come
        self.prepare()

    @staticmethod
    def check(config: GKDConfig, groups: DeviceGroups | None) -> None:
        """Raises ConfigError for what is wrong beyond the values of single keys. Called before anything starts."""
        check_before_start(config, groups)
        check_completions(config, groups)
        check_staleness(config.max_staleness, groups)
        check_placement(config, groups)
        check_vllm_teacher(config, groups)
        if config.teacher_model is not None and not {config.model, config.teacher_model} & set(MODELS):
            common_vocab_size(config, config.model, config.teacher_model, load_tokenizer(config, config.model))

    # The driver's part

    @RayHelper.function(group="driver")
    def prepare(self) -> None:
        """Reads the data, tokenizes its responses, and compares the vocabularies."""
        config = self.config
        self.model_path, self.tokenizer = load_model_and_tokenizer(config)
        check_stop_tokens(config.stop_token_ids, self.tokenizer)
        self.teacher_path: str | None = None
        if config.teacher_model is not None:
            found = resolved_models(config, self.model_path, [config.teacher_model])
            self.teacher_path = found[config.teacher_model]
        self.vocab_size = common_vocab_size(config, self.model_path, self.teacher_path, self.tokenizer)
        self.rows: Any = read_rows(config, config.dataset, config.dataset_split)
        self.check_rows(self.rows)
        if config.uses_responses and not has_response(self.rows[0]):
            raise ConfigError(
                f"dataset: lmbda={config.lmbda} learns from the dataset's responses on some steps, and its rows have "
                "none (no 'completion', no 'messages' that end with the assistant's turn). Add them, or set lmbda: 1 "
                "or seq_kd."
            )
        self.samples = self.tokenize(self.rows) if config.uses_responses else None
        self.eval_rows: Any = None
        self.eval_samples: DistillationSamples | None = None
        if config.eval_dataset:
            self.eval_rows = read_rows(config, config.eval_dataset, config.eval_dataset_split)
            self.check_rows(self.eval_rows)
            self.eval_samples = self.tokenize(self.eval_rows) if has_response(self.eval_rows[0]) else None
        completed = {
            "dataset": self.rows if config.lmbda > 0 else None,
            "eval_dataset": self.eval_rows if self.eval_samples is None else None,
        }
        check_prompts_fit(config, completed, self.tokenizer, self.model_path)

    def check_rows(self, rows: Any) -> None:
        """Raises ConfigError for rows without a prompt, or without one of the teacher's own where it needs one."""
        with mistakes_of("dataset"):
            prompt_of(rows[0])
        if self.config.has_live_teacher and not all(has_teacher_prompt(row) for row in rows):
            raise ConfigError(
                "teacher_model is null, so that the student is its own teacher: it can learn only what another prompt "
                "tells it, and some rows have no 'teacher_prompt'. Add it, or set teacher_model, or tuner_type: lora "
                "(the teacher is then the student without its adapter)."
            )

    def tokenize(self, rows: Any) -> DistillationSamples:
        """The dataset's prompts and responses."""
        config = self.config
        with mistakes_of("dataset"):
            return tokenize_responses(
                rows, self.tokenizer, max_length=config.max_length, chat_template_kwargs=config.chat_template_kwargs
            )

    def train(self) -> dict[str, float]:
        """Trains to the end, from the start or from a checkpoint; the last metrics, evaluation included."""
        config = self.config
        batch_size = sequences_per_step(config, self.num_train_shards(), saved_order(config))
        batches = Batches(len(self.rows), batch_size, seed=config.seed, shuffle=config.shuffle_dataset)
        num_steps = total_steps(config, batches.steps_per_epoch)
        self.build(num_steps)
        headline = ("loss", "teacher_agreement", "completions/mean_length")
        order = {"num_rows": len(self.rows), SEQUENCES_PER_STEP: batch_size}
        with Run(config, num_steps, headline=headline, order=order) as run:
            run.resume(self.load)
            if self.completes:
                self.engines.follow(run)
            if config.val_before_train and run.step == 0:
                run.evaluate(self.evaluate)
            while run.step < num_steps:
                source = source_of(config, run.step)
                samples, metrics = self.explore(source, batches, num_steps, run)
                with run.phase("logps"):
                    answer = self.asked(samples)
                with run.phase("update"):
                    learned = self.learn(samples, answer, sft_alpha=config.sft_alpha if source == "dataset" else 0.0)
                if self.completes:
                    self.engines.learned()
                run.log_step(Metrics.merge([metrics, learned]), epoch=(run.step + 1) / batches.steps_per_epoch)
                if run.due(config.eval_steps):
                    run.evaluate(self.evaluate)
                if run.due(config.save_steps):
                    run.save_checkpoint(self.save, self.tokenizer)
            if self.eval_rows is not None:
                run.evaluate(self.evaluate)
            if self.completes:
                self.engines.close()
            return run.finish(self.export, self.tokenizer)

    def build(self, num_steps: int) -> None:
        """Builds the models that the run needs, each on the workers of its role."""
        if self.teacher_path is not None:  # first: building the student settles the random state, wherever this was
            self.build_teacher(self.teacher_path, self.model_path)
        self.build_train(self.model_path, num_steps, self.vocab_size)
        if self.teacher_path is None and self.config.gkd_logits_topk is not None:
            self.ask_as_trained()
        if self.completes:
            self.build_rollout(self.model_path)
            self.engines = EngineUpdates.of(self)

    @property
    def completes(self) -> bool:
        """Whether the student is asked for completions at all."""
        return self.config.lmbda > 0 or (self.eval_rows is not None and self.eval_samples is None)

    def explore(
        self, source: Source, batches: Batches, num_steps: int, run: Run
    ) -> tuple[DistillationSamples, Metrics]:
        """What a step learns from, and what was seen of it."""
        self.begin_ahead(batches, num_steps, run)
        if source == "dataset":
            assert self.samples is not None, "the dataset's responses were tokenized"
            with run.phase("data"):
                samples, metrics = self.samples[batches[run.step]], Metrics()
            metrics.sum("num_tokens", len(samples.input_ids.values))
        else:
            is_students = source == "student"
            started = (
                self.ahead.pop(run.step) if is_students else self.started(source, batches[run.step], run.step, run)
            )
            with run.phase("generate"):
                rollouts = self.finished(started, run.step) if is_students else started.rollouts.result()
            samples = samples_of(started.prompts, rollouts.completion_ids, started.teacher_prompts)
            metrics = rollout_metrics(rollouts)
            if is_students:
                self.engines.end_generation()
                if self.config.max_staleness:
                    metrics.mean("staleness", run.step - started.num_learned, 1)
            if self.config.log_completions and run.shows_completions(1):
                texts = self.tokenizer.batch_decode(list(rollouts.completion_ids), skip_special_tokens=True)
                run.log_completions({"prompt": [prompt_of(row) for row in started.rows], "completion": texts})
        metrics.mean("on_policy", float(source == "student"), 1)
        return samples, metrics

    def begin_ahead(self, batches: Batches, num_steps: int, run: Run) -> None:
        """Begins the student's completions of this step and the ``max_staleness`` next ones, which go on meanwhile.

        Weights wait for all that is under way: then nothing begins before it is needed.
        """
        if max(self.ahead, default=run.step) > run.step:
            return
        for step in range(run.step, min(run.step + self.config.max_staleness + 1, num_steps)):
            if step not in self.ahead and source_of(self.config, step) == "student":
                self.ahead[step] = self.started("student", batches[step], step, run)

    def prompts(self, rows: Any) -> tuple[TokenIds, TokenIds | None]:
        """Token ids of what the student completes, and of what the teacher sees in its place; None: the same."""
        settings: dict[str, Any] = {
            "max_prompt_length": self.config.max_prompt_length,
            "chat_template_kwargs": self.config.chat_template_kwargs,
        }
        own = tokenize_prompts(rows, self.tokenizer, **settings)
        return own, teacher_prompts_of(rows, self.tokenizer, **settings)

    def started(self, source: Source, places: np.ndarray, step: int, run: Run) -> Started:
        """Completions of the rows at ``places``, by the student as it is now, or by the teacher, are under way."""
        with run.phase("data"):
            rows = self.rows.select(places)
            prompts, teacher_prompts = self.prompts(rows)
        if source == "student":
            self.engines.update()
            begin = self.generating(prompts, step)
        else:
            shown = Prompts(Ragged.of(prompts if teacher_prompts is None else teacher_prompts, np.int64))
            begin = partial(self.generate_by_teacher.defer, shown, sampling_of(self.config), step)
        with run.phase("generate"):
            return Started(rows, prompts, teacher_prompts, begin, begin(), run.step)

    def generating(self, prompts: TokenIds, step: int) -> Callable[[], Any]:
        """Begins the student's completions of the prompts, and gives a future of ``Rollouts``."""
        return partial(self.generate.defer, Prompts(Ragged.of(prompts, np.int64)), sampling_of(self.config), step)

    def finished(self, started: Started, step: int) -> Rollouts:
        """The student's completions; of the student as it is now, if a worker has died meanwhile."""

        def again() -> Any:
            started.num_learned = step
            return started.begin()

        rollouts: Rollouts = self.engines.completed(started.rollouts, again)
        return rollouts

    def learn(self, samples: DistillationSamples, answer: Any, sft_alpha: float) -> Metrics:
        """One optimizer step; ``answer``: what ``asked`` gives."""
        return self.update(samples, answer, samples.num_targets, sft_alpha)

    def evaluate(self) -> dict[str, float]:
        """The mean divergence on the responses of the evaluation data, or else on the student's completions of it."""
        samples, metrics = self.eval_samples, Metrics()
        if samples is None:
            self.engines.update()
            prompts, teacher_prompts = self.prompts(self.eval_rows)
            begin = self.generating(prompts, step=-1)
            rollouts = self.engines.completed(begin(), begin)
            self.engines.end_generation()
            samples = samples_of(prompts, rollouts.completion_ids, teacher_prompts)
            metrics = rollout_metrics(rollouts)
            metrics.entries.pop("num_tokens")  # of training alone
        metrics = Metrics.merge([self.measure(samples, self.asked(samples), len(samples)), metrics])
        return {f"eval_{name}": value for name, value in metrics.values().items()}

    def asked(self, samples: DistillationSamples) -> Any:
        """The teacher's answer, a future of ``TopLogps``; None where it is asked in the train workers, in passing."""
        return None if self.config.gkd_logits_topk is None else self.ask.defer(samples)

    # Role rollout

    @RayHelper.function(group="rollout")
    def build_rollout(self, model: str) -> None:
        if self.engine is None:
            self.engine = build_engine(self.config, model, load_tokenizer(self.config, model), self.backend)

    @RayHelper.function(group="rollout", collect=first_of)
    def meet_engine(self) -> Route:
        return Route.between(built(self.engine), trains=self.backend is not None)

    @RayHelper.function(group="rollout", dispatch="slice", collect="flatten")
    def generate(self, prompts: Prompts, sampling: Sampling, step: int) -> Rollouts:
        return built(self.engine).generate(prompts, sampling, seed=seed_of(self.config.seed, step))

    @RayHelper.function(group="rollout")
    def copy_weights(self, version: int) -> None:
        if self.backend is not None:  # where it is trained as well
            copy(self.config, self.backend, built(self.engine), version)

    @RayHelper.function(group="rollout")
    def receive_weights(self, channel: Channel, unless: int | None = None) -> None:
        receive(built(self.engine), channel, unless)

    @RayHelper.function(group="rollout")
    def wake_engine(self) -> None:
        built(self.engine).wake("kv_cache")

    @RayHelper.function(group="rollout")
    def rest_engine(self) -> None:
        if self.engine is not None:
            rest(self.engine)

    # Role teacher

    @RayHelper.function(group="teacher")
    def build_teacher(self, model: str, student: str) -> None:
        config, tokenizer = self.config, load_tokenizer(self.config, student)
        if config.teacher_engine == "vllm":
            self.teacher = VllmTeacher(config, model, tokenizer, shares_devices=shares_devices())
            self.teacher_engine: Engine = self.teacher.engine
        else:
            kwargs = config.teacher_model_init_kwargs
            self.teacher = build_backend(config, model, num_training_steps=None, model_init_kwargs=kwargs)
            if config.seq_kd:
                self.teacher_engine = build_engine(config, model, tokenizer, self.teacher)
        if config.offload_teacher_model:
            self.teacher.offload()

    @RayHelper.function(group="teacher")
    def ask_as_trained(self) -> None:
        """A student that teaches itself gets, as a teacher, the slices that it gets where it is trained."""
        RayHelper.shard(self.shard.index, self.shard.count, leader=self.shard.leader)

    @RayHelper.function(group="teacher", dispatch="slice", collect="flatten")
    def ask(self, samples: DistillationSamples) -> TopLogps:
        """The teacher's likeliest tokens at every target."""
        config = self.config
        assert config.gkd_logits_topk is not None, "otherwise the teacher is asked in the train workers"
        with self.teacher_at_hand():
            ids, logps = self.asked_backend.top_logps(
                samples.as_teacher_sequences(),
                config.gkd_logits_topk,
                micro_batch_size=config.per_device_train_batch_size,
                temperature=config.temperature,
                adapter=config.has_live_teacher,
            )
        shape = (-1, config.gkd_logits_topk)  # also of no tokens
        return TopLogps(*(Ragged(column.values.reshape(shape), column.offsets) for column in (ids, logps)))

    @RayHelper.function(group="teacher", dispatch="slice", collect="flatten")
    def generate_by_teacher(self, prompts: Prompts, sampling: Sampling, step: int) -> Rollouts:
        with self.teacher_at_hand():
            return self.teacher_engine.generate(prompts, sampling, seed=seed_of(self.config.seed, step))

    @property
    def asked_backend(self) -> Backend | VllmTeacher:
        """The model that teaches: the teacher, or the student itself (``adapter`` says with or without its own)."""
        backend = self.teacher or self.backend
        assert backend is not None, "build comes first, and a student that teaches itself is where it is trained"
        return backend

    @contextlib.contextmanager
    def teacher_at_hand(self) -> Iterator[None]:
        """Inside, the teacher is on the device."""
        if self.teacher is None or not self.config.offload_teacher_model:
            yield
            return
        self.teacher.reload()
        try:
            yield
        finally:
            self.teacher.offload()

    # Role train

    @RayHelper.function(group="train", execute="first")
    def num_train_shards(self) -> int:
        return num_shards(self.config)

    @RayHelper.function(group="train")
    def build_train(self, model: str, num_steps: int, vocab_size: int) -> None:
        config = self.config
        self.backend = build_backend(config, model, num_training_steps=num_steps)
        self.shard = RayHelper.current().shard
        settings: dict[str, Any] = {"beta": config.beta, "temperature": config.temperature, "vocab_size": vocab_size}
        self.divergence: TopDivergence | WholeDivergence
        if config.gkd_logits_topk is not None:
            self.divergence = TopDivergence(add_tail=config.gkd_topk_add_tail, **settings)
        else:
            teacher = self.asked_backend
            assert not isinstance(teacher, VllmTeacher), "vLLM gives the likeliest tokens alone"
            self.divergence = WholeDivergence(teacher, adapter=config.has_live_teacher, **settings)

    @RayHelper.function(group="train", dispatch="slice", collect=Metrics.merge)
    def update(
        self, samples: DistillationSamples, answer: TopLogps | None, num_tokens: int, sft_alpha: float
    ) -> Metrics:
        """One optimizer step over all train workers; ``num_tokens`` are the response tokens of the whole step."""
        assert self.backend is not None, "build comes first"
        with self.teacher_at_hand() if answer is None else contextlib.nullcontext():
            return self.backend.step(
                samples.answered(answer),
                partial(gkd_loss, num_tokens, sft_alpha),
                micro_batch_size=self.config.per_device_train_batch_size,
                token_function=self.divergence,
            )

    @RayHelper.function(group="train", dispatch="slice", collect=Metrics.merge)
    def measure(self, samples: DistillationSamples, answer: TopLogps | None, num_rows: int) -> Metrics:
        """Divergence without learning; ``num_rows`` are the samples over all train workers."""
        assert self.backend is not None, "build comes first"
        size = self.config.per_device_eval_batch_size
        most = -(-num_rows // RayHelper.current().shard.count)  # of any worker
        with self.teacher_at_hand() if answer is None else contextlib.nullcontext():
            return measure_divergence(
                self.backend,
                self.divergence,
                samples.answered(answer),
                micro_batch_size=size,
                num_micro=-(-most // size),
            )

    @RayHelper.function(group="train")
    def send_weights(self, channel: Channel, version: int) -> None:
        assert self.backend is not None, "build comes first"
        send(self.config, self.backend, channel, version)

    @RayHelper.function(group="train")
    def make_room(self, part: Literal["weights", "kv_cache"]) -> None:
        make_room(self.config, trained(self.backend), part)

    @RayHelper.function(group="train")
    def reload_policy(self) -> None:
        trained(self.backend).reload()

    @RayHelper.function(group="train")
    def save(self, folder: Path) -> None:
        assert self.backend is not None, "build comes first"
        self.backend.save(folder)

    @RayHelper.function(group="train")
    def export(self, folder: Path) -> None:
        assert self.backend is not None, "build comes first"
        self.backend.export(folder)

    @RayHelper.function(group="train")
    def load(self, folder: Path) -> None:
        assert self.backend is not None, "build comes first"
        self.backend.load(folder)


def gkd_loss(
    num_tokens: int,
    sft_alpha: float,
    logps_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    micro: DistillationSamples,
    metrics: Metrics,
    divergence_BT: torch.Tensor,
    teacher_agreement_BT: torch.Tensor,
    tempered_entropy_BT: torch.Tensor,
) -> torch.Tensor:
    """The loss of one micro-batch, divided by the response tokens of the whole optimizer step."""
    num_targets = mask_BT.sum()
    metrics.mean("entropy", tempered_entropy_BT.sum(), num_targets)
    metrics.mean("teacher_agreement", teacher_agreement_BT.sum(), num_targets)
    loss = distillation_loss(divergence_BT, mask_BT, normaliser=num_tokens)
    if sft_alpha:
        cross_entropy = sft_loss(logps_BT, mask_BT, normaliser=num_tokens)
        metrics.sum("divergence", loss)
        metrics.sum("sft_loss", cross_entropy)
        loss = loss + sft_alpha * cross_entropy
    return loss


def source_of(config: GKDConfig, step: int) -> Source:
    """Whose completions a step learns from: a pure function of seed and step."""
    if np.random.default_rng([config.seed, step]).random() < config.lmbda:
        return "student"
    return "teacher" if config.seq_kd else "dataset"


def check_placement(config: GKDConfig, groups: DeviceGroups | None) -> None:
    """Raises ConfigError for a teacher with devices of its own that must share those of the student."""
    if groups is None or groups.group_of("teacher") == groups.group_of("train"):
        return
    name = groups.group_of("teacher").name
    if config.teacher_model is None:
        raise ConfigError(
            f"teacher_model is null, so that the student is its own teacher, but role teacher has a group of its own "
            f"({name!r}). Add teacher to the workers of the group that hosts train."
        )
    if config.gkd_logits_topk is None:
        raise ConfigError(
            f"the teacher has a group of its own ({name!r}), from which the whole vocabulary of every token would "
            "have to travel. Set gkd_logits_topk (64, say), or add teacher to the workers of the group with train."
        )
    if config.offload_teacher_model and not groups.share_devices("teacher", "train"):
        raise ConfigError(
            f"offload_teacher_model makes room for a student on the same devices, but the teacher has a group of its "
            f"own ({name!r}). Remove it."
        )
