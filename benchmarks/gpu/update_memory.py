"""How much memory does one update take at a vocabulary of 152 k and sequences of 4 k tokens, and how long?

    python -m benchmarks.gpu.update_memory [--sequences 4] [--length 4096] [--json FILE]   (OUT=FOLDER: its folder)

One SFT update and one GRPO update of the 596 M Qwen3 shape (random float32 weights, forward in bfloat16, gradient
checkpointing, AdamW, SDPA), all sequences in one micro-batch. Ours is ``FsdpBackend.step``; the peer, in the same run,
is TRL's trainer with its chunked head kernels: ``SFTTrainer.train`` over rows of token ids, and ``GRPOTrainer``'s own
loss, backward and optimizer step on given completions. Each is measured in a process of its own: the peak that torch
allocated in the updates after the first, and their median seconds. ``beside`` is that peak without weights, gradients
and optimizer states (16 bytes a parameter), which are the same on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.origin import origin

SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}
UPDATES = 4
PROMPT = 512  # tokens of each GRPO sequence that are no completion
GIB = 2**30


def save_model(folder: Path, **changes: Any) -> None:
    """The shape with random weights, and a tokenizer that TRL accepts."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.golden.tiny import tiny_tokenizer

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE | changes)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def token_ids(num_sequences: int, length: int, vocabulary: int) -> Any:
    import numpy as np

    return np.random.default_rng(0).integers(4, vocabulary, (num_sequences, length))


def ours(kind: str, model: Path, num_sequences: int, length: int) -> Callable[[], Any]:
    """One update of our backend."""
    import numpy as np
    import torch

    from rayhelper import RayHelper
    from trainers.backends.fsdp import FsdpBackend
    from trainers.batch import Ragged, Samples
    from trainers.losses.policy import policy_gradient_loss
    from trainers.losses.tokens import sft_loss

    RayHelper.init_process_group()  # of one worker: FSDP then runs the layers in bfloat16, as it does for several
    backend = FsdpBackend(
        model,
        sharding="full_shard",
        dtype="bfloat16",
        learning_rate=1e-6,
        num_training_steps=100,
        gradient_checkpointing=True,
    )
    ids = token_ids(num_sequences, length, backend.module.config.vocab_size)
    mask = np.ones(ids.shape, bool)
    mask[:, : 1 if kind == "sft" else PROMPT] = False
    samples = Samples(
        input_ids=Ragged.of(ids, np.int64),
        target_mask=Ragged.of(mask, bool),
        advantages=np.linspace(-1, 1, num_sequences, dtype=np.float32),
    )
    num_tokens = float(mask.sum())

    def loss(logps: Any, entropy: Any, mask: Any, micro: Any, metrics: Any) -> torch.Tensor:
        if kind == "sft":
            return sft_loss(logps, mask, normaliser=num_tokens)
        advantages = torch.tensor(micro.advantages).to(logps)
        return policy_gradient_loss(logps, None, advantages, mask, loss_type="dapo", normaliser=num_tokens)[0]

    return lambda: backend.step(samples, loss, micro_batch_size=num_sequences).values()["loss"]


def trls_sft(model: Path, num_sequences: int, length: int, reset: Callable[[], None]) -> list[float]:
    """Seconds of the updates of ``SFTTrainer.train``; ``reset`` is called after the first."""
    import datasets
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.seconds, self.since = [], time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize()
            self.seconds.append(time.perf_counter() - self.since)
            if len(self.seconds) == 1:
                reset()
            self.since = time.perf_counter()

    built = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    ids = token_ids(num_sequences, length, built.config.vocab_size).tolist()
    clock = Clock()
    SFTTrainer(
        built,
        SFTConfig(
            **trl_settings(num_sequences),
            max_length=length,
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
        train_dataset=datasets.Dataset.from_dict({"input_ids": ids * UPDATES, "labels": ids * UPDATES}),
        processing_class=tokenizer_of(model),
        callbacks=[clock],
    ).train()
    return list(clock.seconds)


def trls_grpo(model: Path, num_sequences: int, length: int) -> Callable[[], Any]:
    """One update by the loss of TRL's ``GRPOTrainer``."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    built = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    trainer = GRPOTrainer(
        built,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(**trl_settings(num_sequences), num_generations=num_sequences, max_completion_length=length),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a"] * 8}),
        processing_class=tokenizer_of(model),
    )
    trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trainer.model.train()
    optimizer = trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    ids = torch.tensor(token_ids(num_sequences, length, built.config.vocab_size), device=trainer.model.device)
    completions = ids[:, PROMPT:]
    inputs = {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": torch.ones_like(ids[:, :PROMPT]),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": torch.linspace(-1, 1, num_sequences, device=ids.device),
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


def tokenizer_of(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def trl_settings(num_sequences: int) -> dict[str, Any]:
    import torch

    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": num_sequences,
        "max_steps": UPDATES,
        "learning_rate": 1e-6,
        "bf16": torch.cuda.is_available(),
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(who: str, kind: str, model: Path, num_sequences: int, length: int) -> dict[str, float]:
    """Peak GiB and median seconds of the updates after the first."""
    import torch

    def reset() -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    if (who, kind) == ("trl", "sft"):
        seconds = trls_sft(model, num_sequences, length, reset)
    else:
        update = ours(kind, model, num_sequences, length) if who == "ours" else trls_grpo(model, num_sequences, length)
        seconds = []
        for k in range(UPDATES):
            since = time.perf_counter()
            update()
            synchronize()
            seconds.append(time.perf_counter() - since)
            if k == 0:
                reset()
    peak = torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else float("nan")
    return {"peak_gib": peak, "seconds": statistics.median(seconds[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"], help="fewer, to try it without a GPU")
    parser.add_argument("--vocabulary", type=int, default=SHAPE["vocab_size"])
    parser.add_argument("--json")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # who, kind, folder: a process of its own
    options = parser.parse_args()
    if options.one:
        who, kind, folder = options.one
        print(json.dumps(measure(who, kind, Path(folder), options.sequences, options.length)))
        return
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), num_hidden_layers=options.layers, vocab_size=options.vocabulary)
        for kind in ("sft", "grpo"):
            for who in ("ours", "trl"):
                arguments = [*sys.argv[1:], "--one", who, kind, folder]
                done = subprocess.run(
                    [sys.executable, "-m", "benchmarks.gpu.update_memory", *arguments],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                rows[f"{kind} {who}"] = json.loads(done.stdout.splitlines()[-1])
    fixed = 16 * num_parameters(options.layers, options.vocabulary) / GIB
    print(f"{'update':<12}{'peak GiB':>10}{'beside GiB':>12}{'seconds':>10}{'tokens/s':>12}")
    for name, row in rows.items():
        row["beside_gib"] = row["peak_gib"] - fixed
        row["tokens_per_s"] = options.sequences * options.length / row["seconds"]
        print(
            f"{name:<12}{row['peak_gib']:>10.2f}{row['beside_gib']:>12.2f}{row['seconds']:>10.3f}"
            f"{row['tokens_per_s']:>12.0f}"
        )
    file = options.json or (Path(os.environ["OUT"]) / "update_memory.json" if "OUT" in os.environ else None)
    if file:
        Path(file).write_text(json.dumps({**origin(), "arguments": vars(options), "rows": rows}, indent=2))


def num_parameters(layers: int, vocabulary: int) -> int:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"num_hidden_layers": layers, "vocab_size": vocabulary}))
    return sum(weight.numel() for weight in model.parameters())


if __name__ == "__main__":
    main()
