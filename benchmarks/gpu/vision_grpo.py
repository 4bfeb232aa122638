"""A GRPO step of a vision model (random weights) on drawn pictures, beside TRL's with the same model.

    python -m benchmarks.gpu.vision_grpo [--model qwen2_5_vl|qwen3_5] [--engine hf|vllm] [--sides ours trl]
        [--steps 4] [--length 128] [--limit 240] [--tiny]
    python -m benchmarks.gpu.vision_grpo --engine vllm --steps 2 --limit 260      # two steps, vLLM on both sides

``qwen2_5_vl`` has the shape of Qwen2.5-VL-3B, ``qwen3_5`` that of Qwen3.5-2B. The data are
``examples/grpo/count_shapes.py``: 8 pictures of 112 x 112 pixels x 8 completions of ``--length`` tokens a step, the
vision tower and the aligner frozen, bfloat16 over float32 weights, gradient checkpointing. ``--engine``: what completes
prompts on both sides, the trained model itself or vLLM on the same GPU, which sleeps meanwhile; ours compares the
fingerprints of all parts after every update of weights. The reward needs math-verify, and vLLM needs torchvision.

Seconds are those of the later half of the steps, tokens those of completions in them; GiB is the most memory of the GPU
in use, whoever allocated it. Each side is a process of its own, ended after ``--limit`` seconds. Written to
$OUT/vision_grpo.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.device_memory import PeakMemory
from benchmarks.origin import origin
from benchmarks.tiny import vision as tiny

NUM_COMPLETIONS = 64  # a step
LARGE: dict[str, dict[str, dict[str, Any]]] = {
    "qwen2_5_vl": {
        "text": {
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "vocab_size": 151936,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        "vision": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "initializer_range": 0.02,
        },
    },
    "qwen3_5": {
        "text": {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 32768,
            "vocab_size": 248320,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.25,
            },
        },
        "vision": {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "num_position_embeddings": 2304,
            "initializer_range": 0.02,
        },
    },
}


def save_model(folder: Path, kind: str, *, is_tiny: bool) -> None:
    """Writes the model, its tokenizer and its processor."""
    import torch
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tiny.save_vision(folder, kind, **tiny.IN_VLLM[kind])
    if is_tiny:
        return
    told: dict[str, Any] = transformers.AutoConfig.from_pretrained(folder).to_dict()
    sizes = LARGE[kind]
    told["text_config"] |= {**sizes["text"], "layer_types": None}
    told["vision_config"] |= sizes["vision"]
    told["tie_word_embeddings"] = sizes["text"].get("tie_word_embeddings", False)
    large = transformers.AutoConfig.for_model(told.pop("model_type"), **told)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForImageTextToText.from_config(large, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    edges = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}}
    patches = {"patch_size": sizes["vision"]["patch_size"], "merge_size": 2, "temporal_patch_size": 2}
    Qwen2VLImageProcessorPil(**patches, **edges).save_pretrained(folder)
    videos = folder / "video_preprocessor_config.json"  # vLLM asks it for the largest video, whatever the data are
    videos.write_text(json.dumps(json.loads(videos.read_text()) | patches | edges))


def engine_arguments(kind: str) -> dict[str, Any]:
    """Of vLLM, on both sides. Where its delta rule's kernels of flashinfer are not installed, those of Triton."""
    return {"gdn_prefill_backend": "triton"} if kind == "qwen3_5" and find_spec("flashinfer") is None else {}


def ours(model: Path, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    import torch
    import yaml

    on_gpu = torch.cuda.is_available()
    of_vllm: dict[str, Any] = {
        "rollout_engine": "vllm",
        "vllm_gpu_memory_utilization": 0.3 if on_gpu else None,
        "vllm_max_model_len": 1024,
        "vllm_max_num_seqs": NUM_COMPLETIONS,
        "sleep_level": 1 if on_gpu else 0,
        "vllm_engine_kwargs": engine_arguments(args.model),
    }
    keys = {
        "model": str(model),
        "external_plugins": ["examples/grpo/count_shapes.py"],
        "dataset": "count_shapes",
        "reward_funcs": ["external_r1v_acc", "format"],
        "freeze_vit": True,
        "freeze_aligner": True,
        "num_generations": 8,
        "global_batch_size": NUM_COMPLETIONS,
        "per_device_train_batch_size": 8,
        "max_completion_length": args.length,
        "gradient_checkpointing": True,
        "max_steps": args.steps,
        "save_strategy": "no",
        "report_to": ["none"],
        "output_dir": str(folder / "out"),
        **(of_vllm if args.engine == "vllm" else {}),
        **({} if on_gpu else {"dtype": "bfloat16"}),  # vLLM's delta rule on a CPU knows no float32
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(keys))
    subprocess.run([sys.executable, "-m", "trainers.grpo", "--config", str(folder / "run.yaml")], check=True)
    lines = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    told = ("time/", "sampling/", "completions/mean_length", "peak_memory_gib")
    return [
        {"seconds": one["step_time"], **{name: one[name] for name in one if name.startswith(told)}}
        for one in lines
        if "loss" in one
    ]


def trl(model: Path, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    import torch
    from datasets import Dataset
    from PIL import Image
    from transformers import AutoProcessor, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from examples.grpo import count_shapes

    if args.engine == "vllm" and torch.cuda.is_available():  # TRL passes no further arguments to vLLM
        from trl.generation import vllm_generation

        vllm_generation.LLM = functools.partial(vllm_generation.LLM, **engine_arguments(args.model))

    def opened(row: dict[str, Any]) -> dict[str, Any]:
        import io

        text = row["messages"][0]["content"].replace("<image>", "")
        prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
        return {
            "prompt": prompt,
            "images": [Image.open(io.BytesIO(one)).convert("RGB") for one in row["images"]],
            "solution": row["solution"],
        }

    rows = Dataset.from_list([opened(row) for row in count_shapes.count_shapes("train")])
    kept: list[dict[str, Any]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize() if torch.cuda.is_available() else None
            kept.append({"seconds": time.perf_counter() - self.start})

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=8,
        num_generations=8,
        max_completion_length=args.length,
        max_steps=args.steps,
        bf16=torch.cuda.is_available(),
        use_vllm=args.engine == "vllm" and torch.cuda.is_available(),
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=1024,
        vllm_enable_sleep_mode=True,
        model_init_kwargs={"dtype": "float32"},
        save_strategy="no",
        report_to=[],
    )
    trainer = GRPOTrainer(
        str(model),
        args=config,
        train_dataset=rows,
        reward_funcs=lambda completions, **_: [float(len(str(one)) % 2) for one in completions],
        processing_class=AutoProcessor.from_pretrained(model),
        callbacks=[Clock()],
    )
    for name, weight in trainer.model.named_parameters():
        weight.requires_grad_("visual" not in name)
    trainer.train()
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2_5_vl", choices=sorted(LARGE))
    parser.add_argument("--engine", default="hf", choices=["hf", "vllm"])
    parser.add_argument("--sides", nargs="+", default=["ours", "trl"], choices=["ours", "trl"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--limit", type=float, default=240.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--side", help=argparse.SUPPRESS)  # of a process of its own
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        found = {"ours": ours, "trl": trl}[args.side](args.folder / "model", args.folder, args)
        (args.folder / f"{args.side}.json").write_text(json.dumps(found))
        return
    for package in ("math_verify", *(["torchvision"] if args.engine == "vllm" else [])):
        if find_spec(package) is None:
            raise SystemExit(f"{package} is not installed")
    results: dict[str, Any] = {**origin(), "model": args.model, "engine": args.engine, "length": args.length}
    written = Path(os.environ.get("OUT", ".")) / "vision_grpo.json"
    with tempfile.TemporaryDirectory() as name, PeakMemory() as memory:
        folder = Path(name)
        save_model(folder / "model", args.model, is_tiny=args.tiny)
        free_gpu()
        for side in args.sides:
            command = [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--side", side, "--folder", name]
            started = time.perf_counter()
            with (folder / f"{side}.log").open("wb") as log:
                process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
                try:
                    process.wait(args.limit)
                except subprocess.TimeoutExpired:
                    log.write(b"\nended: it took longer than --limit\n")
                    os.killpg(process.pid, signal.SIGKILL)  # with those that it has started
                    process.wait()
            steps = folder / f"{side}.json"
            found = json.loads(steps.read_text()) if steps.exists() else []
            late = found[len(found) // 2 :]
            results[side] = {"steps": found, "gib": memory.gib(started), "whole_s": time.perf_counter() - started}
            if late:
                seconds = statistics.median(one["seconds"] for one in late)
                results[side]["seconds"] = seconds
                rate = NUM_COMPLETIONS * args.length / seconds
                told = f"{rate:9,.0f} tokens/s {results[side]['gib']:6.1f} GiB  {len(found)} steps"
                print(f"{side:6s} {seconds:8.2f} s a step  {told}", flush=True)
            else:
                results[side]["log"] = (folder / f"{side}.log").read_text(errors="replace")[-4000:]
                print(f"{side} failed:\n{results[side]['log']}", flush=True)
            written.write_text(json.dumps(results, indent=2))


def free_gpu() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
