"""How fast is GRPO on one GPU, and where does each second go? Beside it, TRL with the same vLLM.

    python -m benchmarks.gpu.grpo [--shape 0.6b] [--prompts 64] [--generations 8] [--length 512] [--json FILE]
    python -m benchmarks.gpu.grpo --apart --staleness 1 --parts ours     # two GPUs: what overlap gives

Random weights in a Qwen3 shape, prompts of 16 tokens, completions that hardly ever stop, one optimizer step a
generation, bfloat16. Both sides generate in the process that trains. A step is the whole loop: weights to vLLM,
generation, rewards, update. The first step (compilation, warming up) is not counted. ``peak`` is the memory in use on
the device in counted steps. The two floors: decoding at full batch without log-probabilities, and 6 x parameters x
tokens at the rate of bfloat16 matrix products that this GPU was measured to have.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.device_memory import PeakMemory
from benchmarks.gpu.rewards import asked, even
from benchmarks.gpu.shapes import SHAPES, save_shape
from benchmarks.origin import origin
from rayhelper import RayHelper

GIB = 2**30
PROMPT = 16  # tokens
WARM = 1  # steps that are not counted: compilation, warming up


def rows_of(num_prompts: int) -> list[dict[str, str]]:
    return [{"prompt": f"{k:04d} is the number "[:PROMPT]} for k in range(num_prompts)]


def ours(options: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """Medians of what the trainer itself tells of each step."""
    from trainers.grpo import GRPOTrainer
    from trainers.grpo_config import GRPOConfig

    size = options.prompts * options.generations
    config = GRPOConfig(
        model=model,
        dataset=rows_of(options.prompts),
        output_dir=str(folder / "ours"),
        reward_funcs=["benchmarks.gpu.rewards.even"],
        num_generations=options.generations,
        per_device_train_batch_size=options.micro,
        global_batch_size=size,
        generation_batch_size=size,
        max_prompt_length=PROMPT,
        max_completion_length=options.length,
        max_steps=WARM + options.steps,
        logging_steps=1,
        learning_rate=1e-6,
        gradient_checkpointing=options.checkpointing,
        torch_compile=options.compile,
        rollout_engine="vllm",
        sleep_level=0 if options.apart else options.sleep_level,
        offload_optimizer=options.offload,
        offload_model=options.offload,
        max_staleness=options.staleness,
        vllm_max_num_seqs=size,
        vllm_enforce_eager=options.eager,
        vllm_engine_kwargs={"kv_cache_memory_bytes": int(options.kv_gib * GIB)},
    )
    apart = {
        "trainer": {"device": "GPU", "ranks": [0], "workers": ["train"]},
        "engine": {"device": "GPU", "ranks": [1], "workers": ["rollout"]},
    }
    session = RayHelper.session(apart) if options.apart else contextlib.nullcontext()
    with PeakMemory() as peak, session:
        GRPOTrainer(config).train()
    lines = [json.loads(line) for line in (folder / "ours" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "time/step" in line][WARM:]
    names = [name for name in steps[0] if name.startswith(("time/", "throughput/"))] + ["completions/mean_length"]
    found = {name: statistics.median(step[name] for step in steps) for name in names}
    tokens = size * found["completions/mean_length"]
    return {
        "seconds": found["time/step"],
        "tokens_per_second": tokens / found["time/step"],
        "peak_gib": peak.gib(since=asked[WARM - 1]),
        "tokens": tokens,
        "phases": found,
    }


def trls(options: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    seconds: list[float] = []
    lengths: list[float] = []
    size = options.prompts * options.generations
    with PeakMemory() as peak:

        class Clock(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                self.since = time.perf_counter()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - self.since)

            def on_log(self, *args: Any, logs: Any = None, **__: Any) -> None:
                if logs and "completions/mean_length" in logs:
                    lengths.append(float(logs["completions/mean_length"]))

        arguments = GRPOConfig(
            output_dir=str(folder / "trl"),
            num_generations=options.generations,
            per_device_train_batch_size=options.micro_trl,
            gradient_accumulation_steps=size // options.micro_trl,
            max_completion_length=options.length,
            max_steps=WARM + options.steps,
            learning_rate=1e-6,
            bf16=True,
            gradient_checkpointing=options.checkpointing_trl,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=options.trl_share,
            vllm_max_model_length=PROMPT + options.length + 16,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model, reward_funcs=even, args=arguments, train_dataset=Dataset.from_list(rows_of(options.prompts))
        )
        trainer.add_callback(Clock())
        trainer.train()
    step = statistics.median(seconds[WARM:])
    tokens = size * statistics.median(lengths[WARM:])
    return {
        "seconds": step,
        "tokens_per_second": tokens / step,
        "peak_gib": peak.gib(asked[WARM - 1]),
        "tokens": tokens,
    }


def floors(options: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """Seconds that vLLM needs for the tokens alone, and the rate of matrix products."""
    import torch
    from vllm import LLM, SamplingParams

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        since = time.perf_counter()
        for _ in range(10):
            a @ a
        torch.cuda.synchronize()
        times.append((time.perf_counter() - since) / 10)
    rate = 2 * 8192**3 / min(times)
    del a
    size = options.prompts * options.generations
    llm = LLM(
        model, dtype="bfloat16", max_num_seqs=size, max_model_len=PROMPT + options.length, skip_tokenizer_init=True
    )
    prompts = [{"prompt_token_ids": [5 + k % 200] * PROMPT} for k in range(size)]
    params = SamplingParams(max_tokens=options.length, ignore_eos=True, detokenize=False)
    seconds = []
    for _ in range(2):
        since = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - since)
    return {"decode_seconds": min(seconds), "matrix_tflops": rate / 1e12}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--micro_trl", type=int, default=32)
    parser.add_argument("--kv_gib", type=float, default=30)
    parser.add_argument("--trl_share", type=float, default=0.3)
    parser.add_argument("--sleep_level", type=int, default=2)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--apart", action="store_true", help="train on GPU 0, generate on GPU 1, by Ray")
    parser.add_argument("--staleness", type=int, default=0, help="max_staleness; needs --apart")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--checkpointing_trl", action="store_true")
    parser.add_argument("--parts", nargs="+", default=["ours", "trls", "floors"])
    parser.add_argument("--json")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # part, folder: a process of its own
    options = parser.parse_args()
    if options.one:
        part, folder = options.one
        found = globals()[part](options, f"{folder}/model", Path(folder))
        (Path(folder) / f"{part}.json").write_text(json.dumps(found))
        return
    target = options.json or (Path(os.environ["OUT"]) / f"grpo_{options.shape}.json" if "OUT" in os.environ else None)
    with tempfile.TemporaryDirectory() as folder:
        found = {"parameters": save_shape(options.shape, Path(folder) / "model")}
        for part in options.parts:
            arguments = [*sys.argv[1:], "--one", part, folder]
            code = subprocess.run([sys.executable, "-m", "benchmarks.gpu.grpo", *arguments]).returncode
            result = Path(folder) / f"{part}.json"
            found[part] = json.loads(result.read_text()) if result.exists() else {"failed": code}
            if target:  # after each part, so that nothing is lost to one that takes too long
                Path(target).write_text(json.dumps({**origin(), "options": vars(options), **found}, indent=1))
    show(options, found)


def show(options: argparse.Namespace, found: dict[str, Any]) -> None:
    print(f"GRPO, {options.shape} ({found['parameters'] / 1e6:.0f} M), {options.prompts} x {options.generations} x "
          f"{options.length} tokens")  # fmt: skip
    for part in ("ours", "trls"):
        result = found.get(part, {})
        if "seconds" in result:
            print(f"{part:<6}{result['seconds']:8.2f} s a step{result['tokens_per_second']:10.0f} completion tokens/s"
                  f"{result['peak_gib']:8.1f} GiB peak")  # fmt: skip
    for name, value in found.get("ours", {}).get("phases", {}).items():
        print(f"  {name:<44}{value:12.3f}")
    print(json.dumps(found.get("floors")))


if __name__ == "__main__":
    main()
