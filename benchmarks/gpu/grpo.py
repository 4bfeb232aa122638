"""How fast is GRPO on one GPU, and where does each second go? Beside it, TRL with the same vLLM.

    python -m benchmarks.gpu.grpo [--shape 0.6b] [--prompts 64] [--generations 8] [--length 512] [--json FILE]
    python -m benchmarks.gpu.grpo --apart 1 --parts ours ours:staleness=1     # two GPUs: what overlap gives

Random weights in a Qwen3 shape, prompts of 16 tokens, completions that hardly ever stop, one optimizer step a
generation, bfloat16. Both sides generate in the process that trains. A step is the whole loop: weights to vLLM,
generation, rewards, update. The first steps (compilation, pinning memory) are not counted. ``peak`` is the memory in
use on the device in counted steps. The two floors: ``decoding``, the same tokens from vLLM alone, all sequences at
once, without log-probabilities and detokenizing; and ``products``, the rate of bfloat16 matrix products, at which
6 x parameters x tokens would go through an update.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device_memory import PeakMemory
from benchmarks.gpu.host_time import shown, watched
from benchmarks.gpu.parts import arguments, run_parts
from benchmarks.gpu.rewards import asked, even
from benchmarks.gpu.shapes import SHAPES, saved_apart
from benchmarks.gpu.steps import ON_GPU, clock, our_steps, phases, synchronize, trl_settings
from rayhelper import RayHelper

GIB = 2**30
PROMPT = 16  # tokens


def rows_of(num_prompts: int) -> list[dict[str, str]]:
    return [{"prompt": f"{k:04d} is the number "[:PROMPT]} for k in range(num_prompts)]


def ours(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Medians of what the trainer itself tells of each step."""
    from benchmarks.gpu.measured import MeasuredGRPO
    from trainers.grpo.config import GRPOConfig

    size = options.prompts * options.generations
    config = GRPOConfig(
        model=str(folder / "model"),
        dataset=rows_of(options.prompts),
        output_dir=str(folder / "ours"),
        reward_funcs=["benchmarks.gpu.rewards.even"],
        num_generations=options.generations,
        per_device_train_batch_size=options.micro,
        global_batch_size=size,
        generation_batch_size=size,
        max_prompt_length=PROMPT,
        max_completion_length=options.length,
        max_steps=options.warm + options.steps,
        save_steps=0,
        logging_steps=1,
        learning_rate=1e-6,
        gradient_checkpointing=options.checkpointing,
        torch_compile=options.compile,
        activation_memory_budget=options.budget,
        rollout_engine="vllm",
        sleep_level=options.sleep_level if ON_GPU and not options.apart else 0,
        offload_optimizer=options.offload,
        offload_model=options.offload,
        optimizer_offload=options.rest,
        max_staleness=options.staleness,
        vllm_max_num_seqs=size,
        vllm_enforce_eager=options.eager,
        vllm_engine_kwargs=({"kv_cache_memory_bytes": int(options.kv_gib * GIB)} if ON_GPU else {}) | options.engine,
    )
    session = RayHelper.session(apart(options.apart)) if options.apart else contextlib.nullcontext()
    watching = watched() if options.host else contextlib.nullcontext([])
    with PeakMemory() as peak, session, watching as generations:
        MeasuredGRPO(config).train()
    steps = our_steps(folder / "ours", options.warm)
    found = phases(steps)
    found["completions/mean_length"] = statistics.median(step["completions/mean_length"] for step in steps)
    tokens = size * found["completions/mean_length"]
    return {
        "seconds": found["time/step"],
        "tokens_per_second": tokens / found["time/step"],
        "peak_gib": peak.gib(since=asked[options.warm - 1]),
        "peak_learning_gib": peak.gib(since=asked[-1]),
        "tokens": tokens,
        "phases": found,
        **({"host": generations[options.warm :]} if options.host else {}),
    }


def apart(num_each: int) -> dict[str, Any]:
    """Device groups: so many GPUs that train, as many that generate."""

    def group(first: int, *roles: str) -> dict[str, Any]:
        ranks = list(range(first, first + num_each)) if ON_GPU else num_each
        return {"device": "GPU" if ON_GPU else "CPU", "ranks": ranks, "workers": list(roles)}

    return {"trainers": group(0, "train", "reference", "teacher", "reward"), "engines": group(num_each, "rollout")}


def trl(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    size, watch = options.prompts * options.generations, clock()
    with PeakMemory() as peak:
        arguments = GRPOConfig(
            **trl_settings(folder / "trl", options.warm + options.steps),
            num_generations=options.generations,
            per_device_train_batch_size=options.micro_trl,
            gradient_accumulation_steps=size // options.micro_trl,
            max_completion_length=options.length,
            gradient_checkpointing=options.checkpointing_trl,
            use_vllm=ON_GPU,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=options.trl_share,
            vllm_max_model_length=PROMPT + options.length + 16,
        )
        trainer = GRPOTrainer(
            model=str(folder / "model"),
            reward_funcs=even,
            args=arguments,
            train_dataset=Dataset.from_list(rows_of(options.prompts)),
            callbacks=[watch],
        )
        trainer.train()
    step = statistics.median(watch.seconds[options.warm :])
    tokens = size * statistics.median(watch.logged("completions/mean_length")[options.warm :])
    return {
        "seconds": step,
        "tokens_per_second": tokens / step,
        "peak_gib": peak.gib(asked[options.warm - 1]),
        "tokens": tokens,
    }


def decoding(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Seconds of the tokens of a step from vLLM alone.

    The engine runs in this process, and captures a CUDA graph for the full batch alone: all sequences are equally long,
    so there is no other. Two processes that each import vLLM, and graphs of fifty sizes, took longer than the decoding.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not ON_GPU:
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    size = options.prompts * options.generations
    on_gpu = {
        "kv_cache_memory_bytes": int(options.kv_gib * GIB),
        "compilation_config": {"cudagraph_capture_sizes": [size]},
    }
    llm = LLM(
        str(folder / "model"),
        dtype="bfloat16" if ON_GPU else "float32",
        max_num_seqs=size,
        max_model_len=PROMPT + options.length,
        skip_tokenizer_init=True,
        enforce_eager=options.eager or not ON_GPU,
        **(on_gpu if ON_GPU else {}),
    )
    prompts: Any = [{"prompt_token_ids": [5 + k % 200] * PROMPT} for k in range(size)]

    def seconds(length: int) -> float:
        since = time.perf_counter()
        params = SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False)
        answers = llm.generate(prompts, params, use_tqdm=False)
        taken = time.perf_counter() - since
        assert all(len(answer.outputs[0].token_ids) == length for answer in answers)
        return taken

    starting = time.perf_counter() - began
    seconds(8)
    taken = seconds(options.length)
    return {"seconds": taken, "tokens_per_second": size * options.length / taken, "starting": starting}


def products(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """TFLOP/s of large matrix products, the best of twelve rounds."""
    size = 8192 if ON_GPU else 256
    a = torch.randn(size, size, device="cuda" if ON_GPU else "cpu", dtype=torch.bfloat16)
    times = []
    for _ in range(12):
        synchronize()
        since = time.perf_counter()
        for _ in range(10):
            a @ a
        synchronize()
        times.append((time.perf_counter() - since) / 10)
    return {"tflops": 2 * size**3 / min(times) / 1e12}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warm", type=int, default=2, help="steps that are not counted: compilation, pinning memory")
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--micro_trl", type=int, default=32)
    parser.add_argument("--kv_gib", type=float, default=30)
    parser.add_argument("--trl_share", type=float, default=0.3)
    parser.add_argument("--sleep_level", type=int, default=2)
    parser.add_argument("--offload", action="store_true", help="model and optimizer, while the engine generates")
    parser.add_argument("--rest", action="store_true", help="optimizer_offload: its states, also in passes")
    parser.add_argument("--apart", type=int, default=0, help="GPUs that train, and as many that generate, by Ray")
    parser.add_argument("--staleness", type=int, default=0, help="max_staleness; needs --apart")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--budget", type=float, default=1.0, help="activation_memory_budget; needs --compile")
    parser.add_argument("--engine", type=json.loads, default={}, help="further fields of vLLM's EngineArgs, as JSON")
    parser.add_argument("--host", action="store_true", help="what decoding steps take of the host; not with --apart")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--checkpointing_trl", action="store_true")
    options = arguments(parser, ["ours", "trl", "decoding", "products"], limit_s=300)
    save = partial(saved_apart, options.shape)
    show(options, run_parts("benchmarks.gpu.grpo", options, PARTS, save, file=f"grpo_{options.shape}"))


def show(options: argparse.Namespace, found: dict[str, Any]) -> None:
    print(f"GRPO, {options.shape} ({found['parameters'] / 1e6:.0f} M), {options.prompts} x {options.generations} x "
          f"{options.length} tokens")  # fmt: skip
    for name in options.parts:
        result = found[name]
        if "seconds" in result:
            peak = f"{result['peak_gib']:8.1f} GiB peak" if "peak_gib" in result else ""
            print(f"{name:<24}{result['seconds']:8.2f} s{result['tokens_per_second']:10.0f} completion tokens/s{peak}")
        for phase, value in result.get("phases", {}).items():
            print(f"  {phase:<44}{value:12.3f}")
        for generation in result.get("host", ()):
            print(f"  {shown(generation)}")
    if "tflops" in found.get("products", {}):
        rate = found["products"]["tflops"]
        tokens = options.prompts * options.generations * (PROMPT + options.length)
        print(f"products{rate:10.0f} TFLOP/s: {6e-12 * found['parameters'] * tokens / rate:.2f} s for an update")


PARTS = {"ours": ours, "trl": trl, "decoding": decoding, "products": products}

if __name__ == "__main__":
    main()
