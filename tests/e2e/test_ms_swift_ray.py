"""ms-swift's own files for Ray and Megatron that name Qwen3.5, unchanged but for models, data, devices and lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from benchmarks.tiny.vision import TEMPLATE
from rayhelper.planning.dry_run import make_plan
from tests.backends.ranks import run_ranks
from tests.backends.test_megatron_kept import seeing, tensors_of
from tests.e2e.runs import lines
from tests.e2e.test_megatron import ON_CPU, process
from tests.golden.tiny import tiny_tokenizer
from trainers.cli import load_config, placement
from trainers.gkd.config import GKDConfig
from trainers.gkd.trainer import GKDTrainer
from trainers.rollout.vllm.vision import features

FOLDER = Path(__file__).with_name("ms_swift_ray")
FILE = FOLDER / "rollout_colocate_teacher_colocate.yaml"
TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248_320,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {  # of about those sizes
    "Qwen3.5-0.8B": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8, "intermediate_size": 3584}
    | {"num_key_value_heads": 2},
    "Qwen3.5-2B": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 8, "intermediate_size": 6144}
    | {"num_key_value_heads": 2},
    "Qwen3.5-4B": {"hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 16, "intermediate_size": 9216}
    | {"num_key_value_heads": 4, "linear_num_value_heads": 32},
}
TEXTS = ["How many?", "Say it again.", "Which one is it?", "Yes or no?"]


def rows(folder: Path) -> Path:
    """As the data sets of the file have them."""
    file = folder / "alpaca.jsonl"
    told = [{"instruction": text, "input": "", "output": text[::-1]} for text in TEXTS * 8]
    file.write_text("\n".join(map(json.dumps, told)))
    return file


def model(folder: Path, seed: int) -> str:
    seeing("qwen3_5", folder, seed, max_position_embeddings=16_384)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE  # as Qwen3.5's, it takes texts and pictures as parts
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.xdist_group("vllm")  # whose fields are checked
@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("*.yaml")))
def test_a_file_is_planned_and_passes_all_checks_that_come_before_a_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "find_spec", lambda name: name)  # as if torchvision were installed here
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    for model_name, shape in SHAPES.items():
        place = tmp_path / model_name
        tiny_tokenizer().save_pretrained(place)
        written = {"model_type": "qwen3_5", "text_config": TEXT | shape, "vision_config": {"model_type": "qwen3_5"}}
        (place / "config.json").write_text(json.dumps(written))
        text = text.replace(f"Qwen/{model_name}", str(place))
    (tmp_path / "x.yaml").write_text(text)
    config = load_config(GKDConfig, ["--config", str(tmp_path / "x.yaml")])
    assert (config.backend, config.tensor_model_parallel_size) == ("megatron", 2)
    groups = placement(GKDTrainer, config)
    assert groups.group_of("train").num_workers == groups.group_of("rollout").num_workers == 4
    GKDTrainer.check(config, groups)
    plan = make_plan(str(tmp_path / "x.yaml"), None, 8, None, 80.0)
    assert [str(mistake) for mistake in plan.findings.mistakes] == []
    assert plan.fits


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
