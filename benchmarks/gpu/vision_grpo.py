"""A GRPO step of a vision model of Qwen2.5-VL-3B's shape (random weights) on drawn pictures, beside TRL's.

    python -m benchmarks.gpu.vision_grpo [--sides ours trl] [--steps 4] [--limit 240] [--tiny]

The data are ``examples/grpo/count_shapes.py``: 8 pictures of 112 x 112 pixels x 8 completions of 128 tokens a step, the
vision tower and the aligner frozen, bfloat16 over float32 weights, gradient checkpointing. Both sides complete prompts
with the trained model itself. Seconds are those of the later half of the steps; GiB is torch's peak. Each side is a
process of its own, ended after ``--limit`` seconds. Written to $OUT/vision_grpo.json.
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
from pathlib import Path
from typing import Any

from benchmarks.origin import origin
from benchmarks.tiny import vision as tiny

LARGE = {
    "text": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "vocab_size": 151936,
        "initializer_range": 0.02,
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
}


def save_model(folder: Path, *, is_tiny: bool) -> None:
    """Writes the model, its tokenizer and its processor."""
    import torch
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tiny.save_vision(folder, "qwen2_5_vl")
    if is_tiny:
        return
    config = transformers.Qwen2_5_VLConfig.from_pretrained(folder)
    told: dict[str, Any] = config.to_dict()
    told["text_config"] |= {**LARGE["text"], "layer_types": None}
    told["vision_config"] |= LARGE["vision"]
    large = transformers.Qwen2_5_VLConfig(**told)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForImageTextToText.from_config(large, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    sizes = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}}
    Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, temporal_patch_size=2, **sizes).save_pretrained(folder)


def ours(model: Path, folder: Path, steps: int) -> list[dict[str, float]]:
    import yaml

    keys = {
        "model": str(model),
        "external_plugins": ["examples/grpo/count_shapes.py"],
        "dataset": "count_shapes",
        "reward_funcs": ["external_r1v_acc", "format"],
        "freeze_vit": True,
        "freeze_aligner": True,
        "num_generations": 8,
        "global_batch_size": 64,
        "per_device_train_batch_size": 8,
        "max_completion_length": 128,
        "gradient_checkpointing": True,
        "max_steps": steps,
        "save_strategy": "no",
        "report_to": ["none"],
        "output_dir": str(folder / "out"),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(keys))
    subprocess.run([sys.executable, "-m", "trainers.grpo", "--config", str(folder / "run.yaml")], check=True)
    lines = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    return [
        {"seconds": one["step_time"], "generate": one.get("time/generate", 0.0), "gib": one.get("peak_memory_gib", 0.0)}
        for one in lines
        if "loss" in one
    ]


def trl(model: Path, folder: Path, steps: int) -> list[dict[str, float]]:
    import torch
    from datasets import Dataset
    from PIL import Image
    from transformers import AutoProcessor, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from examples.grpo import count_shapes

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
    kept: list[dict[str, float]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize() if torch.cuda.is_available() else None
            peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
            kept.append({"seconds": time.perf_counter() - self.start, "gib": peak})

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=8,
        num_generations=8,
        max_completion_length=128,
        max_steps=steps,
        bf16=torch.cuda.is_available(),
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
    parser.add_argument("--sides", nargs="+", default=["ours", "trl"], choices=["ours", "trl"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit", type=float, default=240.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--side", help=argparse.SUPPRESS)  # of a process of its own
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        found = {"ours": ours, "trl": trl}[args.side](args.folder / "model", args.folder, args.steps)
        (args.folder / f"{args.side}.json").write_text(json.dumps(found))
        return
    results: dict[str, Any] = {**origin()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model", is_tiny=args.tiny)
        for side in args.sides:
            command = [
                sys.executable,
                "-m",
                __spec__.name,
                "--side",
                side,
                "--folder",
                name,
                "--steps",
                str(args.steps),
            ]
            try:
                ended = subprocess.run(command, timeout=args.limit, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                said = ended.stdout.decode(errors="replace")
            except subprocess.TimeoutExpired as error:
                said = (error.stdout or b"").decode(errors="replace")
            steps = folder / f"{side}.json"
            found = json.loads(steps.read_text()) if steps.exists() else []
            late = found[len(found) // 2 :]
            results[side] = {"steps": found}
            if late:
                seconds, gib = statistics.median(one["seconds"] for one in late), max(one["gib"] for one in found)
                print(f"{side:6s} {seconds:8.2f} s a step  {gib:6.1f} GiB  {len(found)} steps", flush=True)
            else:
                print(f"{side} failed:\n{said[-3000:]}", flush=True)
    (Path(os.environ.get("OUT", ".")) / "vision_grpo.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
