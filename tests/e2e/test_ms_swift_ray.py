"""ms-swift's own files for Ray and Megatron that name Qwen3.5, unchanged but for models, data, devices and lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tests.backends.ranks import run_ranks
from tests.backends.test_megatron_kept import seeing, tensors_of
from tests.e2e.runs import lines
from tests.e2e.test_megatron import ON_CPU, process
from tests.golden.tiny import tiny_tokenizer
from trainers.cli import load_config
from trainers.gkd.config import GKDConfig

FILE = Path(__file__).with_name("ms_swift_ray") / "rollout_colocate_teacher_colocate.yaml"
TEXTS = ["How many?", "Say it again.", "Which one is it?", "Yes or no?"]


def rows(folder: Path) -> Path:
    """As the data sets of the file have them."""
    file = folder / "alpaca.jsonl"
    told = [{"instruction": text, "input": "", "output": text[::-1]} for text in TEXTS * 8]
    file.write_text("\n".join(map(json.dumps, told)))
    return file


def model(folder: Path, seed: int) -> str:
    seeing("qwen3_5", folder, seed, max_position_embeddings=16_384)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def test_qwen3_5_is_distilled_on_megatron(tmp_path: Path) -> None:
    student, teacher = model(tmp_path / "student", 0), model(tmp_path / "teacher", 1)
    data = rows(tmp_path)
    given: dict[str, Any] = {
        "model": student,
        "teacher_model": teacher,
        "dataset": f"{data}#32",
        "train.gpus": 2,
        "rollout.gpus": 2,
        "use_vllm": False,  # which runs no Qwen3.5 on a CPU
        "max_completion_length": 6,
        "max_steps": 2,
        "dataset_num_proc": 1,
        "output_dir": str(tmp_path / "run"),
        "dtype": "float32",
        "external_plugins": json.dumps(ON_CPU["external_plugins"]),
        "report_to": "none",
    }
    words = [f"--{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in given.items()]
    config = load_config(GKDConfig, ["--config", str(FILE), *words])
    assert (config.backend, config.tensor_model_parallel_size, config.sequence_parallel) == ("megatron", 2, True)
    assert (config.gkd_logits_topk, config.lora_rank, config.recompute_granularity) == (64, 8, "selective")
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(2, process, 2, store.port, [("gkd", config)], folder=tmp_path, joined=False)
    first, second = lines(tmp_path / "run")
    assert (first["step"], second["step"]) == (1, 2)
    assert 0 < first["loss"] < 10
    with safe_open(tmp_path / "run" / "final" / "adapter" / "adapter_model.safetensors", "pt") as adapter:
        names = [name for name in adapter.keys() if "lora_B" in name]  # noqa: SIM118
        assert any("in_proj_qkv" in name for name in names)
        assert all(adapter.get_tensor(name).abs().max() > 0 for name in names if "in_proj_qkv" in name)
    found, before = tensors_of(tmp_path / "run" / "final"), tensors_of(Path(student))
    assert found.keys() == before.keys()
    for name, value in before.items():
        if name.startswith(("mtp.", "model.visual.")):
            assert torch.equal(found[name], value), name
