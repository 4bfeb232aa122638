"""How fast is SFT with packing on one GPU? Beside it, TRL's SFTTrainer with packing; first, whether ours is right.

    python -m benchmarks.gpu.sft [--shape 0.6b] [--rows 16] [--length 4096] [--micro 4] [--attention varlen]
    python -m benchmarks.gpu.sft --parts trl:micro=2 trl:attention=flex_attention ours:compile=false

Random weights in a Qwen3 shape, bfloat16, AdamW, no checkpointing. Documents of log-normal lengths, about a fifth of a
row in the mean, best fit into rows of ``length`` tokens (on both sides by ``trl.pack_dataset``); a step learns from
``rows`` rows. Tokens a second are those of whole steps, data side included; MFU counts 6 x parameters x tokens of 989
TFLOP/s. ``data`` is the share of the steps in which the driver takes rows; ``prepare``: seconds to tokenize and pack.

``check`` compares documents in one row with each document alone, in float32 and by sdpa: loss and all gradients.
``attention`` measures one layer's attention, forward and backward, by each way that keeps documents apart.

TRL joins the rows of a micro-batch into one row with positions that start anew with every document (its collator,
``padding_free``). With ``sdpa``, which is what there is without a package for FlashAttention, transformers builds a
mask from these positions: documents do not look at each other, but all pairs of tokens of the whole micro-batch are
computed, so small micro-batches suit it; ``flex_attention`` leaves out what the mask forbids.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.device_memory import PeakMemory
from benchmarks.gpu.parts import arguments, run_parts
from benchmarks.gpu.shapes import SHAPES, saved_apart, tokenizer
from benchmarks.gpu.steps import ON_GPU, clock, our_steps, phases, synchronize, trl_settings
from rayhelper import RayHelper

WARM = 2  # steps that are not counted: compilation for changing shapes
PEAK_FLOPS = 989e12
DTYPE: Any = "bfloat16" if ON_GPU else "float32"


def documents(options: argparse.Namespace) -> list[dict[str, str]]:
    """Enough texts for all steps. A character is a token; the end-of-sequence token comes on top."""
    random = np.random.default_rng(0)
    needed = 1.1 * (WARM + options.steps) * options.rows * options.length
    texts: list[dict[str, str]] = []
    while needed > 0:
        drawn = random.lognormal(np.log(0.12 * options.length), 1.0)
        letters = random.integers(ord("a"), ord("z") + 1, int(np.clip(drawn, 8, options.length - 1)), dtype=np.uint8)
        texts.append({"text": letters.tobytes().decode()})
        needed -= len(letters) + 1
    return texts


def rates(options: argparse.Namespace, tokens: float, seconds: float, num_parameters: int) -> dict[str, float]:
    return {
        "seconds": seconds / options.steps,
        "tokens_per_second": tokens / seconds,
        "mfu": 6 * num_parameters * tokens / seconds / PEAK_FLOPS,
    }


def ours(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from trainers.parts.policy import Policy
    from trainers.sft.config import SFTConfig
    from trainers.sft.loss import supervised_loss
    from trainers.sft.trainer import SFTTrainer

    moments: list[float] = []

    class WatchedPolicy(Policy):
        def step(self, *given: Any) -> Any:  # type: ignore[override]
            moments.append(time.perf_counter())
            return super().step(*given)

    class Watched(SFTTrainer):
        def __init__(self, config: SFTConfig) -> None:
            super().__init__(config)
            self.policy = WatchedPolicy(config, loss=supervised_loss)

    config = SFTConfig(
        model=str(folder / "model"),
        model_init_kwargs={"attn_implementation": options.attention},
        dataset=documents(options),
        output_dir=str(folder / "ours"),
        packing=True,
        max_length=options.length,
        global_batch_size=options.rows,
        per_device_train_batch_size=options.micro,
        padding_free=options.padding_free,
        gradient_checkpointing=options.checkpointing,
        torch_compile=options.compile,
        learning_rate=1e-6,
        max_steps=WARM + options.steps,
        save_steps=0,
        logging_steps=1,
        report_to=["none"],
        peak_tflops=PEAK_FLOPS / 1e12,
    )
    with PeakMemory() as peak:
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401  (imports are no preparation)
        from trl import pack_dataset  # noqa: F401

        since = time.perf_counter()
        trainer = Watched(config)
        prepared = time.perf_counter() - since
        trainer.train()
    lines = our_steps(folder / "ours", 0)
    tokens, steps = lines[-1]["num_tokens"] - lines[WARM - 1]["num_tokens"], lines[WARM:]
    found = phases(steps)
    num_parameters = sum(weight.numel() for weight in trainer.policy.built.module.parameters())
    return {
        **rates(options, tokens, sum(step["time/step"] for step in steps), num_parameters),
        "peak_gib": peak.gib(since=moments[WARM]),
        "data": found["time_share/data"],
        "prepare": prepared,
        "loss": steps[-1]["loss"],
        "phases": found,
    }


def trl(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    micro = options.micro_trl
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model",
        dtype="float32",
        attn_implementation="sdpa" if options.attention == "varlen" else options.attention,
    )
    watch = clock()
    with PeakMemory() as peak:
        since = time.perf_counter()
        trainer = SFTTrainer(
            model,
            SFTConfig(
                **trl_settings(folder / "trl", WARM + options.steps),
                packing=True,
                packing_strategy="bfd",
                max_length=options.length,
                per_device_train_batch_size=micro,
                gradient_accumulation_steps=options.rows // micro,
                gradient_checkpointing=options.checkpointing,
                torch_compile=options.compile_trl,
            ),
            train_dataset=Dataset.from_list(documents(options)),
            processing_class=AutoTokenizer.from_pretrained(folder / "model"),
            callbacks=[watch],
        )
        prepared = time.perf_counter() - since
        trainer.train()
    seen = watch.logged("num_tokens")
    num_parameters = sum(weight.numel() for weight in model.parameters())
    return {
        **rates(options, seen[-1] - seen[WARM - 1], sum(watch.seconds[WARM:]), num_parameters),
        "peak_gib": peak.gib(since=watch.ends[WARM]),
        "prepare": prepared,
        "loss": watch.logged("loss")[-1],
    }


def check(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Distances from the truth, which is each document alone in float32, of ways to run packed rows.

    The distance of ``attention`` may be that of sdpa's mask in the same dtype and half of it more; rows whose documents
    look at each other, the mistake that is looked for, must be told from that.

    Raises:
        AssertionError: it is more.
    """
    from trainers.batch import Sequences
    from trainers.data.rows import pack

    RayHelper.init_process_group()
    apart = short_documents(options)
    together = pack(apart, max_length=options.length)
    run_on = Sequences(together.input_ids, together.target_mask)
    low = {"dtype": DTYPE, "sharding": "full_shard" if DTYPE == "bfloat16" else "no_shard"}
    ways: dict[str, tuple[Sequences, dict[str, Any]]] = {
        "sdpa": (together, {"attention": "sdpa", **low}),
        options.attention: (together, {"attention": options.attention, **low}),
        f"{options.attention}, padding free": (together, {"attention": options.attention, "padding_free": True, **low}),
        f"{options.attention}, checkpointing": (
            together,
            {"attention": options.attention, "gradient_checkpointing": True, **low},
        ),
        "documents that look at each other": (run_on, {"attention": "sdpa", **low}),
    }
    wanted = answers(folder, apart, attention="sdpa")
    found: dict[str, dict[str, float]] = {}
    for name, (rows, settings) in ways.items():
        loss, gradient = answers(folder, rows, **settings)
        gc.collect()  # the model before
        torch.cuda.empty_cache()
        distance = float((gradient - wanted[1]).norm() / wanted[1].norm())
        found[name] = {"loss": abs(loss - wanted[0]) / abs(wanted[0]), "gradient": distance}
        print(f"{name:<40}" + "".join(f"{key} {value:<12.3e}" for key, value in found[name].items()), flush=True)
    *right, wrong = found
    for key in ("gradient", "loss"):
        allowed = 1.5 * found["sdpa"][key] + (1e-4 if DTYPE == "float32" else 2e-3)
        for name in right:
            assert found[name][key] <= allowed, f"{name}: {key} is off by {found[name][key]:.2e}, allowed {allowed:.2e}"
    assert found[wrong]["gradient"] > 3 * found[options.attention]["gradient"], "this check could not tell them apart"
    return found


def short_documents(options: argparse.Namespace) -> Any:
    """About two rows of documents, none of them longer than half a row."""
    from trainers.batch import Ragged, Sequences

    random = np.random.default_rng(1)
    lengths = random.integers(8, options.length // 2, 8)
    ids = [random.integers(4, 260, length) for length in lengths]
    return Sequences(Ragged.of(ids, np.int64), Ragged.of([np.arange(len(row)) > 0 for row in ids], bool))


def answers(folder: Path, rows: Any, *, attention: str, **settings: Any) -> tuple[float, torch.Tensor]:
    """The loss of one step on ``rows``, and all gradients as one vector on the CPU."""
    from trainers.backends.fsdp.backend import FsdpBackend
    from trainers.losses.tokens import sft_loss

    backend = FsdpBackend(
        folder / "model",
        model_init_kwargs={"attn_implementation": attention},
        learning_rate=1e-6,
        num_training_steps=9,
        max_grad_norm=0.0,
        **settings,
    )
    gradients: list[torch.Tensor] = []

    def keep(*_: Any) -> None:
        for weight in backend.module.parameters():
            gradient = weight.grad
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            gradients.append(whole.flatten().float().cpu())

    assert backend.optimizer is not None
    backend.optimizer.register_step_pre_hook(keep)
    num_tokens = int(rows.target_mask.values.sum())

    def loss(logps: Any, entropy: Any, mask: Any, micro: Any, metrics: Any) -> torch.Tensor:
        return sft_loss(logps, mask, normaliser=num_tokens)

    value = backend.step(rows, loss, micro_batch_size=2).values()["loss"]
    return value, torch.cat(gradients)


def attention(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Milliseconds of one layer's attention of a micro-batch, forward and backward, by each way."""
    from transformers import AutoConfig

    from trainers.backends.fsdp import packed_attention
    from trainers.backends.scores.inputs import model_inputs
    from trainers.data.rows import pack

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = AutoConfig.from_pretrained(folder / "model")
    packed = pack(documents_of(options), max_length=options.length)[: options.micro]
    inputs = model_inputs(packed, device)
    assert inputs.position_ids_BT is not None
    num_rows, width = inputs.position_ids_BT.shape
    sizes = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
    shapes = [(num_rows, width, heads, config.head_dim) for heads in sizes]
    heads = [torch.randn(*shape, device=device, dtype=getattr(torch, DTYPE), requires_grad=True) for shape in shapes]
    documents_BT = (inputs.position_ids_BT == 0).cumsum(-1)

    def by_mask() -> torch.Tensor:
        same = documents_BT[:, None, :, None] == documents_BT[:, None, None, :]
        causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        return partial(sdpa, mask=same & causal)

    def sdpa(query: Any, key: Any, value: Any, mask: Any) -> torch.Tensor:
        key, value = (one.repeat_interleave(sizes[0] // sizes[1], 1) for one in (key, value))
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    def by_flex() -> Any:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def allowed(row: Any, head: Any, query: Any, key: Any) -> Any:
            return (query >= key) & (documents_BT[row, query] == documents_BT[row, key])

        mask = create_block_mask(allowed, num_rows, None, width, width, device=device.type)
        return partial(torch.compile(flex_attention), block_mask=mask, enable_gqa=True)

    def by_varlen() -> Any:
        where = {"cu_seq_lens_q": inputs.document_starts, "max_length_q": inputs.longest_document}
        module = torch.nn.Module()
        return lambda *heads: packed_attention.varlen_attention(module, *heads, None, **where)[0]

    ways: dict[str, Callable[[], Any]] = {"sdpa": by_mask, "varlen": by_varlen}
    if device.type == "cuda":
        ways["flex_attention"] = by_flex
    found = {}
    for name, build in ways.items():
        attend = build()

        def once(attend: Any = attend) -> None:
            mixed = attend(*(one.transpose(1, 2) for one in heads))
            torch.autograd.grad(mixed.sum(), heads)

        for _ in range(3):
            once()
        synchronize()
        since = time.perf_counter()
        for _ in range(10):
            once()
        synchronize()
        found[name] = (time.perf_counter() - since) * 100
    return found


def documents_of(options: argparse.Namespace) -> Any:
    """As token ids."""
    from trainers.data.rows import load_rows, tokenize_sft

    return tokenize_sft(load_rows(documents(options), split="train"), tokenizer(), max_length=options.length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--rows", type=int, default=16, help="of a step")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row at most")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--attention", default="varlen", help="ours; and TRL's, where it is not varlen (sdpa then)")
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--micro_trl", type=int, default=1)
    parser.add_argument("--padding_free", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile_trl", action="store_true")
    trls = ["trl", "trl:micro_trl=2", "trl:micro_trl=4,attention=flex_attention", "trl:compile_trl=true"]
    options = arguments(parser, ["check", "attention", "ours", *trls, "ours:attention=sdpa"])
    found = run_parts("benchmarks.gpu.sft", options, PARTS, partial(saved_apart, options.shape))
    print(f"SFT, {options.shape} ({found['parameters'] / 1e6:.0f} M), {options.rows} rows of {options.length} tokens")
    results = {name: found[name] for name in options.parts if "mfu" in found[name]}
    best = max((one["tokens_per_second"] for name, one in results.items() if name.startswith("trl")), default=0)
    for name, one in results.items():
        times = f"{one['tokens_per_second'] / best:6.2f} x TRL's best" if best and name.startswith("ours") else ""
        print(f"{name:<44}{one['tokens_per_second']:10.0f} tokens/s{one['mfu']:8.1%}{one['peak_gib']:8.1f} GiB"
              f"{one['prepare']:7.1f} s to prepare{times}")  # fmt: skip
    if "failed" in found.get("check", {}):
        raise SystemExit("CHECK FAILED: packed rows are not what their documents are alone")


PARTS = {"check": check, "attention": attention, "ours": ours, "trl": trl}

if __name__ == "__main__":
    main()
