"""ms-swift's commands and its variables of the environment, as a command of ours.

    swift sft x.yaml --lora_rank 16       sft --config x.yaml --lora_rank 16 --defaults ms-swift
    megatron rlhf --rlhf_type grpo ...    rlhf --backend megatron --rlhf_type grpo ... --defaults ms-swift
    megatron sft ... --backend fsdp       sft ... --backend fsdp --tuner_type full --global_batch_size 16 --defaults ...

Its keys are ``other_names.py`` and ``translations.py``.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rayhelper import ConfigError
from rayhelper.device_groups.keys import SHARE_KEY
from rayhelper.text import nearest
from trainers.configuration.reading.given_keys import plain

PROGRAMS = ("swift", "megatron")
ROLLOUT = "rollout"  # ``trainers/swift_rollout.py``
COMMANDS = {"sft": "sft", "pt": "pretrain", "rlhf": "rlhf", "sample": "sampling"}
OTHER_PRODUCTS = {
    **dict.fromkeys(
        ("infer", "deploy", "app", "web-ui"),
        "it serves a model. Roles complete prompts here: device_groups give role rollout its own devices",
    ),
    "export": "it converts a model. The folder final of a run is a Hugging Face model with the adapter merged",
    "merge-lora": "it merges an adapter. The folder final of a run holds the model with its adapter merged",
    "eval": "it measures a model on benchmarks. eval_dataset measures the trained model on rows",
}

# Of ``swift/megatron/arguments/megatron_args.py``, where those of ``swift`` are others whatever the backend
OF_MEGATRON = {"tuner_type": "full", "global_batch_size": "16"}
MEGATRON_DEFAULTS = {  # the keys that say each
    "tuner_type": {"tuner_type", "train_type"},
    "global_batch_size": {"global_batch_size"},
}

# Variables that its scripts set, and what is done with them. Every other one means here what it means there: it is read
# by torch, NCCL, transformers, vLLM or another library.
TORCHRUN = {
    "NPROC_PER_NODE": "nproc_per_node",
    "NNODES": "nnodes",
    "NODE_RANK": "node_rank",
    "MASTER_ADDR": "master_addr",
    "MASTER_PORT": "master_port",
}


def spelled(words: Sequence[str]) -> tuple[str, list[str]]:
    """Name and arguments of our command for ``swift sft ...``, without the program: ("swift", "sft", ...).

    Raises:
        ConfigError: a command that is none of a training.
    """
    program, command, *arguments = [*words, ""] if len(words) == 1 else words
    command = command.replace("_", "-")
    if command in OTHER_PRODUCTS:
        raise ConfigError(f"{program} {command} is not supported: {OTHER_PRODUCTS[command]}.")
    if command not in COMMANDS or (program == "megatron" and command == "sample"):
        known = [name for name in COMMANDS if program == "swift" or name != "sample"]
        raise ConfigError(f"{program} has no command {command!r}{nearest(command, known)}; known: {', '.join(known)}")
    config, rest = with_config(arguments)
    backend = _backend([*config, *rest]) if program == "megatron" else []
    says = any(argument.partition("=")[0] == "--defaults" for argument in rest)
    whose = [] if says else ["--defaults", "ms-swift"]  # of a command of its own, whatever its keys
    return COMMANDS[command], [*config, *backend, *rest, *whose]


def _backend(arguments: Sequence[str]) -> list[str]:
    """What a ``megatron`` command adds: its backend, or, where a key says another one, its own defaults for that."""
    if "backend" not in (said := said_keys(arguments)):
        return ["--backend", "megatron"]
    if said["backend"] == {"megatron"}:
        return []
    left_out = [key for key, names in MEGATRON_DEFAULTS.items() if not names & said.keys()]
    return [word for key in left_out for word in (f"--{key}", OF_MEGATRON[key])]


def said_keys(arguments: Sequence[str]) -> dict[str, set[str]]:
    """The values, as written, that each key has among the arguments, and in the file that they name."""
    said: dict[str, set[str]] = {}
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, has_value, value = argument.partition("=")
        value = value if has_value else following
        if name == "--config":
            with contextlib.suppress(OSError, UnicodeDecodeError, yaml.YAMLError):  # told where the file is read
                keys = yaml.safe_load(Path(value).read_text(encoding="utf-8"))
                for key, own in keys.items() if isinstance(keys, dict) else ():
                    said.setdefault(str(key), set()).add(str(own))
        elif name.startswith("--"):
            said.setdefault(name[2:], set()).add(value)
    return said


def with_config(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The option that names the configuration's file, and the other arguments: a file's name may come first alone."""
    if arguments and not arguments[0].startswith("-") and arguments[0].endswith((".yaml", ".yml", ".json")):
        return ["--config", arguments[0]], list(arguments[1:])
    return [], list(arguments)


def torchrun_options(environment: Mapping[str, str]) -> list[str]:
    """The options of torchrun that ms-swift's variables ask for; none where they ask for one process.

    ``NPROC_PER_NODE`` or ``NNODES`` make ``swift sft`` start torchrun. One that torchrun has started asks for nothing.
    """
    if "TORCHELASTIC_RUN_ID" in environment or not {"NPROC_PER_NODE", "NNODES"} & set(environment):
        return []
    return [f"--{option}={environment[name]}" for name, option in TORCHRUN.items() if environment.get(name)]


def num_processes(environment: Mapping[str, str]) -> int:
    """How many processes torchrun starts on all nodes; 0 where only torchrun knows it (``NPROC_PER_NODE=gpu``)."""
    sizes = [environment.get(name) or "1" for name in ("NPROC_PER_NODE", "NNODES")]
    return math.prod(map(int, sizes)) if all(size.isdecimal() for size in sizes) else 0


def is_placed(keys: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    """Whether a command says itself where its roles run: on Ray, in device groups, under torchrun, on several nodes.

    ``keys``: of file and command line, as written.
    """
    is_on_ray = plain(keys.get("use_ray")) is True or "device_groups" in keys
    return is_on_ray or "TORCHELASTIC_RUN_ID" in environment or environment.get("NNODES", "1") != "1"


def engine_in_parts(keys: Mapping[str, Any], environment: Mapping[str, str]) -> list[str]:
    """Arguments with which a colocated engine in parts runs beside training, on Ray; none for any other command.

    A process of torchrun that trains holds no part of an engine here. On Ray the engine has processes of its own on the
    same devices, as ``ms_swift_keys.engine_beside_training`` gives it. ``keys``: of file and command line, as written.
    """
    said = {name: plain(keys.get(name)) for name in ("use_vllm", "vllm_mode", "vllm_tensor_parallel_size")}
    size, processes = said["vllm_tensor_parallel_size"], environment.get("NPROC_PER_NODE") or "1"
    is_colocated = said["use_vllm"] is True and said["vllm_mode"] in (None, "colocate")
    if not is_colocated or is_placed(keys, environment):
        return []
    if type(size) is not int or size < 2 or not processes.isdecimal() or int(processes) % size:
        return []
    groups = {"train": {"gpus": int(processes)}, "rollout": {SHARE_KEY: "train"}}
    return ["--use_ray", "true", "--device_groups", json.dumps(groups)]
