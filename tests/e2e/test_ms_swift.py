"""Files as users of ms-swift have them: what they ask for is done, and the rest is refused by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open

from rayhelper import ConfigError
from tests.conftest import without_runtime
from tests.golden.tiny import save_tiny
from trainers.cli import TRAINERS, load_config, main, placement
from trainers.gkd import GKDTrainer
from trainers.gkd_config import GKDConfig
from trainers.grpo import GRPOTrainer
from trainers.grpo_config import GRPOConfig
from trainers.sampling import SamplingTrainer
from trainers.sampling_config import SamplingConfig
from trainers.sft import SFTTrainer
from trainers.sft_config import SFTConfig

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["--max_steps=2", "--max_completion_length=6", "--global_batch_size=8"]
STARTS: dict[str, tuple[str, list[str]]] = {  # the command of each file, and what makes it small
    "grpo": ("rlhf", [*SHORT, "--soft_cache_length=4", "--steps_per_generation=2"]),
    "gkd_rollout_colocate_teacher_colocate": ("rlhf", [*SHORT, "--teacher_model=TEACHER", "--lmbda=1"]),
    "gkd_rollout_separate_teacher_colocate": ("rlhf", [*SHORT, "--teacher_model=TEACHER"]),
    "gkd_rollout_colocate_teacher_standalone": ("rlhf", [*SHORT, "--teacher.model=TEACHER"]),
    "sft": ("sft", ["--max_steps=2", "--use_ray=false", "--dataset_num_proc=null"]),
    "sample": ("sample", ["--max_new_tokens=6", "--num_sampling_batches=2", "--use_ray=false"]),
}
LATER = {  # what their files have beside: other engines and other backends
    "use_vllm": True,
    "vllm_mode": "colocate",
    "rollout": {"vllm_tensor_parallel_size": 2, "vllm_gpu_memory_utilization": 0.4, "vllm_max_model_len": 16384},
    "train": {"tensor_model_parallel_size": 2},
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
    assert {path.stem for path in (ROOT / "examples" / "ms_swift").glob("*.yaml")} == set(STARTS)


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
        assert {"rewards/format/mean", "rewards/soft_overlong/mean"} <= set(lines[0])
    elif command == "rlhf":
        assert (resolved["teacher_model"], resolved["gkd_logits_topk"], resolved["lora_rank"]) == (models[1], 64, 8)
        with safe_open(tmp_path / "final" / "adapter" / "adapter_model.safetensors", "pt") as adapter:
            assert any(adapter.get_tensor(key).abs().max() > 0 for key in adapter.keys() if "lora_B" in key)  # noqa: SIM118


def read(name: str, kind: type[Any], tmp_path: Path, more: dict[str, Any]) -> Any:
    """The configuration of a file with more keys."""
    keys = yaml.safe_load((ROOT / "examples" / "ms_swift" / f"{name}.yaml").read_text())
    for key, value in more.items():
        keys[key] = {**keys[key], **value} if isinstance(value, dict) else value
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(keys, sort_keys=False))
    return load_config(kind, ["--config", str(tmp_path / "x.yaml")])


@pytest.mark.parametrize("name", [name for name in STARTS if STARTS[name][0] == "rlhf"])
def test_their_own_files_are_refused_for_other_engines_and_backends_alone(name: str, tmp_path: Path) -> None:
    kind = GRPOConfig if name == "grpo" else GKDConfig
    with pytest.raises(ConfigError) as error:
        read(name, kind, tmp_path, LATER)
    told = [line.rpartition("x.yaml")[2].partition(" not supported")[0] for line in str(error.value).splitlines()[1:]]
    assert sorted(told) == [
        ", section rollout: vllm_tensor_parallel_size, vllm_gpu_memory_utilization and vllm_max_model_len are",
        ": tensor_model_parallel_size is",
        ": use_vllm is",
        ": vllm_mode is",
    ]


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
    assert {"sft", "pt", "sample"} <= set(TRAINERS)
