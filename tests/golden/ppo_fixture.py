"""One batch of TRL 1.12's PPOTrainer, kept in ``ppo_trl_1_12.npz``: TRL 1.16, which tests run beside, has no PPO.

Run by hand, from the root of the repository, with TRL 1.12 in a folder of its own before the installed one:

    pip install --no-deps --target TRL_1_12 trl==1.12.0
    PYTHONPATH=TRL_1_12 HF_HUB_OFFLINE=1 python -m tests.golden.ppo_fixture

What runs is TRL's own ``train``, on one CPU in float32. Replaced are: generation, by fixed completions with the logits
of a forward pass; the reward model, by fixed scores; the shuffling of prompts. Weights come from NumPy's generator, so
that no release of torch draws others. Arrays are named ``case/name``; (B, T) arrays are as TRL pads them.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from tests.golden.tiny import save_tiny, tiny_model, tiny_tokenizer
from tests.golden.training import TRL_ARGUMENTS

FIXTURE = Path(__file__).with_name("ppo_trl_1_12.npz")
PAD, EOS = 0, 2
LONGEST = 7  # TRL's response_length
PROMPTS = [f"{i} times {'x' * (i % 5)}:" for i in range(16)]
SETTINGS: dict[str, Any] = {
    "learning_rate": 3e-4,
    "lr_scheduler_type": "constant",
    "adam_epsilon": 1e-6,  # above the rounding of gradients, which Adam makes into whole steps where they are nearly 0
    "num_ppo_epochs": 2,
    "temperature": 0.7,
    "kl_coef": 0.5,
    "cliprange": 0.02,  # narrow, so that tokens are clipped within so few steps
    "cliprange_value": 0.02,
}
CASES: dict[str, dict[str, Any]] = {
    "k1": {"kl_estimator": "k1"},
    "k3, missing end": {"kl_estimator": "k3", "missing_eos_penalty": 2.0},
    "k1, whitened, mini-batches": {"kl_estimator": "k1", "whiten_rewards": True, "num_mini_batches": 2},
    "k3, whitened, mini-batches, discounted": {
        "kl_estimator": "k3",
        "whiten_rewards": True,
        "num_mini_batches": 2,
        "gamma": 0.9,
        "lam": 0.5,
    },
}
KEPT = (
    "responses",
    "logprobs",
    "ref_logprobs",
    "values",
    "scores",
    "rewards",
    "advantages",
    "returns",
    "kl",
    "padding_mask",
    "padding_mask_p1",
)
KEPT_OF_STEPS = ("loss", "pg_loss", "vf_loss", "mini_batch_inds")
LOGGED = ("kl", "entropy", "non_score_reward", "rlhf_reward", "scores")


def completions() -> list[list[int]]:
    """One to seven letters; most end with the end token, some fill the limit without it, one fills it with it."""
    draws = np.random.default_rng(7)
    words = [draws.integers(10, 250, size=draws.integers(1, LONGEST + 1)).tolist() for _ in PROMPTS]
    words[1] = draws.integers(10, 250, size=LONGEST - 1).tolist()
    words[2] = draws.integers(10, 250, size=LONGEST).tolist()
    words[3] = []  # nothing but the end token
    return [[*word, EOS][:LONGEST] for word in words]


def scores() -> list[float]:
    return np.random.default_rng(8).normal(size=len(PROMPTS)).astype(np.float32).tolist()  # type: ignore[no-any-return]


def redraw(model: PreTrainedModel, seed: int) -> None:
    """Gives every tensor weights that depend on ``seed`` and its place alone."""
    draws = np.random.default_rng(seed)
    for weight in model.parameters():
        drawn = torch.from_numpy(draws.normal(size=tuple(weight.shape)).astype(np.float32))
        weight.data.copy_(drawn * 0.1 + (1 if weight.dim() == 1 else 0))


def save_models(folder: Path) -> tuple[str, str, str]:
    """A policy, a reference that is another model, and a critic."""
    saved = []
    for seed, name in enumerate(("policy", "reference")):
        model = tiny_model()
        redraw(model, seed)
        model.save_pretrained(save_tiny(folder / name))
        saved.append(str(folder / name))
    critic = AutoModelForSequenceClassification.from_pretrained(saved[0], num_labels=1, dtype=torch.float32)
    redraw(critic, seed=2)
    critic.save_pretrained(folder / "critic")
    return saved[0], saved[1], str(folder / "critic")


def some(weight: torch.Tensor) -> np.ndarray:
    """At most 64 entries, spread evenly over the tensor."""
    flat = weight.detach().flatten()
    return flat[:: -(-len(flat) // 64)].numpy().copy()


def as_numbers(value: Any) -> np.ndarray:
    return value.detach().clone().numpy() if isinstance(value, torch.Tensor) else np.array(value)


def run_trl(models: tuple[str, str, str], output_dir: str, case: dict[str, Any]) -> dict[str, np.ndarray]:
    """What TRL computed from one batch, and what it left of policy and critic."""
    ppo: Any = importlib.import_module("trl.experimental.ppo.ppo_trainer")
    config: Any = importlib.import_module("trl.experimental.ppo.ppo_config")
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    policy, reference = (AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) for name in models[:2])
    critic = AutoModelForSequenceClassification.from_pretrained(models[2], num_labels=1, dtype=torch.float32)
    settings = SETTINGS | case
    arguments = config.PPOConfig(
        output_dir=output_dir,
        per_device_train_batch_size=len(PROMPTS),  # every mini-batch is one micro-batch, and so one optimizer step
        response_length=LONGEST,
        total_episodes=len(PROMPTS),
        num_sample_generations=0,
        stop_token="eos",
        optim="adamw_torch",
        **TRL_ARGUMENTS | settings,
    )

    def batch_generation(model: Any, queries: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        padded = [[*ids, *[PAD] * (LONGEST - len(ids))] for ids in completions()]
        both = torch.cat([queries, torch.tensor(padded)], dim=1)
        logits = ppo.forward(model, both, PAD).logits[:, queries.shape[1] - 1 : -1]
        return both, logits / (settings["temperature"] + 1e-7)  # as generate's scores are

    reward_model = torch.nn.Identity()
    their_get_reward = ppo.get_reward

    def get_reward(model: Any, *rest: Any) -> Any:
        return (None, torch.tensor(scores()), None) if model is reward_model else their_get_reward(model, *rest)

    def collate(rows: list[dict[str, Any]]) -> Any:
        rows = sorted(rows, key=lambda row: row["index"])
        return tokenizer.pad({"input_ids": [row["input_ids"] for row in rows]}, return_tensors="pt")

    ppo.batch_generation, ppo.get_reward = batch_generation, get_reward
    rows = [{"index": index, "input_ids": tokenizer(prompt)["input_ids"]} for index, prompt in enumerate(PROMPTS)]
    trainer = ppo.PPOTrainer(
        args=arguments,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=reward_model,
        train_dataset=rows,
        value_model=critic,
        data_collator=collate,
    )
    kept: dict[str, np.ndarray] = {}
    steps: dict[str, list[np.ndarray]] = {name: [] for name in KEPT_OF_STEPS}
    gradients: dict[str, list[np.ndarray]] = {}
    backward = trainer.accelerator.backward

    def looking_backward(loss: torch.Tensor) -> None:
        seen = SimpleNamespace(**sys._getframe(1).f_locals)  # of PPOTrainer.train
        if not kept:
            kept.update({name: as_numbers(getattr(seen, name)) for name in KEPT})
        for name in KEPT_OF_STEPS:
            steps[name].append(as_numbers(getattr(seen, name)))
        backward(loss)
        for role, model in (("policy", policy), ("critic", critic)):
            for name, weight in model.named_parameters():
                if weight.grad is not None:
                    gradients.setdefault(f"{role}/gradient norms/{name}", []).append(as_numbers(weight.grad.norm()))

    trainer.accelerator.backward = looking_backward
    logged: dict[str, float] = {}
    trainer.log = logged.update  # before numbers are rounded to be shown
    np.random.seed(0)  # TRL shuffles mini-batches with this generator and does not seed it
    trainer.train()
    kept |= {name: np.stack(series) for name, series in (steps | gradients).items()}
    kept |= {f"objective/{name}": np.array(logged[f"objective/{name}"]) for name in LOGGED}
    for role, model in (("policy", policy), ("critic", critic)):
        kept |= {f"{role}/weights/{name}": some(weight) for name, weight in model.named_parameters()}
    return kept


def main() -> None:
    version = importlib.import_module("trl").__version__
    if version != "1.12.0":
        raise SystemExit(f"this needs TRL 1.12.0, found {version}: see the docstring")
    arrays: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        models = save_models(Path(folder))
        for name, case in CASES.items():
            arrays |= {f"{name}/{key}": value for key, value in run_trl(models, folder, case).items()}
    np.savez_compressed(FIXTURE, **arrays)


if __name__ == "__main__":
    main()
