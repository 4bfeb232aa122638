"""Sampling and distillation: N candidates a row, process and outcome rewards, the best and the worst of them kept.

    driver              sampler                process scorer       outcome scorer
    ------              -------                --------------       --------------
    rows ─────────────► sample
                        candidates ──────────► score
                                   ──────────────────────────────► score
    candidates, rewards ◄──────────────────────────────────────── slice, flatten
    judged ─► ledger ─► output

Everything but the driver is a part of the trainer, on the workers of its role (sampler, prm, orm). A part gets whole
rows, and a row is judged by all its candidates on the driver: nothing depends on the number of workers. While a batch
is scored the next one is sampled. Names are ms-swift's; departures from it stand where they are made. Nothing is
trained: ``train`` is what the command line calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rayhelper import ConfigError, DeviceGroups, RayHelper
from rayhelper.roles.futures import Future
from trainers.configuration.mistakes import mistakes_of
from trainers.configuration.reading.secrets import masked
from trainers.configuration.reading.text import save_config
from trainers.configuration.values import is_there
from trainers.data.images.processor import ImageReader
from trainers.data.rows import prompt_of
from trainers.parts.inputs import REWARD_MODEL, image_reader, read_rows
from trainers.parts.model_checks import check_arguments, check_lengths
from trainers.parts.tokenizer import load_tokenizer
from trainers.plugins import MODELS, load_plugins, resolve_model
from trainers.report.command import write_of
from trainers.rewards.functions import check_columns
from trainers.rewards.models import check_reward_model, names_reward_model
from trainers.rollout.hf.settings import check_generation_kwargs
from trainers.run import origin
from trainers.run.header import trainer_name
from trainers.run.trackers import Trackers, check_known
from trainers.sampling.candidates import Candidates, Questions, completion_of, judged
from trainers.sampling.config import LOCAL, SamplingConfig
from trainers.sampling.samplers import Sampler, check_vllm
from trainers.sampling.scorers import CandidateScorer, OutcomeScorer, ProcessScorer, Rewards, scoring_function
from trainers.sampling.store import Entry, Ledger, cached_answers, check_writable, row_id, write_output

MOST_IN_FLIGHT = 3  # batches: one being scored, one being sampled, one waiting for the sampler
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InFlight:
    """A batch of rows that is being sampled and scored."""

    positions: np.ndarray
    candidates: Future[Candidates]
    rewards: dict[str, Future[Rewards]]  # prm, orm, as far as there are

    def done(self) -> bool:
        return self.candidates.done() and all(future.done() for future in self.rewards.values())


@RayHelper.worker(group=["sampler", "prm", "orm"])
class SamplingTrainer:
    """``SamplingTrainer(config).train()``; roles ``sampler``, ``prm``, ``orm`` on one device group or several.

    Scorers share the samplers' workers where no device group names them.
    """

    def __init__(self, config: SamplingConfig) -> None:
        self.config = config
        self.sampler = Sampler(config)
        self.prm, self.orm = ProcessScorer(config), OutcomeScorer(config)
        self.files = contextlib.ExitStack()  # process 0 has some
        self.prepare()

    @staticmethod
    def check(config: SamplingConfig, groups: DeviceGroups | None) -> None:
        """Raises ConfigError for what is wrong beyond the values of single keys. Called before anything starts."""
        with mistakes_of("external_plugins"):
            load_plugins(config.external_plugins)
        check_known(config.report_to)
        for key, spec in (("prm_model", config.prm_model), ("orm_model", config.orm_model)):
            with mistakes_of(key):
                if names_reward_model(spec):
                    check_reward_model(spec, config.trust_remote_code)
                elif spec is not None:
                    scoring_function(spec, takes_steps=key == "prm_model")
        if config.engine == "hf":
            keys = [one.name for one in dataclasses.fields(config)]
            check_generation_kwargs(config.engine_kwargs, key="engine_kwargs", beside=keys)
            if is_there(config.model, Path.is_dir):
                check_arguments("model_init_kwargs", config.model_init_kwargs, config.model, config.trust_remote_code)
                check_lengths(config)
        elif config.engine == "vllm":
            check_vllm(config, groups)
        if not config.resume and not config.override_exist_file:
            for path in (config.output_path, config.ledger_path):
                if path.exists():
                    raise ConfigError(
                        f"output_file: {path} already exists. Set resume: true to continue it, "
                        "override_exist_file: true to start over, or another output_file."
                    )
        num_workers = 1 if groups is None else groups.group_of("sampler").num_workers
        if num_workers > config.rows_a_batch:
            logger.warning(
                "%d of %d sampler workers will be idle: num_sampling_batch_size is %d",
                num_workers - config.rows_a_batch,
                num_workers,
                config.rows_a_batch,
            )

    # The driver's part

    @RayHelper.function(group="driver")
    def prepare(self) -> None:
        """Reads the rows, says which are to be answered and in which order, and what earlier runs answered."""
        config = self.config
        with mistakes_of("external_plugins"):
            load_plugins(config.external_plugins)
        self.rows: Any = read_rows(config, config.dataset, config.dataset_split, seen_rows(config))
        with mistakes_of("dataset"):
            prompt_of(self.rows[0])
        for key in ("prm_model", "orm_model"):
            spec = getattr(config, key)
            if spec is not None and not names_reward_model(spec):
                with mistakes_of(key):
                    check_columns([scoring_function(spec, takes_steps=False)], self.rows.column_names)
        check_writable(config.output_path, self.rows[0])
        self.ids = [row_id(row) for row in self.rows]
        self.order = positions_of(config, len(self.rows))
        self.cached = cached_by_position(config, self.ids)

    def train(self) -> dict[str, float]:
        """Answers every row; how many rows became what."""
        models = self.resolve_models()
        self.sampler.build(models["sampler"], self.config.api_key or os.environ.get("OPENAI_API_KEY"))
        for role, scorer in self.scorers().items():
            scorer.build(models[role])
        with self.files:
            waiting: deque[InFlight] = deque()
            for positions in self.open_files():
                waiting.append(self.begin(positions))
                while len(waiting) >= MOST_IN_FLIGHT or (waiting and waiting[0].done()):
                    self.end(waiting.popleft())
            for batch in waiting:
                self.end(batch)
            self.sampler.close()
            return self.finish()

    def scorers(self) -> dict[str, CandidateScorer]:
        """Those that the configuration names, by their roles."""
        named = {"prm": (self.config.prm_model, self.prm), "orm": (self.config.orm_model, self.orm)}
        return {role: scorer for role, (spec, scorer) in named.items() if spec is not None}

    def begin(self, positions: np.ndarray) -> InFlight:
        """Has a batch of rows sampled and scored; the candidates go from worker to worker."""
        rows = [self.rows[int(position)] for position in positions]
        cached = [self.cached.get(int(position)) for position in positions]
        for k, (row, contents) in enumerate(zip(rows, cached, strict=True)):
            if contents is not None:
                cached[k] = [completion_of(prompt_of(row), content) for content in contents]
        candidates: Any = self.sampler.sample.defer(Questions(positions, rows, cached))
        rewards = {role: scorer.score.defer(candidates) for role, scorer in self.scorers().items()}
        return InFlight(positions, candidates, rewards)

    def end(self, batch: InFlight) -> None:
        """Judges a batch, and writes down what became of its rows."""
        candidates = batch.candidates.result()
        rewards = {role: future.result() for role, future in batch.rewards.items()}
        entries = []
        for k, position in enumerate(batch.positions.tolist()):
            of_row = {role: values[k] for role, values in rewards.items()}
            entries.append(self.entry(position, candidates, k, of_row))
        self.record(entries)

    def entry(self, position: int, candidates: Candidates, k: int, rewards: dict[str, list[float]]) -> Entry:
        """What the ledger says of the ``k``-th row of a batch."""
        config = self.config
        texts, failures = candidates.texts[k], candidates.failures[k]
        verdict = judged(
            len(texts),
            failures,
            rewards.get("prm"),
            rewards.get("orm"),
            n_best_to_keep=config.n_best_to_keep,
            prm_threshold=config.prm_threshold,
            easy_query_threshold=config.easy_query_threshold,
        )
        answers = []
        for n in verdict.positives:
            numbers = {} if verdict.scores is None else {"score": verdict.scores[n]}
            numbers |= {f"{role}_score": values[n] for role, values in rewards.items()}
            answers.append({"text": texts[n], **numbers})
        entry: Entry = {
            "row": position,
            "id": self.ids[position],
            "state": verdict.state,
            "num_candidates": len(texts) + len(failures),
            "num_failed": len(failures),
            "num_correct": verdict.num_correct,
            "num_samples": len(answers),
            "num_tokens": int(candidates.num_tokens[k]),
            "answers": answers,
        }
        if verdict.rejected is not None:
            entry["rejected"] = texts[verdict.rejected]
        if verdict.reason is not None:
            entry["reason"] = verdict.reason
        if failures:
            entry["failures"] = dict(Counter(failures))
        return entry

    # The driver's files: process 0 alone has them

    @RayHelper.function(group="driver", execute="first")
    def resolve_models(self) -> dict[str, Any]:
        """What each role loads; models of plugins are built."""
        config = self.config
        specs = {"sampler": config.model, "prm": config.prm_model, "orm": config.orm_model}
        return {
            role: resolve_model(spec, output_dir=config.log_dir, seed=config.seed)
            if isinstance(spec, str) and (role == "sampler" or names_reward_model(spec))
            else spec
            for role, spec in specs.items()
            if spec is not None
        }

    @RayHelper.function(group="driver", execute="first")
    def open_files(self) -> list[np.ndarray]:
        """Opens ledger and logs; the batches that are left to do, as positions of rows."""
        config = self.config
        anew = config.override_exist_file
        self.ledger = self.files.enter_context(Ledger(config.ledger_path, config.deciding(), self.ids, anew=anew))
        if anew:
            config.output_path.unlink(missing_ok=True)
        again = ("failed",) if config.retry_failed else ()
        done = {row for row, state in self.ledger.states.items() if state not in again}
        batches = list(batches_of(self.order, config))
        left = [part for part in ([p for p in batch.tolist() if p not in done] for batch in batches) if part]
        shown = dataclasses.replace(config, api_key=None)
        save_config(shown, config.log_dir)
        done_before = len(batches) - len(left)
        name = trainer_name(config)
        origin.begin(config.log_dir, shown, trainer=name, first_step=done_before, num_steps=len(batches))
        self.trackers = self.files.enter_context(
            Trackers(
                config.log_dir,
                report_to=config.report_to,
                run_name=config.run_name,
                total_steps=len(batches),
                first_step=len(batches) - len(left),
                headline=("rows", "kept", "acceptance", "tokens_per_second"),
                logging_steps=config.logging_steps,
                config=masked({field.name: getattr(shown, field.name) for field in dataclasses.fields(shown)}),
            )
        )
        self.step = len(batches) - len(left)
        self.num_tokens_before = self.ledger.counts["num_tokens"]
        self.clock = time.perf_counter()
        return [np.array(part, np.int64) for part in left]

    @RayHelper.function(group="driver", execute="first")
    def record(self, entries: list[Entry]) -> None:
        """Writes down what became of rows."""
        self.ledger.append(plain_numbers(entries))
        self.step += 1
        self.trackers.log(self.step, self.numbers())
        every = self.config.report_every
        if every and self.step % every == 0:
            write_of(self.config.log_dir)

    @RayHelper.function(group="driver", execute="first")
    def finish(self) -> dict[str, float]:
        """Writes the output from the ledger, and says what became of the rows."""
        numbers = self.numbers()
        path = self.config.output_path
        write_output(path, self.rows, self.ledger.in_order(self.order.tolist()))
        told = {name: int(value) for name, value in numbers.items() if float(value).is_integer()}
        self.trackers.console.write(
            "{rows} rows: {kept} kept, {easy} easy, {no_positive} without a positive, {failed} failed".format(**told)
            + f"; acceptance {numbers['acceptance']:.1%}, {numbers['tokens_per_second']:.0f} tokens/s"
        )
        self.trackers.console.write(
            f"{told['num_samples']} samples are in {path}, and the outcome of each row is in its .ledger"
        )
        origin.end(self.config.log_dir, self.step, "finished")
        write_of(self.config.log_dir)
        return numbers

    def numbers(self) -> dict[str, float]:
        """Of all rows so far; tokens a second since this process began."""
        counts = self.ledger.counts
        names = ("rows", "kept", "easy", "no_positive", "failed")
        named = ("num_samples", "num_candidates", "num_failed", "num_correct", "num_tokens")
        seconds = time.perf_counter() - self.clock
        return {
            **{name: counts[name] for name in (*names, *named)},
            "acceptance": counts["kept"] / max(1, counts["rows"]),
            "correct": counts["num_correct"] / max(1, counts["num_candidates"]),
            "tokens_per_second": (counts["num_tokens"] - self.num_tokens_before) / max(seconds, 1e-9),
        }


def seen_rows(config: SamplingConfig) -> ImageReader | None:
    """What reads the pictures of rows, if the sampler and every reward model see some. Models of plugins see none."""
    judges = {"prm": config.prm_model, "orm": config.orm_model}
    models = {f"{REWARD_MODEL} {role}": spec for role, spec in judges.items() if names_reward_model(spec)}
    if config.engine not in LOCAL or {config.model, *models.values()} & {*MODELS}:
        return None
    return image_reader(config, config.model, load_tokenizer(config, config.model), models)


def positions_of(config: SamplingConfig, num_rows: int) -> np.ndarray:
    """The rows to answer, as positions in the dataset, in the order in which they are taken.

    ms-swift drops what is left over when rows are divided by shards or batches; here no row is.
    """
    order = np.arange(num_rows)
    if config.shuffle_dataset:
        seed = config.seed if config.dataset_seed is None else config.dataset_seed
        order = np.random.default_rng(seed).permutation(num_rows)
    if config.data_range:
        shard, total = config.data_range
        order = np.array_split(order, total)[shard]
    if config.num_sampling_batches is not None:
        order = order[: config.num_sampling_batches * config.rows_a_batch]
    return order


def batches_of(order: np.ndarray, config: SamplingConfig) -> Iterator[np.ndarray]:
    """The rows that travel together."""
    for start in range(0, len(order), config.rows_a_batch):
        yield order[start : start + config.rows_a_batch]


def cached_by_position(config: SamplingConfig, ids: list[str]) -> dict[int, list[str]]:
    """What the assistant said in the cache files to rows that have N such answers there. Equal rows share them out."""
    answers = cached_answers(config.cache_files)
    count = config.num_return_sequences
    found = {}
    for position, row in enumerate(ids):
        mine, answers[row] = answers.get(row, [])[:count], answers.get(row, [])[count:]
        if len(mine) == count:
            found[position] = mine
    return found


def plain_numbers(entries: list[Entry]) -> list[Entry]:
    """The entries as JSON has them: null for NaN."""

    def plain(value: Any) -> Any:
        return None if isinstance(value, float) and math.isnan(value) else value

    return [
        {**entry, "answers": [{name: plain(value) for name, value in answer.items()} for answer in entry["answers"]]}
        for entry in entries
    ]
