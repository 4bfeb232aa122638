"""Files as users of ms-swift have them: what they ask for is done, and the rest is refused by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open

from tests.conftest import without_runtime
from tests.golden.tiny import save_tiny
from trainers.cli import load_config, main, placement
from trainers.commands import commands
from trainers.gkd.config import GKDConfig
from trainers.gkd.trainer import GKDTrainer
from trainers.grpo.config import GRPOConfig
from trainers.grpo.trainer import GRPOTrainer
from trainers.parts import engine as completions
from trainers.parts.checks import check_completions
from trainers.parts.engine import build_vllm, vllm_settings
from trainers.sampling.config import SamplingConfig
from trainers.sampling.trainer import SamplingTrainer
from trainers.sft.config import SFTConfig
from trainers.sft.trainer import SFTTrainer

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["--max_steps=2", "--max_completion_length=6", "--global_batch_size=8"]
WITHOUT_VLLM = ["--use_vllm=false"]
IMAGES = ["grpo_images"]  # tests/images
STARTS: dict[str, tuple[str, list[str]]] = {  # the command of each file, and what makes it small
    "grpo": ("rlhf", [*SHORT, "--soft_cache_length=4", "--steps_per_generation=2", *WITHOUT_VLLM]),
    "gkd_rollout_colocate_teacher_colocate": ("rlhf", [*SHORT, *WITHOUT_VLLM, "--teacher_model=TEACHER", "--lmbda=1"]),
    "gkd_rollout_separate_teacher_colocate": ("rlhf", [*SHORT, *WITHOUT_VLLM, "--teacher_model=TEACHER"]),
    "gkd_rollout_colocate_teacher_standalone": ("rlhf", [*SHORT, *WITHOUT_VLLM, "--teacher.model=TEACHER"]),
    "sft": ("sft", ["--max_steps=2", "--use_ray=false", "--dataset_num_proc=null"]),
    "sample": ("sample", ["--max_new_tokens=6", "--num_sampling_batches=2", "--use_ray=false"]),
}


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")  # grpo.yaml's ENV says false
    monkeypatch.setattr(logging.getLogger(), "handlers", [])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Student (or policy) and teacher."""
    student, teacher = (tmp_path_factory.mktemp(name) for name in ("student", "teacher"))
    return save_tiny(student), save_tiny(teacher, seed=1)


def test_every_file_is_started_here() -> None:
    assert {path.stem for path in (ROOT / "examples" / "ms_swift").glob("*.yaml")} == {*STARTS, *IMAGES}


@pytest.mark.parametrize("name", STARTS)
def test_a_file_of_ms_swift_runs_two_steps(name: str, models: tuple[str, str], tmp_path: Path) -> None:
    command, small = STARTS[name]
    arguments = ["--config", f"examples/ms_swift/{name}.yaml", "--model", models[0], f"--output_dir={tmp_path}"]
    with without_runtime():
        main(command, [*arguments, *(word.replace("TEACHER", models[1]) for word in small), "--report_to=none"])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 2
    resolved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    if name == "grpo":
        assert resolved["generation_batch_size"] == 16
        assert {"rewards/ms_swift_format/mean", "rewards/ms_swift_soft_overlong/mean"} <= set(lines[0])
    elif command == "rlhf":
        assert (resolved["teacher_model"], resolved["gkd_logits_topk"], resolved["lora_rank"]) == (models[1], 64, 8)
        with safe_open(tmp_path / "final" / "adapter" / "adapter_model.safetensors", "pt") as adapter:
            assert any(adapter.get_tensor(key).abs().max() > 0 for key in adapter.keys() if "lora_B" in key)  # noqa: SIM118


@pytest.mark.xdist_group("vllm")
def test_their_grpo_runs_with_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Any] = []

    def remembered(*args: Any, **kwargs: Any) -> Any:
        engines.append(build_vllm(*args, **kwargs))
        return engines[-1]

    monkeypatch.setattr(completions, "build_vllm", remembered)
    model = save_tiny(tmp_path / "model", head_dim=32)  # the smallest that vLLM's attention takes
    keys = ["--sleep_level=0", "--rollout.vllm_max_model_len=2064", "--vllm_enable_chunked_prefill=false"]
    small = [word for word in STARTS["grpo"][1] if word not in WITHOUT_VLLM]
    arguments = ["--config=examples/ms_swift/grpo.yaml", f"--model={model}", f"--output_dir={tmp_path}"]
    with without_runtime():
        main("rlhf", [*arguments, *small, *keys])
    (engine,) = engines
    engine.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 2
    resolved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert (resolved["rollout_engine"], resolved["vllm_max_model_len"]) == ("vllm", 2064)
    assert resolved["vllm_engine_kwargs"] == {"enable_chunked_prefill": False}


def read(name: str, kind: type[Any], tmp_path: Path, more: dict[str, Any]) -> Any:
    """The configuration of a file with more keys."""
    keys = yaml.safe_load((ROOT / "examples" / "ms_swift" / f"{name}.yaml").read_text())
    for key, value in more.items():
        keys[key] = {**keys[key], **value} if isinstance(value, dict) else value
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(keys, sort_keys=False))
    return load_config(kind, ["--config", str(tmp_path / "x.yaml")])


@pytest.mark.parametrize("name", [name for name in STARTS if STARTS[name][0] == "rlhf"])
def test_sizes_above_one_mean_the_backend_that_has_them(name: str, tmp_path: Path) -> None:
    kind = GRPOConfig if name == "grpo" else GKDConfig
    sizes = {"train": {"tensor_model_parallel_size": 2}, "vllm_mode": "colocate"}
    assert read(name, kind, tmp_path, sizes).backend == "megatron"
    config = read(name, kind, tmp_path, {**sizes, "backend": "megatron"})
    assert (config.tensor_model_parallel_size, config.sequence_parallel) == (2, True)
    assert (config.recompute_granularity, config.gradient_checkpointing) == ("selective", False)
    assert config.model_init_kwargs == {}  # their attention_backend is the backend's to choose


@pytest.mark.parametrize("name", [name for name in STARTS if STARTS[name][0] == "rlhf"])
def test_their_engine_gets_their_settings(name: str, tmp_path: Path) -> None:
    config = read(name, GRPOConfig if name == "grpo" else GKDConfig, tmp_path, {"vllm_kv_cache_dtype": "fp8"})
    is_apart = "separate" in name
    shares_devices = not is_apart
    assert config.rollout_engine == "vllm"
    assert vllm_settings(config, shares_devices=shares_devices) == {
        "gpu_memory_utilization": 0.8 if is_apart else 0.4,
        "max_model_len": 4096 if name == "grpo" else 16384,
        "enable_prefix_caching": True,
        "kv_cache_dtype": "fp8",
    }
    assert (config.offload_model, config.offload_optimizer, config.sleep_level) == (True, True, int(shares_devices))
    if name.endswith("standalone"):
        told = {"gpu_memory_utilization": 0.9, "max_model_len": 16384, "max_logprobs": 64}
        assert (config.teacher_engine, config.teacher_engine_kwargs) == ("vllm", told)
    elif name != "grpo":
        assert config.teacher_engine == "hf"


@pytest.mark.xdist_group("vllm")
def test_keys_that_make_room_are_without_effect_on_devices_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = []
    for name in ("gkd_rollout_separate_teacher_colocate", "gkd_rollout_colocate_teacher_colocate"):
        caplog.clear()
        config = read(name, GKDConfig, tmp_path, {})
        check_completions(config, placement(GKDTrainer, config))
        told.append([record.getMessage() for record in caplog.records if record.levelname == "WARNING"])
    (apart,), colocated = told
    assert apart.startswith("without effect: offload_model, offload_optimizer. ")
    assert colocated == []


PLACED: list[tuple[str, Any, type[Any], list[tuple[tuple[str, ...], int]]]] = [
    ("grpo", GRPOTrainer, GRPOConfig, [(("train", "rollout", "reference", "teacher", "reward"), 4)]),
    ("gkd_rollout_colocate_teacher_colocate", GKDTrainer, GKDConfig, [(("train", "rollout", "teacher"), 4)]),
    ("gkd_rollout_separate_teacher_colocate", GKDTrainer, GKDConfig, [(("train", "teacher"), 4), (("rollout",), 4)]),
    ("gkd_rollout_colocate_teacher_standalone", GKDTrainer, GKDConfig, [(("train", "rollout"), 4), (("teacher",), 4)]),
    ("sft", SFTTrainer, SFTConfig, [(("train",), 4)]),
    ("sample", SamplingTrainer, SamplingConfig, [(("sampler",), 2), (("prm", "orm"), 2)]),
]


@pytest.mark.parametrize(("name", "trainer", "kind", "groups"), PLACED, ids=[case[0] for case in PLACED])
def test_roles_run_where_a_file_of_ms_swift_says(
    name: str, trainer: Any, kind: type[Any], groups: list[tuple[tuple[str, ...], int]], tmp_path: Path
) -> None:
    placed = placement(trainer, read(name, kind, tmp_path, {}))
    assert [(group.roles, group.num_workers) for group in placed.groups] == groups
    assert {group.device for group in placed.groups} == {"GPU"}


def test_the_commands_of_ms_swift_are_ours() -> None:
    assert {"sft", "pt", "sample"} <= set(commands())
