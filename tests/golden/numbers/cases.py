"""The golden runs: which trainer, where its roles run, and with which keys.

Names are ``trainer/variant/runtime``. Every trainer meets every runtime with variant ``fsdp``, where ``hf`` completes
prompts. Each further variant is met by each trainer that it means something to, in one process and in several.

    off             one process                     inprocess   simulated: one worker that trains, two that complete
    torchrun        two processes                   ray         two workers that have all roles
    ray-apart       a worker that trains, one that completes, one that judges
    command, torchrun-command, ray-command          a start of its own, by the command line alone

What is not there, and why:

- ``inprocess`` with two workers that train, and ``megatron`` in one process: simulated workers have no collectives.
- ``megatron`` and ``lora`` of sampling: it trains nothing. ``ray-apart`` of sft, pretrain and reward is one worker.
- ``vllm`` in more cases: an engine takes long to start, and its numbers are those of one kind of processor.
- A run that is interrupted, for ``resume``: it runs to its end, and is resumed at the checkpoint of step 3 (ppo: 4).
- Weights that arrive while prompts are completed (``weight_sync_interval``): what they change depends on time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Keys = dict[str, Any]

RECORDED = ("sft", "pretrain", "dpo", "reward", "grpo", "ppo", "gkd", "sampling")
CLASSES = {  # module and the name before Trainer; a configuration is found beside it
    "sft": ("sft", "SFT", "SFT"),
    "pretrain": ("sft", "SFT", "Pretrain"),
    "dpo": ("dpo", "DPO", "DPO"),
    "reward": ("reward", "Reward", "Reward"),
    "grpo": ("grpo", "GRPO", "GRPO"),
    "ppo": ("ppo", "PPO", "PPO"),
    "gkd": ("gkd", "GKD", "GKD"),
    "sampling": ("sampling", "Sampling", "Sampling"),
}
PLUGIN = Path(__file__).with_name("plugin.py")

# Where roles run

LEARNING = ["train", "default"]  # dpo's policy is of role default
WRITING = ["rollout", "sampler"]
JUDGING = ["reference", "teacher", "critic", "reward", "prm", "orm"]


def group(num_workers: int, *roles: str) -> Keys:
    return {"device": "CPU", "ranks": num_workers, "workers": list(roles)}


GROUPS: dict[str, Keys] = {
    "inprocess": {"learner": group(1, *LEARNING, *JUDGING), "actors": group(2, *WRITING)},
    "ray": {"cpus": group(2, *LEARNING, *WRITING, *JUDGING)},
    "ray-apart": {
        "learner": group(1, *LEARNING),
        "actors": group(1, *WRITING),
        "judges": group(1, *JUDGING),
    },
    "ray of megatron": {"megatron": group(2, *LEARNING, *WRITING, *JUDGING)},
    "ray-apart of two learners": {"megatron learner": group(2, *LEARNING, *JUDGING), "actor": group(1, *WRITING)},
}
GROUPS_OF_GRPO = {
    "learner": group(1, "train"),
    "actors": group(1, "rollout"),
    "judges": group(1, "reference", "teacher", "reward"),
}
RUNTIMES = ("off", "inprocess", "torchrun", "ray", "ray-apart")
ONE_PROCESS = "one process"  # the start of the first two

# What is learned from

WORDS = "a bee sees two deer near the sea where no one ever was before and they all rest".split()
TEXTS = [" ".join(WORDS[k % 5 : k % 5 + 1 + 3 * k % 11]) for k in range(11)]  # 11 texts of unequal length
PAIRS = [
    {
        "prompt": " ".join(WORDS[: 1 + k % 3]),
        "chosen": " ".join(WORDS[k % 4 : k % 4 + 1 + 3 * k % 7]),
        "rejected": " ".join(WORDS[7 + k % 3 : 8 + k % 3 + 5 * k % 6]),
        "margin": k % 3 / 2,
    }
    for k in range(11)
]
DATASETS: dict[str, list[Keys]] = {
    "texts": [{"text": text} for text in TEXTS],
    "a text": [{"text": "no one"}],
    "pairs": PAIRS,
    "three pairs": PAIRS[:3],
    "prompts": [{"prompt": text} for text in TEXTS[:6]],
    "two prompts": [{"prompt": text} for text in TEXTS[6:8]],
    "responses": [{"prompt": text[:6], "completion": text[6:]} for text in TEXTS],
    "own prompts": [{"prompt": text[:6], "teacher_prompt": text, "completion": text[6:]} for text in TEXTS],
    "three own prompts": [{"prompt": text[:6], "teacher_prompt": text} for text in TEXTS[:3]],
    "tasks": [{"prompt": "say: ", "turns": 1 + k % 3} for k in range(6)],
    "words": [{"prompt": word, "answer": word[0], "number": k} for k, word in enumerate(WORDS[:8])],
}

# Keys. ``Case.settings`` puts paths in the place of ``Data`` and ``Model``


@dataclass(frozen=True)
class Data:
    """A file of ``DATASETS``."""

    name: str


@dataclass(frozen=True)
class Model:
    """A folder of ``models.py``."""

    name: str


SHARED: Keys = {
    "dtype": "float32",
    "report_to": ["none"],
    "logging_steps": 100,
    "seed": 7,
    "external_plugins": [str(PLUGIN)],
}
TRAINING: Keys = {
    "model": Model("policy"),
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0,
    "weight_decay": 0.01,
    "optim_kwargs": {"fused": True},  # torch.sqrt, which the other form calls, is not the same on all processors
    "per_device_train_batch_size": 2,
    "global_batch_size": 4,
    "max_steps": 5,
    "save_steps": 0,
}
COMPLETING: Keys = {
    "dataset": Data("prompts"),
    "eval_dataset": Data("two prompts"),
    "eval_temperature": 0.0,
    "eval_steps": 2,
    "reward_funcs": ["evenness", "shortness"],
    "reward_weights": [1.0, 0.1, 0.5],
    "max_completion_length": 8,
    "per_device_train_batch_size": 3,
}
OF_TRAINER: dict[str, Keys] = {
    "sft": {"dataset": Data("texts"), "eval_dataset": Data("a text"), "eval_steps": 2, "warmup_steps": 2},
    "pretrain": {"dataset": Data("texts"), "max_length": 24, "eval_dataset": Data("texts"), "eval_steps": 2},
    "dpo": {
        "dataset": Data("pairs"),
        "eval_dataset": Data("three pairs"),
        "eval_steps": 2,
        "per_device_eval_batch_size": 2,
        "rpo_alpha": 0.5,
        "sync_ref_model": True,
        "ref_model_sync_steps": 2,
    },
    "reward": {
        "dataset": Data("pairs"),
        "eval_dataset": Data("three pairs"),
        "eval_steps": 2,
        "per_device_eval_batch_size": 2,
        "center_rewards_coefficient": 0.1,
    },
    "grpo": {
        **COMPLETING,
        "reward_model": [Model("judge")],
        "num_generations": 4,
        "generation_batch_size": 16,
        "global_batch_size": 8,
        "teacher_model": Model("teacher"),
        "teacher_kl_coef": 0.1,
        "beta": 0.05,
        "sync_ref_model": True,
        "ref_model_sync_steps": 2,
        "top_entropy_quantile": 0.5,
        "use_adaptive_entropy": True,
        "entropy_coef": 0.01,
        "entropy_target": 6.0,
    },
    "ppo": {
        **COMPLETING,
        "reward_model": Model("judge"),
        "num_ppo_epochs": 2,
        "num_mini_batches": 2,
        "missing_eos_penalty": 0.5,
        "global_batch_size": 2,
    },
    "gkd": {
        "dataset": Data("responses"),
        "eval_dataset": Data("two prompts"),
        "eval_steps": 2,
        "teacher_model": Model("teacher"),
        "gkd_logits_topk": 8,
        "lmbda": 0.5,
        "temperature": 0.9,
        "sft_alpha": 0.1,
        "max_completion_length": 8,
    },
    "sampling": {
        "model": Model("policy"),
        "prm_model": Model("judge"),
        "prm_threshold": -100.0,
        "orm_model": "vowel",
        "dataset": Data("words"),
        "num_return_sequences": 4,
        "n_best_to_keep": 2,
        "max_completion_length": 10,
        "num_sampling_batch_size": 3,
    },
}
LORA: Keys = {"tuner_type": "lora", "lora_rank": 4, "learning_rate": 1e-2}
OWN_REFERENCE: Keys = {"sync_ref_model": None, "ref_model_sync_steps": None}  # the policy without its adapter
MEGATRON: Keys = {
    "backend": "megatron",
    "tensor_model_parallel_size": 2,
    "optim_kwargs": None,  # fused anyway
    "external_plugins": ["tests.megatron_on_cpu", str(PLUGIN)],
}
VLLM: Keys = {
    "rollout_engine": "vllm",
    "vllm_max_model_len": 64,
    "vllm_max_num_seqs": 8,
    "model": Model("wide"),
    "teacher_model": Model("wide teacher"),
}
VARIANTS: dict[str, Keys] = {
    "fsdp": {},
    "lora": LORA,
    "megatron": MEGATRON,
    "resume": {"save_steps": 3},
    "vllm": VLLM,
    # of single trainers
    "packed": {"packing": True, "padding_free": True, "max_length": 64},
    "precomputed": {"precompute_ref_log_probs": True, "sync_ref_model": None, "ref_model_sync_steps": None},
    "twice": {"num_iterations": 2, "generation_batch_size": 8, "mask_truncated_completions": True},
    "ahead": {"max_staleness": 1, "generation_batch_size": 8},
    "dynamic": {"dynamic_sample": True, "generation_batch_size": 8, "num_generations": 2},
    "pool": {"reward_processes": 1},
    "turns": {
        "dataset": Data("tasks"),
        "eval_dataset": None,
        "eval_steps": None,
        "environment": "turns",
        "reward_funcs": None,
        "reward_weights": None,
        "reward_model": None,
    },
    "own critic": {"value_model": Model("policy"), "reward_model": None, "reward_weights": [1.0, 0.1]},
    "all tokens": {"gkd_logits_topk": None},
    "its own teacher": {
        "teacher_model": None,
        "dataset": Data("own prompts"),
        "eval_dataset": Data("three own prompts"),
    },
    "by the teacher": {"seq_kd": True, "sft_alpha": None},
}
KEYS_OF_BOTH: dict[tuple[str, str], Keys] = {  # trainer and variant
    ("dpo", "lora"): OWN_REFERENCE,
    ("grpo", "lora"): OWN_REFERENCE,
    ("gkd", "vllm"): {"teacher_engine": "vllm", "teacher_engine_kwargs": {"max_model_len": 2560}, "sft_alpha": 0.0},
    ("sft", "resume"): {"model": Model("dropping"), "disable_dropout": False},
    ("sampling", "resume"): {"save_steps": None, "num_sampling_batches": 1},
}


@dataclass(frozen=True)
class Case:
    """One run, or one that is stopped and resumed."""

    trainer: str
    variant: str
    runtime: str

    @property
    def name(self) -> str:
        return f"{self.trainer}/{self.variant}/{self.runtime}"

    @property
    def place(self) -> str | None:
        """The device groups, by their name in ``GROUPS``; None: the command line looks after them."""
        if (self.variant, self.runtime) == ("megatron", "ray-apart"):
            return "ray-apart of two learners"
        if self.variant == "megatron" and self.runtime == "ray":
            return "ray of megatron"
        return self.runtime if self.runtime in GROUPS else None

    @property
    def start(self) -> str:
        """Cases with the same one run in processes that are started once."""
        if self.is_command:
            return f"{self.runtime} of {self.trainer}"
        if self.variant == "vllm":
            return f"vllm, {self.runtime}"
        if self.runtime in ("off", "inprocess"):
            return ONE_PROCESS
        if self.runtime in ("ray", "ray-apart"):
            return "ray"
        return "torchrun, megatron" if self.variant == "megatron" else "torchrun"

    @property
    def is_command(self) -> bool:
        return self.runtime.endswith("command")

    def command(self, file: str) -> list[str]:
        """What a user writes behind ``python -m`` or torchrun's ``-m``."""
        trainer = ["trainers", self.trainer] if self.trainer == "pretrain" else [f"trainers.{self.trainer}"]
        on_ray = ["--use_ray", "true", "--device_groups", json.dumps(GROUPS_OF_GRPO)]
        return [*trainer, "--config", file, *(on_ray if self.runtime.startswith("ray") else [])]

    @property
    def is_resumed(self) -> bool:
        return self.variant == "resume"

    def settings(self, models: Path, data: Path, output_dir: Path) -> Keys:
        """The keys of its YAML file; a key that is None is left out."""
        keys = {**SHARED, "output_dir": str(output_dir)}
        keys |= TRAINING if self.trainer != "sampling" else {}
        keys |= OF_TRAINER[self.trainer] | VARIANTS[self.variant]
        keys |= KEYS_OF_BOTH.get((self.trainer, self.variant), {})
        return {name: _placed(value, models, data) for name, value in keys.items() if value is not None}


def _placed(value: Any, models: Path, data: Path) -> Any:
    if isinstance(value, Data):
        return str(data / f"{value.name}.jsonl")
    if isinstance(value, Model):
        return str(models / value.name)
    return [_placed(item, models, data) for item in value] if isinstance(value, list) else value


def _cases(trainers: Sequence[str], variant: str, *runtimes: str) -> list[Case]:
    return [Case(trainer, variant, runtime) for trainer in trainers for runtime in runtimes]


LEARNERS = RECORDED[:-1]
CASES = [
    *_cases(RECORDED, "fsdp", *RUNTIMES),
    Case("pretrain", "fsdp", "command"),
    Case("sft", "fsdp", "torchrun-command"),
    Case("grpo", "fsdp", "ray-command"),
    *_cases(LEARNERS, "lora", "off", "ray"),
    *_cases(["grpo"], "lora", "ray-apart"),
    *_cases(LEARNERS, "megatron", "torchrun", "ray"),
    *_cases(["grpo"], "megatron", "ray-apart"),
    *_cases(RECORDED, "resume", "off", "ray"),
    *_cases(["sft", "grpo"], "resume", "torchrun"),
    *_cases(["sft"], "packed", "off", "torchrun"),
    *_cases(["dpo"], "precomputed", "off", "ray-apart"),
    *_cases(["grpo"], "twice", "off", "torchrun"),
    *_cases(["grpo"], "ahead", "inprocess", "ray-apart"),
    *_cases(["grpo"], "dynamic", "off", "ray"),
    *_cases(["grpo"], "pool", "off", "ray-apart"),
    *_cases(["grpo"], "turns", "off", "torchrun"),
    *_cases(["ppo"], "own critic", "off", "ray-apart"),
    *_cases(["gkd"], "all tokens", "off", "torchrun"),
    *_cases(["gkd"], "its own teacher", "off", "ray"),
    *_cases(["gkd"], "by the teacher", "off", "ray-apart"),
    *_cases(["grpo"], "vllm", "off", "ray-apart"),
    *_cases(["gkd"], "vllm", "off"),
]
