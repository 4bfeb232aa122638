"""How fast is on-policy distillation on one GPU, by each way to ask the teacher? Beside it, TRL's DistillationTrainer.

    python -m benchmarks.gpu.gkd [--student 0.6b] [--teacher 4b] [--prompts 64] [--length 512]

Random weights in Qwen3 shapes, bfloat16, prompts of 16 tokens, completions that hardly ever stop, one optimizer step a
generation; vLLM completes prompts in the process that trains, on both sides. A step is the whole loop: weights to vLLM,
generation, the teacher's answers, update.

whole: the teacher runs with the student, the whole vocabulary is compared; on the host while nobody asks it.
top: it gives its ``top`` likeliest tokens ahead of the update. vllm: so does a second engine of vLLM, in a process of
its own on the same GPU, asleep while nobody asks it.
trl: its chunked loss over the whole vocabulary, teacher on the GPU throughout, vLLM colocated. (Its experimental
GKDTrainer generates with transformers and holds whole logits: not measured.)
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.device_memory import PeakMemory
from benchmarks.gpu.grpo import GIB, PROMPT, rows_of
from benchmarks.gpu.parts import arguments, run_parts
from benchmarks.gpu.shapes import SHAPES, saved_apart
from benchmarks.gpu.steps import ON_GPU, clock, our_steps, phases, trl_settings
from rayhelper import RayHelper

BETA = 0.5


def whole(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    return ours(options, folder)


def top(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    return ours(options, folder, gkd_logits_topk=options.top)


def vllm(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    room = {"kv_cache_memory_bytes": int(options.teacher_kv_gib * GIB)} if ON_GPU else {}
    groups = {
        "student": {"device": "GPU", "ranks": [0], "workers": ["train", "rollout"]},
        "judge": {"shares_devices_with": "student", "workers": ["teacher"]},
    }
    with RayHelper.session(groups) if ON_GPU else contextlib.nullcontext():
        return ours(
            options,
            folder,
            gkd_logits_topk=options.top,
            teacher_engine="vllm",
            teacher_engine_kwargs={"max_model_len": PROMPT + options.length + 16, **room},
            **({} if ON_GPU else {"offload_teacher_model": False}),
        )


def ours(options: argparse.Namespace, folder: Path, **settings: Any) -> dict[str, Any]:
    """Medians of what the trainer itself tells of each step."""
    from trainers.gkd.config import GKDConfig
    from trainers.gkd.trainer import GKDTrainer

    moments: list[float] = []

    class Watched(GKDTrainer):
        def learn(self, *given: Any, **named: Any) -> Any:
            moments.append(time.perf_counter())
            return super().learn(*given, **named)

    given: dict[str, Any] = {
        "model": str(folder / "model"),
        "teacher_model": str(folder / "teacher"),
        "offload_teacher_model": True,
        "dataset": rows_of(options.prompts),
        "output_dir": str(folder / "ours"),
        "lmbda": 1.0,
        "beta": BETA,
        "temperature": 1.0,
        "per_device_train_batch_size": options.micro,
        "global_batch_size": options.prompts,
        "max_prompt_length": PROMPT,
        "max_completion_length": options.length,
        "max_steps": options.warm + options.steps,
        "save_steps": 0,
        "logging_steps": 1,
        "report_to": ["none"],
        "learning_rate": 1e-6,
        "torch_compile": options.compile,
        "rollout_engine": "vllm",
        "sleep_level": 2 if ON_GPU else 0,
        "vllm_max_num_seqs": options.prompts,
        "vllm_engine_kwargs": {"kv_cache_memory_bytes": int(options.kv_gib * GIB)} if ON_GPU else {},
    }
    with PeakMemory() as peak:
        Watched(GKDConfig(**given | settings)).train()
    steps = our_steps(folder / "ours", options.warm)
    found = phases(steps)
    tokens = options.prompts * statistics.median(step["completions/mean_length"] for step in steps)
    return {
        "seconds": found["time/step"],
        "tokens_per_second": tokens / found["time/step"],
        "peak_gib": peak.gib(since=moments[options.warm - 1]),
        "tokens": tokens,
        "loss": steps[-1]["loss"],
        "phases": found,
    }


def trl(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from datasets import Dataset
    from trl import DistillationConfig, DistillationTrainer

    watch = clock()
    with PeakMemory() as peak:
        trainer = DistillationTrainer(
            model=str(folder / "model"),
            teacher_model=str(folder / "teacher"),
            args=DistillationConfig(
                **trl_settings(folder / "trl", options.warm + options.steps),
                model_init_kwargs={"dtype": "float32"},
                teacher_model_init_kwargs={"dtype": "bfloat16" if ON_GPU else "float32"},
                beta=BETA,
                per_device_train_batch_size=options.micro_trl,
                gradient_accumulation_steps=options.prompts // options.micro_trl,
                gradient_checkpointing=False,
                max_completion_length=options.length,
                use_vllm=ON_GPU,
                vllm_mode="colocate",
                vllm_gpu_memory_utilization=options.trl_share,
                vllm_max_model_length=PROMPT + options.length + 16,
            ),
            train_dataset=Dataset.from_list(rows_of(options.prompts)),
            callbacks=[watch],
        )
        trainer.train()
    step = statistics.median(watch.seconds[options.warm :])
    tokens = options.prompts * statistics.median(watch.logged("completions/mean_length")[options.warm :])
    return {
        "seconds": step,
        "tokens_per_second": tokens / step,
        "peak_gib": peak.gib(since=watch.ends[options.warm]),
        "tokens": tokens,
        "loss": watch.logged("loss")[-1],
    }


def save(options: argparse.Namespace, folder: Path) -> dict[str, int]:
    student, teacher = saved_apart(options.student, folder), saved_apart(options.teacher, folder, "teacher", seed=1)
    return student | {"teacher_parameters": teacher["parameters"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", "--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--teacher", choices=SHAPES, help="default: 4b, or tiny beside a tiny student")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warm", type=int, default=2, help="steps that are not counted: compilation, pinning memory")
    parser.add_argument("--top", type=int, default=64)
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--micro_trl", type=int, default=16)
    parser.add_argument("--kv_gib", type=float, default=8)
    parser.add_argument("--teacher_kv_gib", type=float, default=8)
    parser.add_argument("--trl_share", type=float, default=0.3)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    options = arguments(parser, list(PARTS), limit_s=150)
    options.teacher = options.teacher or ("tiny" if options.student == "tiny" else "4b")
    found = run_parts("benchmarks.gpu.gkd", options, PARTS, partial(save, options))
    print(f"GKD, {options.student} ({found['parameters'] / 1e6:.0f} M) learns from {options.teacher} "
          f"({found['teacher_parameters'] / 1e6:.0f} M), {options.prompts} x {options.length} tokens")  # fmt: skip
    for name in options.parts:
        if "seconds" in (one := found[name]):
            print(f"{name:<24}{one['seconds']:8.2f} s a step{one['tokens_per_second']:10.0f} completion tokens/s"
                  f"{one['peak_gib']:8.1f} GiB peak")  # fmt: skip
            for phase, value in one.get("phases", {}).items():
                print(f"  {phase:<44}{value:12.3f}")


PARTS = {"whole": whole, "top": top, "vllm": vllm, "trl": trl}

if __name__ == "__main__":
    main()
