"""GKD: a student learns to predict as its teacher does, on completions of its own, of the teacher's or of a dataset.

    driver                generator           teacher              policy: the student
    ------                ---------           -------              -------------------
    prompts ────────────► generate
    responses ◄────────── slice, flatten      (complete, seq_kd)
    samples ────────────────────────────────► top_logps ─────────► top-k tokens, from worker to workers
    samples ─────────────────────────────────────────────────────► learn         one optimizer step
    metrics ◄───────────────────────────────────────────────────── slice, merge
                          receive ◄─────────────────────────────── send

Everything but the driver is a part of the trainer (``student.py``, ``teacher.py``, ``trainers/parts/``), on the workers
of its role.

The teacher is asked ahead of the step with ``gkd_logits_topk``. Without, it is in the train workers, which compare the
whole vocabulary, a chunk of tokens at a time. On-policy distillation, arXiv 2306.13649; the divergences are
``losses/distillation.py``. The loss is the mean over the response tokens of the optimizer step, over all workers.

Names, defaults and metrics are TRL's (GKDTrainer, DistillationTrainer). Departures from its GKDTrainer: ``temperature``
divides the logits in the loss too, as in its DistillationTrainer. One random number per optimizer step chooses the
source of the completions, for all workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rayhelper import ConfigError, DeviceGroups, RayHelper
from trainers.batch import Prompts, Ragged, Rollouts, Tasks
from trainers.configuration.mistakes import mistakes_of
from trainers.configuration.shared import SEQUENCES_PER_STEP, order_of_steps, sequences_per_step, total_steps
from trainers.configuration.values import is_there
from trainers.data.batches import Batches, DrawnRows
from trainers.data.broken_rows import response_mistake, without_broken
from trainers.data.images.conversations import TYPES
from trainers.data.images.pictures import Pictures
from trainers.data.images.processor import is_vision
from trainers.data.rows import prompt_of, tokenize_prompts
from trainers.gkd.config import GKDConfig
from trainers.gkd.loss import StepNumbers
from trainers.gkd.samples import (
    DistillationSamples,
    has_response,
    has_teacher_prompt,
    samples_of,
    teacher_prompts_of,
    tokenize_responses,
)
from trainers.gkd.student import Student
from trainers.gkd.teacher import GKDTeacher, check_vllm_teacher
from trainers.gkd.vocabularies import common_vocab_size
from trainers.metrics import Metrics
from trainers.parts.checks import check_before_start, check_completions, check_prompts_fit, check_staleness
from trainers.parts.completion_metrics import rollout_metrics
from trainers.parts.engine import numbered
from trainers.parts.generator import Generator, Pending
from trainers.parts.inputs import (
    check_same_pixels,
    image_reader,
    load_model_and_tokenizer,
    read_prompts,
    without_long,
)
from trainers.parts.model_checks import check_arguments, configuration_of
from trainers.parts.models import resolved_models
from trainers.parts.tokenizer import load_tokenizer
from trainers.plugins import MODELS, load_plugins
from trainers.rollout.environments import Environment
from trainers.rollout.hf.settings import check_stop_tokens
from trainers.rollout.schedulers import environment_named
from trainers.run.run import Run, saved_order

logger = logging.getLogger(__name__)

HEADLINE = ("loss", "teacher_agreement", "completions/mean_length")
Source = Literal["student", "teacher", "dataset"]
TokenIds = list[list[int]]


@dataclass
class Started:
    """Completions of a step that have begun."""

    rows: Any
    prompts: TokenIds
    teacher_prompts: TokenIds | None  # None: the teacher sees what the student sees
    pending: Pending
    images: list[Pictures] | None  # of the prompts


@RayHelper.worker(group=["train", "rollout", "teacher"])
class GKDTrainer:
    """``GKDTrainer(config).train()``; roles ``train``, ``rollout`` and ``teacher``, together or on their own devices.

    The teacher shares the train workers unless ``gkd_logits_topk`` is set, and where no device group names it.
    """

    def __init__(self, config: GKDConfig) -> None:
        self.config = config
        self.teacher = GKDTeacher(config)
        self.policy = Student(config, self.teacher)
        self.generator = Generator(
            config,
            self.policy,
            environment=partial(environment_of, config) if config.has_environment else None,
            turn_limit=config.max_turns,
            limits_each_turn=config.completion_length_limit_scope == "per_round",
        )
        self.prepare()

    @staticmethod
    def check(config: GKDConfig, groups: DeviceGroups | None) -> None:
        """Raises ConfigError for what is wrong beyond the values of single keys. Called before anything starts."""
        check_before_start(config, groups)
        check_completions(config, groups)
        if config.has_environment:
            environment_of(config)
        check_staleness(config.max_staleness, groups)
        check_placement(config, groups)
        check_vllm_teacher(config, groups)
        if config.teacher_model is not None and is_there(config.teacher_model, Path.is_dir):
            kwargs = config.teacher_model_init_kwargs
            check_arguments("teacher_model_init_kwargs", kwargs, config.teacher_model, config.trust_remote_code)
        is_own = bool(config.new_special_tokens) and config.teacher_model == config.model  # which gets the tokens too
        if config.teacher_model is not None and not is_own and not {config.model, config.teacher_model} & set(MODELS):
            common_vocab_size(config, config.model, config.teacher_model, load_tokenizer(config, config.model))

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
        self.images = image_reader(config, self.model_path, self.tokenizer)
        if self.images is not None and not teacher_sees(config, self.model_path, self.teacher_path):
            self.images = None
        self.vocab_size = common_vocab_size(config, self.model_path, self.teacher_path, self.tokenizer)
        self.rows: Any = self.read(*config.training_data)
        self.check_rows(self.rows)
        if config.uses_responses and not has_response(self.rows[0]):
            raise ConfigError(
                f"dataset: lmbda={config.lmbda} learns from the dataset's responses on some steps, but its rows "
                "have none. They need 'completion', or 'messages' that end with the assistant. Add them, or set "
                "lmbda: 1 "
                "or seq_kd."
            )
        self.samples = self.tokenize(self.rows) if config.uses_responses else None
        self.eval_rows: Any = None
        self.eval_samples: DistillationSamples | None = None
        if config.evaluates:
            self.eval_rows = self.read(*config.evaluation_data)
            self.check_rows(self.eval_rows)
            self.eval_samples = self.tokenize(self.eval_rows) if has_response(self.eval_rows[0]) else None
        completed = {
            "dataset": self.rows if config.lmbda > 0 else None,
            "eval_dataset": self.eval_rows if self.eval_samples is None else None,
        }
        if not config.has_environment:  # whose prompts are what it makes of the rows
            check_prompts_fit(config, completed, self.tokenizer, self.model_path, self.images)
        self.ahead: dict[int, Started] = {}  # the student's completions of this step and of steps to come

    def read(self, source: Any, split: str) -> Any:
        """The rows of a dataset, each with a prompt; without long ones where ``drop_long_prompts`` says so."""
        rows = read_prompts(self.config, source, split, self.images, self.tokenizer)
        if self.config.uses_responses and has_response(rows[0]):
            with mistakes_of("dataset"):
                columns = ("prompt", "completion", "messages")
                mistake = partial(response_mistake, seen=() if self.images is None else tuple(TYPES))
                rows = without_broken(rows, mistake, *columns, skip=self.config.skip_broken_rows)
        return without_long(self.config, rows, self.tokenizer, self.images)

    def check_rows(self, rows: Any) -> None:
        """Raises ConfigError for rows without a prompt of the teacher's own where it needs one."""
        if self.config.has_live_teacher and not all(has_teacher_prompt(row) for row in rows):
            raise ConfigError(
                "teacher_model is null, so the student is its own teacher. Then every row needs a "
                "'teacher_prompt', and some rows have none. Add it, or set teacher_model, or tuner_type: lora "
                "(the teacher is then the student without its adapter)."
            )

    def tokenize(self, rows: Any) -> DistillationSamples:
        """The dataset's prompts and responses."""
        config = self.config
        with mistakes_of("dataset"):
            return tokenize_responses(
                rows,
                self.tokenizer,
                max_length=config.max_length,
                chat_template_kwargs=config.chat_template_kwargs,
                images=self.images,
            )

    def train(self) -> dict[str, float]:
        """Trains to the end, from the start or from a checkpoint; the last metrics, evaluation included."""
        config = self.config
        batch_size = sequences_per_step(config, self.policy.num_shards(), saved_order(config))
        batches = Batches(len(self.rows), batch_size, **order_of_steps(config))
        num_steps = total_steps(config, batches.steps_per_epoch)
        self.build(num_steps)
        order = {"num_rows": len(self.rows), SEQUENCES_PER_STEP: batch_size}
        with (
            Run(config, num_steps, headline=HEADLINE, order=order, rows=self.rows) as run,
            self.generator.following(run),
        ):
            for step in run.rounds(self):
                source = source_of(config, step)
                samples, metrics = self.explore(source, batches, run)
                with run.phase("logps"):
                    answer = self.asked(samples)
                with run.phase("update"):
                    learned = self.learn(samples, answer, sft_alpha=config.sft_alpha if source == "dataset" else 0.0)
                self.generator.learned()
                run.log_step(Metrics.merge([metrics, learned]), epoch=(run.step + 1) / batches.steps_per_epoch)
            return run.finish(self.policy.export, self.tokenizer)

    def build(self, num_steps: int) -> None:
        """Builds the models that the run needs, each on the workers of its role."""
        if self.teacher_path is not None:  # first: building the student settles the random state, wherever this was
            self.teacher.build(self.teacher_path, tokenizer=self.model_path)
        self.policy.build(self.model_path, num_steps, vocab_size=self.vocab_size)
        if self.teacher_path is None:
            self.teacher.build(self.model_path, student=self.policy)
        if self.completes:
            self.generator.build(self.model_path)

    @property
    def completes(self) -> bool:
        """Whether the student is asked for completions at all."""
        return self.config.lmbda > 0 or (self.eval_rows is not None and self.eval_samples is None)

    def explore(self, source: Source, batches: Batches, run: Run) -> tuple[DistillationSamples, Metrics]:
        """The samples of a step, and what was seen of them."""
        self.begin_ahead(batches, run)
        if source == "dataset":
            assert self.samples is not None, "the dataset's responses were tokenized"
            with run.phase("data"):
                samples, metrics = self.samples[batches[run.step]], Metrics()
            metrics.sum("num_tokens", len(samples.input_ids.values))
        else:
            samples, metrics = self.completed(source, batches, run)
        metrics.mean("on_policy", float(source == "student"), 1)
        return samples, metrics

    def completed(self, source: Source, batches: Batches, run: Run) -> tuple[DistillationSamples, Metrics]:
        """Completions of the student or the teacher as samples, and what was seen of them."""
        config = self.config
        if source == "student":
            started = self.ahead.pop(run.step)
            rollouts = self.generator.finished(started.pending)
        else:
            started = self.started(source, batches[run.step], run.step, run)
            with run.phase("generate"):
                rollouts = started.pending.rollouts.result()
        samples = completed_samples(started.prompts, rollouts, started.teacher_prompts, started.images)
        metrics = rollout_metrics(rollouts)
        if source == "student":
            self.generator.rest()
            if config.max_staleness:
                metrics.mean("staleness", run.step - started.pending.version, 1)
        if config.log_completions and run.shows_completions(1):
            texts = self.tokenizer.batch_decode(list(rollouts.completion_ids), skip_special_tokens=True)
            run.log_completions({"prompt": list(map(prompt_of, started.rows)), "completion": texts})
        return samples, metrics

    def begin_ahead(self, batches: Batches, run: Run) -> None:
        """Begins the student's completions of this step and the ``max_staleness`` next ones, which go on meanwhile.

        Weights wait for all completions that were begun: then nothing begins before it is needed.
        """
        if max(self.ahead, default=run.step) > run.step:
            return
        for step in range(run.step, min(run.step + self.config.max_staleness + 1, run.num_steps)):
            if step not in self.ahead and source_of(self.config, step) == "student":
                self.ahead[step] = self.started("student", batches[step], step, run)

    def prompts(self, rows: Any) -> tuple[TokenIds, TokenIds | None]:
        """Token ids of what the student completes, and of what the teacher sees in its place; None: the same."""
        settings: dict[str, Any] = {
            "max_prompt_length": self.config.max_prompt_length,
            "chat_template_kwargs": self.config.chat_template_kwargs,
            "images": self.images,
        }
        own = tokenize_prompts(rows, self.tokenizer, **settings)
        return own, teacher_prompts_of(rows, self.tokenizer, **settings)

    def started(self, source: Source, places: np.ndarray, step: int, run: Run) -> Started:
        """Completions of the rows at ``places`` are begun, by the student as it is now, or by the teacher."""
        with run.phase("data"):
            rows = DrawnRows(self.rows, places)
            prompts, teacher_prompts = self.prompts(rows)
            images = self.pictures(rows)
        if source == "student":
            pending = self.generator.begin(self.starts(rows, prompts, images), step)
        else:
            begin = partial(self.teacher.complete.defer, as_prompts(teacher_prompts or prompts, images), step)
            with run.phase("generate"):
                pending = Pending(begin, begin(), run.step)
        return Started(rows, prompts, teacher_prompts, pending, images)

    def pictures(self, rows: Any) -> list[Pictures] | None:
        """The pictures of each prompt, if the models see any."""
        return None if self.images is None else [self.images.prompt(row)[1] for row in rows]

    def starts(self, rows: Any, prompts: TokenIds, images: list[Pictures] | None) -> Prompts | Tasks:
        """What the student completes: the prompts, or the rows where an environment plays them."""
        if self.config.has_environment:
            return numbered(Tasks(list(rows), np.arange(len(rows))))
        return as_prompts(prompts, images)

    def learn(self, samples: DistillationSamples, answer: Any, sft_alpha: float) -> Metrics:
        """One optimizer step; ``answer``: what ``asked`` gives."""
        return self.policy.learn(samples, answer, StepNumbers(samples.num_targets, sft_alpha))

    def evaluate(self) -> dict[str, float]:
        """The mean divergence on the responses of the evaluation data, or else on the student's completions of it."""
        samples, metrics = self.eval_samples, Metrics()
        if samples is None:
            prompts, teacher_prompts = self.prompts(self.eval_rows)
            images = self.pictures(self.eval_rows)
            rollouts = self.generator.complete(self.starts(self.eval_rows, prompts, images), -1)
            samples = completed_samples(prompts, rollouts, teacher_prompts, images)
            metrics = rollout_metrics(rollouts).without("num_tokens")  # which is of training alone
        compared = self.policy.compare(samples, self.asked(samples), len(samples))
        return Metrics.merge([compared, metrics]).values("eval_")

    def asked(self, samples: DistillationSamples) -> Any:
        """The teacher's answer, a future of ``TopLogps``; None where it is asked in the train workers, in passing."""
        top_k, adapter = self.config.gkd_logits_topk, self.config.has_live_teacher
        return None if top_k is None else self.teacher.top_logps.defer(samples.as_teacher_sequences(), top_k, adapter)

    def save(self, folder: Path) -> None:
        """The student as it trains."""
        self.policy.save(folder)

    def load(self, folder: Path) -> None:
        """Restores what ``save`` wrote."""
        self.policy.load(folder)


def as_prompts(prompts: TokenIds, images: list[Pictures] | None) -> Prompts:
    return numbered(Prompts(Ragged.of(prompts, np.int64), images=images))


def completed_samples(
    prompts: TokenIds, rollouts: Rollouts, teacher_prompts: TokenIds | None, images: list[Pictures] | None
) -> DistillationSamples:
    """The samples of completions; of an environment's episodes the prompts are its own."""
    own = prompts if rollouts.is_sampled is None else rollouts.prompt_ids
    return samples_of(own, rollouts.completion_ids, teacher_prompts, rollouts.is_sampled, images)


def teacher_sees(config: GKDConfig, student: str, teacher: str | None) -> bool:
    """Whether the teacher of a student that sees pictures sees them too.

    Raises:
        ConfigError: it makes other pixels or tokens of them than the student.
    """
    if config.teacher_model is not None and teacher is None:
        return False
    if teacher is None or teacher == student:
        return True
    if not is_vision(configuration_of(teacher, config.trust_remote_code)):
        return False
    processing = config.image_processor_kwargs
    check_same_pixels("teacher_model", student, teacher, config.trust_remote_code, processing)
    return True


def environment_of(config: GKDConfig, tokenizer: Any = None) -> Callable[[], Environment]:
    """What makes the environment of an episode. Raises ConfigError for one that cannot be made."""
    load_plugins(config.external_plugins)
    with mistakes_of("environment"):
        return environment_named(config.environment, max_turns=config.max_turns, tokenizer=tokenizer)


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
            f"teacher_model is null, so the student is its own teacher. But role teacher has its own group ({name!r}). "
            "Add teacher to the workers of the group that hosts train."
        )
    if config.gkd_logits_topk is None:
        raise ConfigError(
            f"the teacher has its own group ({name!r}), which would have to send the whole vocabulary for every token. "
            "Set gkd_logits_topk (such as 64), or add teacher to the workers of the group with train."
        )
    if config.offload_teacher_model and not groups.share_devices("teacher", "train"):
        raise ConfigError(
            "offload_teacher_model frees memory for a student on the same devices, but the teacher has its own group "
            f"({name!r}). Remove it."
        )
