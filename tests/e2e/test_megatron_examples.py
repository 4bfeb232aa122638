"""The files of examples/megatron: keys, placements and sizes are right for the models they name; no GPU is asked."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rayhelper import ConfigError
from rayhelper.planning.dry_run import make_plan
from rayhelper.planning.plan_report import as_dict
from tests.conftest import without_runtime
from tests.e2e.runs import lines
from tests.golden.tiny import save_tiny, tiny_tokenizer
from trainers.cli import load_config, main, placement
from trainers.commands import command_named

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "megatron"
GUESTS = ("reference", "teacher", "reward")
# trainer; memory of a GPU in GiB; roles and workers of each group; slices of the batch
FILES: dict[str, tuple[str, float, list[tuple[tuple[str, ...], int]], int]] = {
    "grpo_colocated": ("grpo", 80, [(("train", "rollout", *GUESTS), 8)], 4),
    "grpo_separate": ("grpo", 80, [(("train", *GUESTS), 4), (("rollout",), 4)], 2),
    "grpo_moe": ("grpo", 80, [(("train", *GUESTS), 16), (("rollout",), 16)], 8),
    "gkd_rollout_colocate_teacher_colocate": ("gkd", 80, [(("train", "rollout", "teacher"), 4)], 2),
    "gkd_rollout_separate_teacher_colocate": ("gkd", 80, [(("train", "teacher"), 4), (("rollout",), 4)], 2),
    "gkd_rollout_colocate_teacher_standalone": ("gkd", 80, [(("train", "rollout"), 4), (("teacher",), 4)], 2),
    "opsd": ("gkd", 80, [(("train", "rollout", "teacher"), 4)], 2),
    "sft_3d": ("sft", 80, [(("train",), 16)], 2),
    "walkthrough": ("grpo", 80, [(("train", *GUESTS), 8), (("rollout",), 8)], 1),
}
ONLY_RAY = {"grpo_moe", "walkthrough"}  # two processes of one device
DENSE = {"model_type": "qwen3", "vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128}
SHAPES: dict[str, dict[str, Any]] = {  # as the hub's config.json says
    "Qwen3-4B": DENSE
    | {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728}
    | {"tie_word_embeddings": True},
    "Qwen3-8B": DENSE
    | {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12_288},
    "Qwen3-30B-A3B": DENSE
    | {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "intermediate_size": 6144}
    | {"model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
    | {"moe_intermediate_size": 768, "norm_topk_prob": True},
}


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder for each model, of its sizes, with a tokenizer and without weights."""
    folder = tmp_path_factory.mktemp("models")
    for name, shape in SHAPES.items():
        tiny_tokenizer().save_pretrained(folder / name)
        (folder / name / "config.json").write_text(json.dumps(shape))
    return {name: str(folder / name) for name in SHAPES}


def written(name: str, models: dict[str, str], tmp_path: Path, **more: Any) -> Path:
    """The file with folders in place of the models' names, and the slice of the data that is there."""
    keys = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    for key in {"model", "teacher_model"} & keys.keys():
        keys[key] = models[keys[key].rpartition("/")[2]]
    for key in {"dataset", "eval_dataset"} & keys.keys():
        keys[key] = re.sub("^data/gsm8k/(.*)[.]parquet$", r"examples/grpo/gsm8k/\1.jsonl", keys[key])
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(keys | more, sort_keys=False))
    return file


def test_every_file_is_known_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(FILES)


@pytest.mark.xdist_group("vllm")  # whose fields are checked
@pytest.mark.parametrize("name", FILES)
def test_a_file_passes_all_checks_that_come_before_a_run(name: str, models: dict[str, str], tmp_path: Path) -> None:
    command = command_named(FILES[name][0])
    config = load_config(command.config_type, ["--config", str(written(name, models, tmp_path))])
    assert config.backend == "megatron"
    groups = placement(command.trainer, config)
    assert [(group.roles, group.num_workers) for group in groups.groups] == FILES[name][2]
    assert {group.device for group in groups.groups} == {"GPU"}
    assert groups.group_of("train").num_workers // config.workers_per_shard == FILES[name][3]
    command.trainer.check(config, groups)


@pytest.mark.parametrize("name", FILES)
def test_a_file_fits_the_gpus_that_it_asks_for(name: str, models: dict[str, str], tmp_path: Path) -> None:
    _, gpu_memory_gib, groups, data = FILES[name]
    plan = make_plan(str(written(name, models, tmp_path)), None, 8, None, gpu_memory_gib)
    assert [str(mistake) for mistake in plan.findings.mistakes] == []
    assert plan.fits
    shared = [roles for roles, _ in groups] if name in ONLY_RAY else []
    assert plan.num_asked == sum(workers for _, workers in (groups[:1] if shared else groups))
    trained = next(role for group in plan.groups for role in group.roles if role.role == "train")
    assert trained.sizes.data == data
    for group in plan.groups:
        assert group.peak_bytes is not None
        assert group.peak_bytes < plan.gpu_bytes
    assert as_dict(plan)


@pytest.mark.parametrize("name", FILES)
def test_a_layout_that_the_model_does_not_allow_is_told(name: str, models: dict[str, str], tmp_path: Path) -> None:
    """The checks above look at the models: with sizes that do not divide them they fail."""
    command = command_named(FILES[name][0])
    file = written(name, models, tmp_path, pipeline_model_parallel_size=16, virtual_pipeline_model_parallel_size=5)
    config = load_config(command.config_type, ["--config", str(file)])
    with pytest.raises(ConfigError, match="pipeline_model_parallel_size"):
        command.trainer.check(config, placement(command.trainer, config))


def commands(text: str) -> list[list[str]]:
    """The words of every command that starts a trainer, lines that go on joined."""
    joined = re.sub(r"\s*\\\n[#\s]*", " ", text)
    found = re.findall(r"^[#\s]*((?:torchrun|rayhelper (?!plan)).*--config.*)$", joined, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in found]


@pytest.mark.parametrize("page", ["README.md", "walkthrough.md", *(f"{name}.yaml" for name in FILES)])
def test_commands_name_the_trainer_and_as_many_processes_as_the_file_has_workers(page: str) -> None:
    found = commands((FOLDER / page).read_text(encoding="utf-8"))
    assert found
    for words in found:
        name = Path(words[words.index("--config") + 1]).stem
        trainer, _, groups, _ = FILES[name]
        assert words[words.index("--config") - 1] == trainer
        if words[0] == "torchrun":
            assert name not in ONLY_RAY
            nodes = int(words[words.index("--nnodes") + 1]) if "--nnodes" in words else 1
            assert nodes * int(words[words.index("--nproc-per-node") + 1]) == sum(workers for _, workers in groups)


def test_run_sh_starts_what_the_readme_says(tmp_path: Path) -> None:
    """With programs that print how they were called."""
    copy = tmp_path / "examples" / "megatron"
    copy.mkdir(parents=True)
    shutil.copy(FOLDER / "run.sh", copy)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for program in ("rayhelper", "torchrun"):
        fake = tmp_path / ".venv" / "bin" / program
        fake.write_text(f'#!/bin/sh\necho {program} "$@"\n')
        fake.chmod(0o755)
    told = commands((FOLDER / "README.md").read_text(encoding="utf-8"))
    for words in told:
        name = Path(words[words.index("--config") + 1]).stem
        way = "torchrun" if words[0] == "torchrun" else "ray"
        nodes = {"NNODES": "2", "RDZV": "<host>:29500"} if "--nnodes" in words else {}
        done = subprocess.run([copy / "run.sh", way, name], env=nodes, capture_output=True, text=True, check=True)
        one_node = [] if nodes or way == "ray" else ["--nnodes", "1"]
        assert done.stdout.split() == [words[0], *one_node, *words[1:]]
    assert {Path(words[words.index("--config") + 1]).stem for words in told} == set(FILES)


# On a CPU, with the other backend and engine


def bash_blocks(page: str) -> list[str]:
    text = (FOLDER / page).read_text(encoding="utf-8")
    return re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_walkthrough_is_walked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own blocks make the data, train, and go on from a checkpoint."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "models" / "Qwen3-0.6B")
    blocks = bash_blocks("walkthrough.md")
    (making,) = (block for block in blocks if "examples/grpo/gsm8k" in block)
    exec(compile(making.partition("\n")[2].rpartition("PYTHON")[0], "walkthrough.md", "exec"), {})
    (words,) = (words for words in commands("\n".join(blocks)) if "fsdp" in words)
    folder, rows = Path("outputs/walkthrough_cpu"), []
    for _ in range(2):  # the second goes on from checkpoint-2
        with without_runtime():
            main("grpo", words[words.index("--config") :])
        rows.append([line for line in lines(folder) if "loss" in line])
    assert [line["step"] for line in rows[0]] == [1, 2, 3, 4]
    assert rows[0] == rows[1]
    assert not (folder / "metrics.1.jsonl").exists(), "the second run went on, and did not start over"
    assert (folder / "final" / "model.safetensors").is_file()
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward")] == [1, 2, 3, 4]


def test_the_model_that_teaches_itself_sees_the_solution(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    keys = {"model": model, "backend": "fsdp", "tensor_model_parallel_size": 1, "use_vllm": "false", "max_steps": 2}
    keys |= {"dtype": "float32", "global_batch_size": 4, "max_completion_length": 6, "output_dir": tmp_path / "out"}
    arguments = [f"--{key}={value}" for key, value in keys.items()]
    with without_runtime():
        main("gkd", ["--config=examples/megatron/opsd.yaml", *arguments, "--report_to=none"])
    found = [line for line in lines(tmp_path / "out") if "loss" in line]
    assert [line["step"] for line in found] == [1, 2]
    assert all(line["loss"] > 1e-4 for line in found), "it would be 0 if the teacher saw the student's prompt"
