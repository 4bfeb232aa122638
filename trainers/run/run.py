"""One training run as its driver sees it: the step it has reached, what it logs, and the checkpoints it leaves.

Under torchrun every process runs the driver's code and so has a ``Run``. They count alike; process 0 alone reads and
writes the disk (its role methods: role driver, ``execute='first'``), as another node may see late what was written.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, Protocol

from rayhelper import ConfigError, RayHelper
from rayhelper.runtimes.announced import where_all_are
from rayhelper.runtimes.processes import hears_of_the_end, pass_end_on, told_by_each
from rayhelper.timeline.steps import mark_step
from trainers.backends.model_files import on_disk
from trainers.checkpoint import (
    STATE_FILE,
    begin,
    checkpoint_folder,
    checkpoints,
    chosen,
    complete,
    discard,
    is_written,
    read_state,
    resolve_resume,
    rotate,
    unfinished_folder,
    write_state,
)
from trainers.configuration.packs import pack_length
from trainers.configuration.reading.secrets import masked
from trainers.configuration.reading.text import save_config
from trainers.configuration.shared import SEQUENCES_PER_STEP, TrainConfig
from trainers.data.contents import contents_of
from trainers.metrics import Metrics
from trainers.patches import notices_exit
from trainers.report.command import write_of
from trainers.run import origin
from trainers.run.bad_steps import BAD_STEPS, BadSteps
from trainers.run.best import Best, before_and_after
from trainers.run.folder_lock import FolderLock, held
from trainers.run.going_on import CONTINUE, builds_model, is_going_on, resume_asked
from trainers.run.header import header, num_parameters, start_lines, trainer_name
from trainers.run.stopping import ASKED_S, EXIT_CODE, StepGivenUp, Stop, Stopped, StopSignals
from trainers.run.throughput import WORK, throughput
from trainers.run.timing import Stopwatch, step_times
from trainers.run.trackers import Trackers

# What a checkpoint's optimizer, schedule and adapter were made with: another value would be ignored, or another model
KEPT_BY_CHECKPOINTS = (
    *("learning_rate", "optim", "lr_scheduler_type", "warmup_steps", "warmup_ratio"),
    *("backend", "tuner_type", "lora_rank", "lora_alpha", "tuner_kwargs"),
    *("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant"),
)
SaveFunction = Callable[[Path], Any]
WAIT_S = 0.1  # between two looks at a folder that workers write into
logger = logging.getLogger(__name__)


class Trainer(Protocol):
    """What ``Run.rounds`` asks of a trainer."""

    tokenizer: Any

    def load(self, folder: Path) -> Any:
        """Restores what ``save`` wrote."""

    def save(self, folder: Path) -> Any:
        """Every worker writes its part of a checkpoint."""

    def evaluate(self) -> Mapping[str, float]:
        """The numbers of the evaluation data, by name."""


CONTENTS = "fingerprint of the rows"  # the name of it in what a checkpoint says of the order of the data


class Run:
    """Progress, logs and checkpoints of one call of ``train()``; a context manager that closes the logs.

    ``order`` holds the numbers that decide the rows of a step, and ``rows`` are all rows. None: they are not compared.
    Raises ConfigError if a checkpoint was written with another order, or with other rows.
    """

    def __init__(
        self,
        config: TrainConfig,
        num_steps: int,
        *,
        headline: Sequence[str],
        order: Mapping[str, Any],
        rows: Any = None,
    ) -> None:
        self.config = config
        self.num_steps = num_steps
        self.headline = headline
        self.output_dir = Path(config.output_dir)
        self.checkpoint, state = resumed_state(config)
        self.order = {
            **order,
            "seed": config.seed,
            "shuffle_dataset": config.shuffle_dataset,
            "dataloader_drop_last": config.dataloader_drop_last,
            "tokens a pack": pack_length(config),
        }
        if rows is not None:
            self.order[CONTENTS] = contents_of(rows)
        _check_same_order(state.get("order", {}), self.order, self.checkpoint)
        self.settings = {name: getattr(config, name) for name in KEPT_BY_CHECKPOINTS}
        _check_same_settings(state.get("settings", {}), self.settings, self.checkpoint)
        if state.get("step", 0) > num_steps:
            raise ConfigError(
                f"resume_from_checkpoint: {self.checkpoint} is from step {state['step']}, and the run has {num_steps} "
                "steps. Raise max_steps (or num_train_epochs), or resume from an earlier checkpoint."
            )
        self.step: int = state.get("step", 0)
        self.num_tokens: float = state.get("num_tokens", 0.0)
        self.trainer_state: dict[str, Any] = state.get("trainer", {})
        self.first_evaluation: dict[str, float] = state.get("first_evaluation", {})
        self.num_epochs: int | None = state.get("num_epochs", None if state else 0)  # None: an earlier version's
        self.best = Best(config, state)
        self.bad_steps = BadSteps(config.max_bad_steps, state.get("bad_steps", 0))
        self.is_due = False  # a checkpoint, which waits for a step that is not bad
        self.last: dict[str, float] = {}
        self.last_evaluation: dict[str, float] = state.get("last_evaluation", {})
        self.evaluated_step: int | None = state.get("evaluated_step")
        self.has_ended_epoch = False  # since the last round
        self.trackers: Trackers | None = None  # process 0 has them
        self.unnamed: Path | None = None  # a folder that workers still write into
        self.lock: FolderLock | None = None  # process 0 has it
        self.open = contextlib.ExitStack()  # what is given back in the end
        self.first_knows = False  # process 0 of torchrun knows that this one got SIGTERM
        self.signals = StopSignals(
            with_interrupt=config.save_on_interrupt,
            grace_s=config.stop_grace_s,
            where=self._where_it_is,
            pass_on=self._pass_on,
            num_parameters=num_parameters(on_disk(config.model)),
        )
        try:
            self.open_logs()
        except BaseException:
            self.open.close()
            raise
        self.stopwatch = Stopwatch()

    @RayHelper.function(group="driver", execute="first")
    def open_logs(self) -> None:
        """Takes the folder, saves the configuration, and opens the files and trackers for metrics."""
        config = self.config
        if config.resume_on_failure and not is_going_on.get():
            logger.warning(
                "resume_on_failure does nothing here. Start the trainer by trainers.cli.run(Trainer, config)."
            )
        self.lock = self.open.enter_context(held(self.output_dir))
        unchecked = config.resume_without_manifest
        for note in chosen(resume_asked(config), self.output_dir, without_manifest=unchecked).notes:
            logger.warning(note)
        save_config(config, self.output_dir)
        origin.begin(
            self.output_dir, config, trainer=trainer_name(config), first_step=self.step, num_steps=self.num_steps
        )
        self.trackers = Trackers(
            self.output_dir,
            report_to=config.report_to,
            run_name=config.run_name,
            total_steps=self.num_steps,
            first_step=self.step,
            headline=self.headline,
            logging_steps=config.logging_steps,
            config=masked({field.name: getattr(config, field.name) for field in fields(config)}),
        )
        for line in (*header(config, self.num_steps, self.order), *start_lines(config, self.checkpoint)):
            self.trackers.console.write(line)
        self.best.check_there(self.output_dir)

    def __enter__(self) -> Run:
        self.open.enter_context(self.signals)
        self.open.enter_context(hears_of_the_end(self.signals.note_elsewhere))
        self.open.enter_context(notices_exit())  # again, for scripts that call train() themselves
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with self.open:
            if self.trackers is not None:
                with contextlib.suppress(RuntimeError):  # the run has ended or failed before
                    self._name_if_written()
                self.trackers.close()
                self.report(error)
        if error is not None and self.signals.watch.has_given_up:
            raise StepGivenUp(EXIT_CODE) from error

    def report(self, error: BaseException | None) -> None:
        """Records how the run ended, and writes its report. Process 0 calls it."""
        how = "finished" if error is None else f"ended by {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if error is not None and self.signals.watch.has_given_up:
            how = "stopped in a step or a save that did not end; nothing was saved"
        elif isinstance(error, Stopped):
            how = "stopped early, and saved"
        elif isinstance(error, KeyboardInterrupt):
            how = "interrupted"
            self._say_interrupted()
        origin.end(self.output_dir, self.step, how)
        file = write_of(self.output_dir)
        if file is not None and self.trackers is not None:
            self.trackers.console.write(f"the report is in {file}; rayhelper report RUN OTHER_RUN compares runs")

    def _say_interrupted(self) -> None:
        """What is saved of a run that Ctrl-C ended, and how to go on."""
        assert self.trackers is not None
        told = f"interrupted after step {self.step} of {self.num_steps}; " + (
            self._saved_before()
            or "nothing is saved. save_on_interrupt: true saves a checkpoint first, save_steps: N one every N steps"
        )
        self.trackers.console.write(told)

    def _saved_before(self) -> str:
        """The checkpoint to go on from, for a message; empty: there is none."""
        saved = checkpoints(self.output_dir)
        if not saved:
            return ""
        return f"saved before: {saved[-1]}. {CONTINUE}"

    def _where_it_is(self) -> str | None:
        """The stacks of all ranks, and the checkpoint to go on from; None: process 0 tells. Any thread may call it."""
        if self.trackers is None and self.first_knows:
            time.sleep(ASKED_S)  # process 0 asks this process where it is
            return None
        saved = self._saved_before() or "nothing is saved. save_steps: N saves a checkpoint every N steps"
        return f"{where_all_are()}\nstopped after step {self.step} of {self.num_steps}; {saved}"

    @property
    def final(self) -> Path:
        """The folder of the trained model."""
        return self.output_dir / "final"

    @property
    def is_over(self) -> bool:
        last = self.config.end_after_epochs
        return (
            self.step >= self.num_steps or self.best.ends_run or (last is not None and (self.num_epochs or 0) >= last)
        )

    def rounds(self, trainer: Trainer, state: Callable[[], Mapping[str, Any]] = dict) -> Iterator[int]:
        """The step numbers until the run is over. For each one, the caller makes one optimizer step or several.

        First the run is resumed. Between rounds the trainer is evaluated and saved when that is due, with ``state()``
        as its ``trainer_state``. At the end it is evaluated again.

        Raises:
            Stopped: a signal or ``save_before_s`` asked the run to end early; it is saved.
            StepGivenUp: SIGTERM came, and the step or the checkpoint did not end in time.
        """
        config = self.config
        self.resume(trainer.load)
        if config.val_before_train and self.step == 0:
            with self.signals.watch.step():
                self.evaluate(trainer.evaluate)
        while not self.is_over:
            start, self.has_ended_epoch = self.step, False
            is_better = False
            with self.signals.watch.step():
                yield start
                if config.evaluates and self.is_time(config.eval_strategy, config.eval_steps, self.step - start):
                    is_better = self.evaluate(trainer.evaluate)
            self.is_due |= self.is_time(config.save_strategy, config.save_steps, self.step - start, is_better=is_better)
            may_save = not self.is_over and not self.bad_steps.is_last  # after the next step that is not bad
            stop = self.stop_reason() if may_save else None
            if may_save and (self.is_due or stop is not None):
                self.save_checkpoint(trainer.save, trainer.tokenizer, state(), is_due=self.is_due)
                self.is_due = False
            if stop is not None:
                self.end_early(stop)
        if self.best.ends_run:
            logger.info(
                "early_stop_interval: the run ends after step %d, %s", self.step, self.best.told(self.output_dir)
            )
        if config.evaluates and self.evaluated_step != self.step:
            with self.signals.watch.step():
                self.evaluate(trainer.evaluate)
        if config.load_best_model_at_end:
            self.load_best(trainer.load)

    def stop_reason(self) -> Stop | None:
        """Why the run ends before its last step, or None. The first process with a reason decides for all.

        So all stop after the same step, also if a signal reached one of them alone.
        """
        stop, limit_s = self.signals.stop(), self.config.save_before_s
        if limit_s is not None and self.lock is not None and self.lock.elapsed_s >= limit_s:  # process 0 has the lock
            stop = Stop(f"save_before_s ({limit_s:g} s)", 0)
        return next((one for one in told_by_each("Run.stop_reason", stop) if one is not None), None)

    def _pass_on(self) -> None:
        """SIGTERM came here: the other processes of torchrun hear of it before the step ends, as it may hang."""
        self.first_knows = pass_end_on()

    def end_early(self, stop: Stop) -> NoReturn:
        """Prints how to continue from the checkpoint that has just been saved. Raises Stopped."""
        with self.signals.watch.saving():
            self.wait_until_written()
        if self.trackers is not None:
            self.trackers.console.write(
                f"stopped by {stop.reason} after step {self.step} of {self.num_steps}; saved "
                f"{checkpoint_folder(self.output_dir, self.step)}. {CONTINUE}"
            )
        raise Stopped(stop.code)

    def resume(self, load: SaveFunction) -> None:
        """Restores the workers from the checkpoint of the resumed run, if there is one."""
        if self.checkpoint is not None:
            size = self.order.get(SEQUENCES_PER_STEP)
            logger.info("going on from %s (step %d of %d)", self.checkpoint, self.step, self.num_steps)
            if size is not None:
                logger.info("a step learns from %d sequences, as before, however many workers there are", size)
            try:
                with self.stopwatch.stopped(), self.signals.watch.loading():
                    load(self.checkpoint)
            except Exception as error:
                error.add_note(
                    f"The run should continue from {self.checkpoint}. If that is damaged, name an earlier one as "
                    "resume_from_checkpoint."
                )
                raise

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A context in which the driver's time counts as this phase of the step of the next ``log_step``."""
        return self.stopwatch.phase(name)

    def log_step(self, metrics: Metrics, *, epoch: float, num_epochs: int | None = None) -> None:
        """Counts an optimizer step and writes its numbers, under TRL's names, and where its time went.

        ``num_epochs`` is the number of complete passes over the rows. None: by ``epoch``.

        Raises:
            BadStepsError: the last ``max_bad_steps`` steps had a loss or gradient norm that is not finite.
        """
        self.step += 1
        num_epochs = int(epoch) if num_epochs is None else num_epochs
        self.has_ended_epoch |= self.num_epochs is not None and num_epochs > self.num_epochs
        self.num_epochs = num_epochs
        mark_step(self.step, self.stopwatch.begun_ns)
        seconds = self.stopwatch.lap()
        times = step_times(seconds)
        numbers = {name: value for name, value in metrics.values().items() if name not in WORK}
        self.bad_steps.add(self.step, metrics)
        if self.bad_steps.count:
            numbers[BAD_STEPS] = self.bad_steps.count
        self.num_tokens += numbers.pop("num_tokens", 0.0)
        numbers |= {"num_tokens": self.num_tokens, "epoch": epoch, "step_time": times["time/step"]}
        numbers |= times | throughput(metrics, seconds)
        self.last |= numbers
        if self.trackers is not None:
            self.trackers.log(self.step, numbers)
            self._name_if_written()
            if self.due(self.config.report_every):
                with self.stopwatch.stopped():
                    write_of(self.output_dir)
        self.bad_steps.check()

    def evaluate(self, evaluate: Callable[[], Mapping[str, float]]) -> bool:
        """Writes the numbers that ``evaluate`` finds. Its time belongs to no step.

        Returns whether the model is better than at any evaluation before.
        """
        with self.stopwatch.stopped():
            return self.log_evaluation(evaluate())

    def log_evaluation(self, numbers: Mapping[str, float]) -> bool:
        """Writes the numbers of an evaluation. At the end, the first and the last one are shown side by side.

        Returns whether the model is better than at any evaluation before. Raises ConfigError if
        ``metric_for_best_model`` is not among the numbers.
        """
        is_better = self.best.see(numbers)
        if self.step == 0:
            self.first_evaluation = dict(numbers)
        self.last_evaluation, self.evaluated_step = dict(numbers), self.step
        self.last |= numbers
        if self.trackers is not None:
            self.trackers.log(self.step, numbers, advance=False)
        return is_better

    def shows_completions(self, num_steps: int) -> bool:
        """Whether the first step or a multiple of ``logging_steps`` is among the next ``num_steps`` steps."""
        every = self.config.logging_steps
        return self.step == 0 or (self.step + num_steps) // every > self.step // every

    def log_completions(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Saves the completions that the next step learns from."""
        if self.trackers is not None:
            self.trackers.completions(self.step + 1, columns)

    def due(self, every: int | None, num_steps: int = 1) -> bool:
        """Whether a multiple of ``every`` was passed in the last ``num_steps`` steps, and steps remain."""
        if not every or self.is_over:
            return False
        return self.step // every > (self.step - num_steps) // every

    def is_time(self, strategy: str, every: int | None, num_steps: int, *, is_better: bool = False) -> bool:
        """Whether ``eval_strategy`` or ``save_strategy`` asks for something after a round of ``num_steps`` steps.

        It is False at the end of the run, which always evaluates and saves.
        """
        if strategy == "steps":
            return self.due(every, num_steps)
        is_asked = {"epoch": self.has_ended_epoch, "best": is_better}
        return is_asked.get(strategy, False) and not self.is_over

    def save_checkpoint(
        self,
        save: SaveFunction,
        tokenizer: Any,
        trainer_state: Mapping[str, Any] | None = None,
        *,
        is_due: bool = True,
    ) -> None:
        """Writes ``checkpoint-N``: the workers' part, tokenizer, position in the data. Old ones above the limit go.

        ``trainer_state`` is any other JSON data that the trainer needs to continue. A resumed run has it under this
        name.

        An evaluation that is due at the same step comes first. It decides whether this checkpoint is the best. Without
        it, as in a stopped run, the checkpoint is not judged. The time belongs to no step.
        """
        folder = checkpoint_folder(self.output_dir, self.step)
        if is_due and self.last_evaluation:
            self.best.judge(folder, self.last_evaluation)
        state = {
            "step": self.step,
            "num_epochs": self.num_epochs,
            "num_tokens": self.num_tokens,
            "first_evaluation": self.first_evaluation,
            "last_evaluation": self.last_evaluation,
            "evaluated_step": self.evaluated_step,
            "bad_steps": self.bad_steps.count,
            "settings": self.settings,
            "order": self.order,
            "trainer": dict(trainer_state or {}),
            **self.best.state(),
        }
        with self.stopwatch.stopped():
            self.write(folder, save, tokenizer, state)

    def load_best(self, load: SaveFunction) -> None:
        """Loads the model of the best checkpoint, unless the last evaluation is better or is of that model."""
        if self.best.is_beaten_by(self.last_evaluation):
            logger.info("load_best_model_at_end: the final model comes from the last step, which is the best")
            return
        assert self.best.checkpoint is not None
        folder = self.output_dir / self.best.checkpoint
        if folder == checkpoint_folder(self.output_dir, self.step):
            return
        logger.info("load_best_model_at_end: the final model comes from %s", folder)
        with self.stopwatch.stopped(), self.signals.watch.saving():
            self.wait_until_written()
            load(self.best.whole(folder))

    def write(self, folder: Path, save: SaveFunction, tokenizer: Any, state: Mapping[str, Any] | None) -> None:
        """Writes ``folder``: the workers write their parts, process 0 the rest. It gets its name when all is written.

        Workers may continue to write while training continues. The next folder waits for them.
        """
        with self.signals.watch.saving():
            self.wait_until_written()
            unfinished = self.begin(folder)
            try:
                save(unfinished)
                self.complete(folder, unfinished, tokenizer, state)
            except BaseException as error:
                if self.trackers is not None:
                    discard(folder, error)
                raise

    @RayHelper.function(group="driver", execute="first")
    def begin(self, folder: Path) -> Path:
        """The empty folder into which all workers write after this call.

        Raises:
            RuntimeError: another run has taken ``output_dir`` over.
        """
        assert self.lock is not None
        self.lock.check()
        return begin(folder)

    @RayHelper.function(group="driver", execute="first")
    def complete(self, folder: Path, unfinished: Path, tokenizer: Any, state: Mapping[str, Any] | None) -> None:
        """Adds the driver's part of a folder, a checkpoint if it has a ``state``, and gives it its name."""
        tokenizer.save_pretrained(unfinished)
        if state is not None:
            write_state(unfinished, state)
        self.unnamed = folder
        self._name_if_written()

    @RayHelper.function(group="driver", execute="first")
    def wait_until_written(self) -> None:
        """Returns when workers have written all files, and the folder has its name."""
        while self.unnamed is not None:
            self._name_if_written()
            if self.unnamed is not None:
                time.sleep(WAIT_S)

    def _name_if_written(self) -> None:
        """Gives the folder that was written last its name, unless a worker still writes. Process 0 calls it.

        Raises:
            RuntimeError: a worker could not write its part; the folder is gone.
        """
        if self.unnamed is None:
            return
        folder = self.unnamed
        try:
            if not is_written(unfinished_folder(folder)):
                return
        except RuntimeError:
            self.unnamed = None
            discard(folder)
            raise
        self.unnamed = None
        complete(folder)
        if (folder / STATE_FILE).exists():
            rotate(self.output_dir, self.config.save_total_limit, self.best.checkpoint)

    def finish(self, export: SaveFunction, tokenizer: Any) -> dict[str, float]:
        """Writes the trained model to ``output_dir/final``, and prints the evaluation before and after."""
        folder = self.final
        with self.signals.watch.saving():
            self.write(folder, export, tokenizer, None)
            self.wait_until_written()
        if self.trackers is not None:
            for line in before_and_after(self.first_evaluation, self.last_evaluation):
                self.trackers.console.write(line)
            self.trackers.console.write(f"the model is in {folder}")
            if (folder / "adapter").is_dir():  # LoRA's, as a backend exports it
                self.trackers.console.write(
                    f"the adapter is merged into this model, and is also in {folder / 'adapter'}"
                )
            if best := self.best.told(self.output_dir):
                self.trackers.console.write(best)
            if checkpoints(self.output_dir) and builds_model.get() is None:
                self.trackers.console.write(
                    "to train on from the last checkpoint, run the same command with --resume_from_checkpoint auto and "
                    "a larger max_steps or num_train_epochs"
                )
        return self.last


@RayHelper.function(group="driver", execute="first")
def resumed_state(config: TrainConfig) -> tuple[Path | None, dict[str, Any]]:
    """The checkpoint that a run goes on from, and the state in it; None and nothing for a new run.

    Raises:
        ConfigError: a named folder that is no checkpoint, or a damaged one; another run has ``output_dir``.
    """
    folder, resume = Path(config.output_dir), resume_asked(config)
    if not resume:
        return None, {}
    # what another run is writing there must not be put right
    with held(folder) if folder.exists() else contextlib.nullcontext():
        checkpoint = resolve_resume(resume, folder, without_manifest=config.resume_without_manifest)
        return checkpoint, read_state(checkpoint) if checkpoint else {}


def saved_order(config: TrainConfig) -> Mapping[str, Any]:
    """The numbers that decided the rows of each step in the resumed run. It is empty for a new run."""
    _, state = resumed_state(config)
    order: dict[str, Any] = state.get("order", {})
    return order


def _check_same_settings(saved: Mapping[str, Any], settings: Mapping[str, Any], checkpoint: Path | None) -> None:
    changed = [
        f"{name} was {saved[name]} and is {value}"
        for name, value in settings.items()
        if saved.get(name, value) != value
    ]
    if changed:
        raise ConfigError(
            f"resume_from_checkpoint: {checkpoint} has its own optimizer, schedule and model, but other keys were "
            f"given ({'; '.join(changed)}). Undo these changes, or start a new run from the exported model."
        )


def _check_same_order(saved: Mapping[str, Any], order: Mapping[str, Any], checkpoint: Path | None) -> None:
    changed = [
        f"{name} was {saved[name]} and is {value}" for name, value in order.items() if saved.get(name, value) != value
    ]
    if changed:
        raise ConfigError(
            f"resume_from_checkpoint: {checkpoint} belongs to a run that read the data in another order "
            f"({'; '.join(changed)}). Rows would be repeated or left out. Change these values back "
            f"(global_batch_size keeps the sequences of a step). Or start a new run from the checkpoint as model."
        )
