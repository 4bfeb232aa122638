"""ms-swift and verl as their own examples run GRPO on GSM8K, on one GPU: commands, and the steps that they report.

Each has packages of its own in ``$PEERS/swift`` and ``$PEERS/verl`` (``pack_peers`` says how); where a folder is
missing, the side takes what is installed. All sides have the same model, prompts, reward, rollout, learning rate and no
KL term, which both examples have: it costs a second model.

ms-swift 4.6: ``examples/train/grpo/plugin/gsm8k/gsm8k.sh``, without DeepSpeed, which one process has no use for.
verl 0.9: ``examples/grpo_trainer/run_qwen3_8b_fsdp.sh``. It asks for FlashAttention 2, of which there is no wheel; the
documented other choice is ``attn_implementation=sdpa``, and that wants padded rows: packed ones attend to each other's
places at the price of their square.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

PEERS = Path(os.environ.get("PEERS", "/tmp/gpu/peers"))
LEARNING_RATE = 1e-6
PROMPT_LENGTH = 512  # tokens of a prompt at most; GSM8K's have fewer
ON_GPU = torch.cuda.is_available()
COLOCATED = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.4,
    "vllm_tensor_parallel_size": 1,
    "sleep_level": 1,
}


def swift(asked: dict[str, Any]) -> tuple[list[str], Path]:
    """The command of ms-swift, and the file of its steps."""
    folder, here = Path(asked["folder"]), Path(__file__).parent
    rows = [json.loads(line) for line in Path(asked["data"]).read_text(encoding="utf-8").splitlines()]
    data = folder / "data.jsonl"
    data.write_text(
        "".join(json.dumps({"messages": row.pop("prompt"), **row}) + "\n" for row in rows), encoding="utf-8"
    )
    settings = {
        "model": asked["model"],
        "model_type": "llama",
        "template": "chatml",  # SmolLM2's; ms-swift knows neither by the folder
        "dataset": str(data),
        "external_plugins": str(here / "swift_side.py"),
        "reward_funcs": "real_reward",
        "callbacks": "real_steps",
        "tuner_type": "full",
        "torch_dtype": "bfloat16" if ON_GPU else "float32",
        **(COLOCATED if ON_GPU else {"use_vllm": False}),
        "num_generations": asked["generations"],
        "max_length": PROMPT_LENGTH,
        "max_completion_length": asked["length"],
        "per_device_train_batch_size": asked["micro"],
        "gradient_accumulation_steps": asked["rows"] // asked["micro"],
        "max_steps": asked["steps"],
        "learning_rate": LEARNING_RATE,
        "temperature": 1.0,
        "beta": 0.0,
        "dataloader_num_workers": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "output_dir": str(folder / "out"),
        **asked["keys"],
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", _word(value))]
    command = [sys.executable, "-m", "swift.cli.rlhf", "--rlhf_type", "grpo", *words]
    offline = {"MODELSCOPE_REPO_TREE_PAGE_MAX_ATTEMPTS": "1"}  # it asks its hub, and else tries again for 7 s
    return [*_environment("swift", REAL_STEPS=asked["steps_file"], **offline), *command], Path(asked["steps_file"])


def verl(asked: dict[str, Any]) -> tuple[list[str], Path]:
    """The command of verl, and the file of its steps, which its own logger writes."""
    import pandas

    folder = Path(asked["folder"])
    rows = [json.loads(line) for line in Path(asked["data"]).read_text(encoding="utf-8").splitlines()]
    told = [
        {
            "data_source": "openai/gsm8k",
            "prompt": row["prompt"],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"split": "train", "index": k},
        }
        for k, row in enumerate(rows)
    ]
    pandas.DataFrame(told).to_parquet(folder / "data.parquet")
    settings = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "data.train_files": str(folder / "data.parquet"),
        "data.val_files": str(folder / "data.parquet"),
        "data.train_batch_size": asked["prompts"],
        "data.max_prompt_length": PROMPT_LENGTH,
        "data.max_response_length": asked["length"],
        "data.filter_overlong_prompts": True,
        "data.truncation": "error",
        "actor_rollout_ref.model.path": asked["model"],
        "actor_rollout_ref.model.use_remove_padding": False,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        "actor_rollout_ref.actor.optim.lr": LEARNING_RATE,
        "actor_rollout_ref.actor.ppo_mini_batch_size": asked["prompts"],
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 24576,
        "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.actor.entropy_coeff": 0,
        "actor_rollout_ref.actor.fsdp_config.param_offload": False,
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload": False,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.6,
        "actor_rollout_ref.rollout.n": asked["generations"],
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": True,
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": 24576,
        "reward.custom_reward_function.path": str(Path(__file__).parent / "verl_side.py"),
        "reward.custom_reward_function.name": "compute_score",
        "trainer.balance_batch": True,
        "trainer.logger": '["console","file"]',
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.val_before_train": False,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": str(folder / "out"),
        "trainer.total_training_steps": asked["steps"],
        "+ray_kwargs.ray_init.include_dashboard": False,  # a page in the browser; not packed
        "hydra.run.dir": str(folder / "hydra"),
        **asked["keys"],
    }
    words = [f"{name}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
    return [*_environment("verl", VERL_FILE_LOGGER_PATH=asked["steps_file"]), *command], Path(asked["steps_file"])


def step_of_verl(found: dict[str, float]) -> dict[str, Any]:
    """A step under the names that all sides have; ``generate`` holds the transfer of weights, as TRL's does."""
    generate = found["timing_s/gen"] + found["timing_s/update_weights"]
    return {
        "seconds": found["timing_s/step"],
        "generate": generate,
        "update": found["timing_s/step"] - generate,
        "reward": found["critic/score/mean"],
        "completions/mean_length": found["response_length/mean"],
        "timers": {name: value for name, value in found.items() if name.startswith("timing_s/")},
    }


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _environment(peer: str, **variables: str) -> list[str]:
    """``env`` with the peer's packages before all others."""
    places = [str(PEERS / peer)] if (PEERS / peer).exists() else []
    places += filter(None, [os.environ.get("PYTHONPATH", "")])
    return ["env", f"PYTHONPATH={os.pathsep.join(places)}", *(f"{name}={value}" for name, value in variables.items())]
