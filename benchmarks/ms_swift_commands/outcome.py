"""What becomes of a command here: read, translated, placed and checked in a process of its own, and never run."""

from __future__ import annotations

import io
import logging
import os
import pickle
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.ms_swift_commands.cases import Case
from benchmarks.ms_swift_commands.shell import Command
from rayhelper import ConfigError
from trainers.backends.fsdp.tuners.quantized import is_installed
from trainers.cli import _check_run as check_run
from trainers.cli import load_config, placement, uses_ray
from trainers.commands import RLHF, command_named, task_of
from trainers.configuration.mistakes import mistakes_of
from trainers.configuration.others.ms_swift import engine_in_parts, spelled
from trainers.configuration.others.other_names import ALIASES
from trainers.configuration.reading.command_line import export_env, given_keys
from trainers.configuration.reading.given_keys import plain
from trainers.configuration.shared import TrainConfig
from trainers.parts.inputs import image_reader, load_model_and_tokenizer, read_rows
from trainers.swift_rollout import Offer, engine_of_server

OUTCOMES = ("taken", "taken with a line", "refused, the remedy works", "cannot run here", "refused")
NEVER = {  # what is missing, by the beginning of what is said of it
    "unknown key fp8": "training in FP8 (TransformerEngine)",
    "unknown key mtp_num_layers": "multi-token prediction",
    **dict.fromkeys(("quant_method", "hqq_axis"), "weights quantized by others than bitsandbytes"),
    **dict.fromkeys(
        ("tuner_type", "use_galore", "galore", "lisa", "lora_ga", "reft", "init_weights lora-ga"),
        "tuners that peft does not build",
    ),
    "environment: unknown": "multi-turn schedulers",
    "multi_turn_scheduler": "multi-turn schedulers",
    "vllm_server": "prompts completed by a server outside the run (swift rollout)",
}
SENSES = (  # the same of models that see or hear, by what the refusal holds
    (
        r"backend: megatron does not support (this|the) model|dataset: .* have images",
        "pictures with Megatron, or to a model that hears",
    ),
    (r"dataset: .* rows have (videos|audios)", "videos and sounds"),
    (
        r"has no configuration that can be read|(brings|has) its own code",
        "models whose code comes with them, and not with transformers",
    ),
    (r"has its own reranker code", "models whose code comes with them, and not with transformers"),
    (
        r"which neither AutoModelFor|has no (sequence )?classifier|is also an audio model",
        "models that hear, and classifiers that see",
    ),
    (r"no files of an image processor", "no stand-in here: the processor is not tried"),
    (r"workers cannot share rows with pictures", "sequence parallelism with pictures"),
)
MOST_REMEDIES = 8
DEVICES_OF_NODE = 8
QUANTIZES = {"quant_method", "load_in_4bit", "load_in_8bit"}
BITSANDBYTES = Path(__file__).resolve().parents[2] / ".venv" / "qlora"


@dataclass
class Outcome:
    """``kind`` is one of OUTCOMES; ``lines`` are said to the user, ``reasons`` are theirs in few words."""

    kind: str
    lines: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def outcomes_of(cases: list[Case], ms_swift: Path) -> list[Outcome]:
    """One for each case, in order; paths in commands are looked for from the root of ms-swift."""
    folder = Path(tempfile.mkdtemp(prefix="ms_swift_commands_"))
    words = [case.replaced(folder, number) for number, case in enumerate(cases)]
    _import_all()
    before = Path.cwd()
    os.chdir(ms_swift)
    try:
        return [_forked(one, case) for one, case in zip(words, cases, strict=True)]
    finally:
        os.chdir(before)


def outcome_of(words: list[str], case: Case) -> Outcome:
    """Of one command, with the remedies tried that the refusal names."""
    mistakes, notes = tried(words, case.environment, case.servers)
    if not mistakes:
        return Outcome("taken with a line" if notes else "taken", notes, [_short(note) for note in notes])
    lines, reasons = list(mistakes), [_short(mistake) for mistake in mistakes]
    for _ in range(MOST_REMEDIES):
        changed = words
        for mistake in mistakes:
            changed = with_remedy(changed, mistake)
        if changed == words:
            break
        words = changed
        mistakes, _ = tried(words, case.environment, case.servers)
        if not mistakes:
            return Outcome("refused, the remedy works", lines, reasons)
        lines += [f"then: {mistake}" for mistake in mistakes]
        reasons += [_short(mistake) for mistake in mistakes]
    missing = [told for start, told in NEVER.items() if any(reason.startswith(start) for reason in reasons)]
    if any(reason.startswith("task_type") for reason in reasons):
        missing.append(f"task_type {case.keys.get('task_type')}")
    if case.senses or "Qwen3.5" in str(case.keys.get("model")):
        missing += [told for holds, told in SENSES if any(re.search(holds, line) for line in lines)]
    missing = sorted(set(missing))
    return Outcome("cannot run here", lines, missing) if missing else Outcome("refused", lines, reasons)


def tried(words: list[str], environment: dict[str, str], servers: list[Command]) -> tuple[list[str], list[str]]:
    """The mistakes that stop a command, one a line, and what is said where none does; ``servers`` run beside it."""
    held = _Held()
    root = logging.getLogger()
    level = root.level
    root.addHandler(held)
    root.setLevel(logging.INFO)
    try:
        with (
            patch.dict(os.environ, environment),
            with_gpus(),
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
        ):
            _checked(words, environment, servers)
    except ConfigError as error:
        told = str(error)
        return (told.split("\n  - ")[1:] if told.startswith("several mistakes") else [told]), []
    except Exception:
        return [f"broken: {traceback.format_exc(limit=-3)}"], []
    finally:
        root.removeHandler(held)
        root.setLevel(level)
    return [], held.lines


@contextmanager
def with_gpus() -> Iterator[None]:
    """Inside, there seem to be GPUs, torchvision, OpenEnv's client, and the trackers that commands report to."""
    import torch

    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "is_bf16_supported", lambda *_: True),
        patch.object(torch.cuda, "current_device", lambda: 0),
        patch("trainers.run.trackers._is_installed", lambda _: True),
        patch("trainers.rollout.openenv.is_installed", lambda: True),
        patch("trainers.rollout.vllm.vision.features.find_spec", lambda name: name),
    ):
        yield


def _checked(words: list[str], environment: dict[str, str], servers: list[Command]) -> None:
    name, arguments = spelled(words)
    export_env(arguments)
    keys = given_keys(arguments, [])[0].values
    arguments += engine_in_parts(keys, environment) or _served(keys, environment, servers)
    rlhf_type = plain(keys.get("rlhf_type")) if name == RLHF else None
    command = command_named(name, rlhf_type, task_of(keys))
    config = load_config(command.config_type, arguments, prog="python -m trainers")
    count = 1 if uses_ray(arguments) else processes_of(environment)
    alone = not config.use_ray and count == 1
    groups = None if alone else placement(command.trainer, config, count)
    check_run(command.trainer, config, groups)
    _read(config)


def processes_of(environment: Mapping[str, str]) -> int:
    """Of all nodes. A scheduler that starts a script on its nodes also tells torchrun how many devices each has."""
    own = environment.get("NPROC_PER_NODE") or (DEVICES_OF_NODE if environment.get("NNODES") else 1)
    return int(own) * int(environment.get("NNODES") or 1)


def _read(config: Any) -> None:
    """Reads the rows as the trainer does, and makes the tokens of one with pictures, and of one with videos."""
    if not isinstance(config, TrainConfig) or not config.dataset:
        return
    model, tokenizer = load_model_and_tokenizer(config)
    images = image_reader(config, model, tokenizer)
    rows = read_rows(config, config.dataset, "train", images)
    if images is None:
        return
    for column in ("images", "videos"):
        if column not in rows.column_names:
            continue
        with mistakes_of("dataset"):
            row, pictures = images.placed(next(row for row in rows if row[column]))
            messages = row.get("messages") or row["prompt"]
            images.tokenizer(pictures).apply_chat_template(messages)


def _served(keys: Mapping[str, Any], environment: dict[str, str], servers: list[Command]) -> list[str]:
    """What ``vllm_mode: server`` adds where the script's own ``swift rollout`` runs, with the model of the run."""
    offers = [replace(Offer.of(one.words[2:], one.environment), model=str(keys.get("model"))) for one in servers]
    if not offers:
        return []
    with patch("trainers.swift_rollout.asked", lambda port, wait_s: offers[0]):
        arguments, variables = engine_of_server(keys, environment)
    if arguments:
        logging.getLogger(__name__).info("on Ray with the devices of swift rollout: %s", variables)
    return arguments


def with_remedy(words: list[str], mistake: str) -> list[str]:
    """The command as the mistake says to write it: a key removed, or with another value."""
    named = re.findall(r"[A-Za-z_]\w+", re.sub(r"^(command line|\S+\.yaml)(, section \w+)?: ", "", mistake))
    given = {word[2:] for word in words if word.startswith("--")} - {"model", "dataset"}  # which no remedy removes
    if re.search(r"[Rr]emove (it|them)\b|remove one of them|is not supported", mistake):
        for key in [key for key in named if key in given][:6]:
            words = _without(words, key)
    for key, value in re.findall(r"[Ww]rite (?:\w+ and )?(\w+): ([\w./-]+)", mistake):
        for name in (key, *(name for name, ours in ALIASES.items() if ours == key)):
            words = _without(words, name)
        words = [*words, f"--{key}", value.rstrip(".")]
    return words


def _without(words: list[str], key: str) -> list[str]:
    if f"--{key}" not in words:
        return words
    start = words.index(f"--{key}")
    end = next((k for k in range(start + 1, len(words)) if words[k].startswith("--")), len(words))
    return words[:start] + words[end:]


class _Held(logging.Handler):
    """Keeps warnings, and what the reading of the keys says is not needed here."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(("trainers", "rayhelper")):
            self.lines.append(record.getMessage())


def _short(line: str) -> str:
    """A mistake or a note in few words: without the place, the file and values."""
    line = re.sub(r"^(command line|\S*\.yaml)(, section \w+)?: ", "", line.strip())
    line = re.sub(r"/\S+", "FOLDER", line)
    return line.splitlines()[-1][:140] if line.startswith("broken") else line[:110]


def _forked(words: list[str], case: Case) -> Outcome:
    """In a copy of this process, so that plugins and variables of one command are not seen by the next."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reader)
        try:
            if QUANTIZES & case.keys.keys():
                _find_bitsandbytes()
            found: Any = outcome_of(words, case)
        except BaseException:
            found = Outcome("refused", [traceback.format_exc()], ["broken"])
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(found, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read()
    os.waitpid(process, 0)
    sys.stderr.write(".")
    sys.stderr.flush()
    return pickle.loads(told) if told else Outcome("refused", ["the process died"], ["the process died"])


def _import_all() -> None:
    """What every command imports, once and before the processes."""
    for name in ("sft", "grpo", "dpo", "gkd", "ppo", "reward", "sampling", "classification", "embedding", "reranking"):
        _ = command_named(name).trainer
    import trainers.backends.megatron.backend
    import trainers.rollout.vllm.settings  # noqa: F401


def _find_bitsandbytes() -> None:
    """Has this process find bitsandbytes where make setup puts it, apart from all others: peft is another beside it."""
    sys.path.append(str(BITSANDBYTES))
    if is_installed():  # before there is a stand-in of a GPU, for which it looks for torch's own
        import bitsandbytes  # noqa: F401
        import transformers.integrations.bitsandbytes
        import transformers.trainer  # noqa: F401
