"""How much memory does one update take at a vocabulary of 152 k and sequences of 4 k tokens, and how long?

    python -m benchmarks.gpu.update_memory [--sequences 4] [--length 4096] [--json FILE]   (OUT=FOLDER: its folder)

One SFT update and one GRPO update of a Qwen3 shape (0.6b: 596 M; random weights, held in float32, forward in bfloat16,
gradient checkpointing, AdamW, SDPA), all sequences in one micro-batch. Ours is ``FsdpBackend.step``; the peer, in the
same run, is TRL's trainer with its chunked head kernels: ``SFTTrainer.train`` over rows of token ids, and
``GRPOTrainer``'s own loss, backward and optimizer step on given completions. The peak is what torch allocated in the
updates after the first, the seconds are their median. ``beside`` is that peak without weights, gradients and optimizer
states (16 bytes a parameter), which are the same on both sides.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.parts import arguments, run_parts
from benchmarks.gpu.shapes import SHAPES, saved_apart
from benchmarks.gpu.steps import ON_GPU, clock, synchronize, trl_settings

UPDATES = 4
GIB = 2**30


def ours(options: argparse.Namespace, model: Path, kind: str) -> Callable[[], Any]:
    """One update of our backend."""
    import numpy as np

    from rayhelper import RayHelper
    from trainers.backends.fsdp.backend import FsdpBackend
    from trainers.batch import Ragged, Samples
    from trainers.losses.policy import policy_gradient_loss
    from trainers.losses.tokens import sft_loss

    RayHelper.init_process_group()  # of one worker: FSDP then runs the layers in bfloat16, as it does for several
    backend = FsdpBackend(
        model,
        sharding="full_shard" if ON_GPU else "no_shard",
        dtype="bfloat16",
        learning_rate=1e-6,
        num_training_steps=100,
        gradient_checkpointing=True,
    )
    ids = token_ids(options, backend.module.config.vocab_size)
    mask = np.ones(ids.shape, bool)
    mask[:, : 1 if kind == "sft" else num_prompt_tokens(options)] = False
    samples = Samples(
        input_ids=Ragged.of(ids, np.int64),
        target_mask=Ragged.of(mask, bool),
        advantages=np.linspace(-1, 1, len(ids), dtype=np.float32),
    )
    num_tokens = float(mask.sum())

    def loss(logps: Any, entropy: Any, mask: Any, micro: Any, metrics: Any) -> torch.Tensor:
        if kind == "sft":
            return sft_loss(logps, mask, normaliser=num_tokens)
        advantages = torch.tensor(micro.advantages).to(logps)
        return policy_gradient_loss(logps, None, advantages, mask, loss_type="dapo", normaliser=num_tokens)[0]

    return lambda: backend.step(samples, loss, micro_batch_size=len(ids)).values()["loss"]


def trls_grpo(options: argparse.Namespace, folder: Path) -> Callable[[], Any]:
    """One update by the loss of TRL's ``GRPOTrainer``."""
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    built = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32")
    trainer = GRPOTrainer(
        built,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            **trls(options, folder), num_generations=options.sequences, max_completion_length=options.length
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a"] * 8}),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trainer.model.train()
    optimizer = trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    ids = torch.tensor(token_ids(options, built.config.vocab_size), device=trainer.model.device)
    prompts, completions = ids.split([num_prompt_tokens(options), ids.shape[1] - num_prompt_tokens(options)], dim=1)
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": torch.linspace(-1, 1, len(ids), device=ids.device),
        "num_items_in_batch": torch.tensor(completions.numel(), device=ids.device),
    }

    def update() -> float:
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    return update


def measured(update: Callable[[], Any]) -> dict[str, float]:
    """Peak GiB and median seconds of the updates after the first."""
    seconds = []
    for k in range(UPDATES):
        since = time.perf_counter()
        update()
        synchronize()
        seconds.append(time.perf_counter() - since)
        if k == 0:
            reset_peak()
    return {"peak_gib": peak_gib(), "seconds": statistics.median(seconds[1:])}


def sft_ours(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    return measured(ours(options, folder / "model", "sft"))


def grpo_ours(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    return measured(ours(options, folder / "model", "grpo"))


def grpo_trl(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    return measured(trls_grpo(options, folder))


def sft_trl(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """The updates of ``SFTTrainer.train``."""
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Reset(TrainerCallback):
        def on_step_end(self, arguments: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 1:
                reset_peak()

    built = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32")
    ids = token_ids(options, built.config.vocab_size).tolist()
    watch = clock()
    SFTTrainer(
        built,
        SFTConfig(**trls(options, folder), max_length=options.length, dataset_kwargs={"skip_prepare_dataset": True}),
        train_dataset=datasets.Dataset.from_dict({"input_ids": ids * UPDATES, "labels": ids * UPDATES}),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[watch, Reset()],
    ).train()
    return {"peak_gib": peak_gib(), "seconds": statistics.median(watch.seconds[1:])}


def trls(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    return {
        **trl_settings(folder / "trl", UPDATES),
        "per_device_train_batch_size": options.sequences,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }


def token_ids(options: argparse.Namespace, vocabulary: int) -> Any:
    import numpy as np

    return np.random.default_rng(0).integers(4, vocabulary, (options.sequences, options.length))


def num_prompt_tokens(options: argparse.Namespace) -> int:
    """Tokens of each GRPO sequence that are no completion."""
    return int(options.length) // 8


def reset_peak() -> None:
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / GIB if ON_GPU else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    options = arguments(parser, list(PARTS))
    found = run_parts("benchmarks.gpu.update_memory", options, PARTS, partial(saved_apart, options.shape))
    fixed = 16 * found["parameters"] / GIB
    print(f"{'update':<12}{'peak GiB':>10}{'beside GiB':>12}{'seconds':>10}{'tokens/s':>12}")
    for name in options.parts:
        if "seconds" in (row := found[name]):
            rate = options.sequences * options.length / row["seconds"]
            peak = row["peak_gib"]
            print(f"{name:<12}{peak:>10.2f}{peak - fixed:>12.2f}{row['seconds']:>10.3f}{rate:>12.0f}")


PARTS = {"sft_ours": sft_ours, "sft_trl": sft_trl, "grpo_ours": grpo_ours, "grpo_trl": grpo_trl}

if __name__ == "__main__":
    main()
