"""What a run says before it begins, and that a plan says what its trainer says."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import trainers
from benchmarks.tiny import vision
from benchmarks.tiny.vision import save_vision
from rayhelper import ConfigError
from rayhelper.__main__ import main
from rayhelper.planning.dry_run import make_plan
from rayhelper.planning.plan_report import as_lines
from tests import warm
from tests.golden.tiny import save_tiny
from trainers.backends.fsdp.vision.parts import linear_layers, part_of
from trainers.configuration.reading.command_line import load_config
from trainers.configuration.shared import SEQUENCES_PER_STEP
from trainers.grpo.config import GRPOConfig
from trainers.parts.engine import vllm_settings
from trainers.run.header import MOST_LINES, header, num_parameters, trainer_name
from trainers.sft.config import SFTConfig
from trainers.sft.trainer import SFTTrainer

ROLES = "train: {gpus: 2}\nrollout: {gpus: 2}\n"
BASE = "model: m\ndataset: rows\nreward_funcs: [exact_answer]\n"


def test_a_header_says_what_the_run_is_about_to_do(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(f"{BASE}{ROLES}bf16: true\nmax_prompt_length: 100\nuse_ray: true\n")
    config = load_config(GRPOConfig, ["--config", str(tmp_path / "x.yaml")])
    lines = header(config, 30, {"num_rows": 5000, SEQUENCES_PER_STEP: 16})
    assert lines == [
        "grpo: m, all weights, backend fsdp, bfloat16",
        "data: 5,000 rows of rows",
        "roles: train on 2 GPU (train); rollout on 2 GPU (rollout)",
        f"steps: 30, of 16 sequences each, at most {16 * (100 + 512):,} tokens, into outputs/grpo",
        "chosen in the first step: token_budget, gradient_checkpointing (the log then has the values)",
        "translated: dtype from bf16",
    ]
    own = GRPOConfig(model="m", dataset="rows", reward_funcs=["exact_answer"], output_dir="other")
    assert "translated" not in "".join(header(own, 30, {}))  # which was not read, but made in Python afterwards


def test_what_auto_stands_for_on_a_cpu_is_yaml_that_fixes_it(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(BASE)
    config = load_config(GRPOConfig, ["--config", str(tmp_path / "x.yaml")])
    assert (config.token_budget, config.gradient_checkpointing) == ("auto", "auto")
    lines = [line for line in header(config, 30, {}) if "# auto: " in line]
    (tmp_path / "y.yaml").write_text("\n".join([BASE, *lines]))
    fixed = load_config(GRPOConfig, ["--config", str(tmp_path / "y.yaml")])
    assert (fixed.token_budget, fixed.gradient_checkpointing) == (None, False)
    assert fixed.per_device_train_batch_size == config.per_device_train_batch_size
    assert not [line for line in header(fixed, 30, {}) if "auto" in line or "chosen" in line]


@pytest.mark.parametrize(("together", "share"), [(True, 0.4), (False, 0.9)])
def test_a_header_has_the_share_of_memory_that_an_engine_takes(together: bool, share: float, tmp_path: Path) -> None:
    colocated = "colocate_groups: [[train, rollout]]\n" if together else ""
    keys = f"{BASE}{ROLES}{colocated}use_ray: true\nrollout_engine: vllm\nmax_prompt_length: 9\n"
    (tmp_path / "x.yaml").write_text(f"{keys}vllm_gpu_memory_utilization: auto\n")
    config = load_config(GRPOConfig, ["--config", str(tmp_path / "x.yaml")])
    (line,) = [line for line in header(config, 30, {}) if line.startswith("vllm_gpu_memory_utilization")]
    assert line.startswith(f"vllm_gpu_memory_utilization: {share}  # auto: ")
    (tmp_path / "x.yaml").write_text(f"{keys}{line}\n")
    assert load_config(GRPOConfig, ["--config", str(tmp_path / "x.yaml")]).vllm_gpu_memory_utilization == share
    assert vllm_settings(config, shares_devices=together)["gpu_memory_utilization"] == share


def test_a_header_counts_the_data_of_every_trainer() -> None:
    """Each trainer's own word for what its steps are made of, as it stands in its source."""
    folder = Path(trainers.__file__).parent
    counted = re.compile(r"order = \{\"(\w+)\": len\(")
    examples = folder.parent / "examples" / "own_trainer"
    files = [*folder.glob("*/trainer.py"), *examples.glob("*.py")]
    named = {name for file in files for name in counted.findall(file.read_text())}
    assert {"sequences", "pairs", "completions", "prompts"} <= named
    config = SFTConfig(model="m", dataset="rows")
    for name in named:
        assert f"data: 1,234 {name.removeprefix('num_')} of rows" in header(config, 1, {name: 1234})
    assert "data: rows" in header(config, 1, {"of_a_trainer_of_yours": 3})
    (steps,) = [line for line in header(config, 1, {"pairs": 9, SEQUENCES_PER_STEP: 4}) if line.startswith("steps:")]
    assert ", of 4 pairs each, at most 8,192 tokens" in steps


def test_parameters_of_a_tower_are_counted_too(tmp_path: Path) -> None:
    model = save_vision(tmp_path / "seeing")
    whole = AutoModelForImageTextToText.from_pretrained(model)
    assert num_parameters(model) == sum(weight.numel() for weight in whole.parameters())
    language = save_tiny(tmp_path / "reading")
    other = AutoModelForCausalLM.from_pretrained(language)
    assert num_parameters(language) == sum(weight.numel() for weight in other.parameters())


def test_a_header_says_which_parts_of_a_vision_model_learn(tmp_path: Path) -> None:
    seeing, reading = save_vision(tmp_path / "seeing"), save_tiny(tmp_path / "reading")

    def learns(model: str, **keys: Any) -> str:
        (first, *_) = header(SFTConfig(model=model, dataset="rows", **keys), 1, {})
        return first.partition(" parameters), ")[2].partition(", backend")[0] or first

    towers = {"freeze_vit": True, "freeze_aligner": True}
    assert learns(seeing) == "all weights"
    assert learns(seeing, **towers) == "all weights except the vision tower and the aligner"
    assert learns(seeing, freeze_llm=True) == "all weights except the language model"
    assert learns(seeing, tuner_type="lora") == "lora of rank 8 (none in the vision tower and the aligner)"
    parts = {"tuner_type": "lora", "lora_kwargs": {"modules_to_save": ["vit", "aligner"]}}
    assert learns(seeing, **parts) == "lora of rank 8, and all weights of the vision tower and the aligner"
    assert learns(reading, **towers) == "all weights"
    assert "all weights except the vision tower of a vision model," in learns("hub/m", freeze_vit=True)


def test_a_header_says_how_many_rows_were_read_and_left_out(tmp_path: Path) -> None:
    """A broken line, a row without text and one too long; those of the evaluation do not count."""
    lines = [json.dumps({"text": "a b"}), "{", json.dumps({"text": None}), json.dumps({"text": "a " * 99})]
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines, lines[0]]))
    rows = str(tmp_path / "rows.jsonl")
    config = SFTConfig(
        model=save_tiny(tmp_path / "model"),
        dataset=rows,
        eval_dataset=[{"text": "a " * 99}, {"text": "a"}],
        max_length=20,
        truncation_mode="drop",
        skip_broken_rows=True,
    )
    sequences = len(SFTTrainer(config).sequences)
    (told,) = [line for line in header(config, 1, {"sequences": sequences}) if line.startswith("data: ")]
    assert told.startswith(f"data: 2 sequences of {rows} (5 rows were read and 3 left out), evaluated every")


def test_a_header_is_short() -> None:
    config = SFTConfig(model="m", dataset=["a" * 500], output_dir="/".join(["b" * 100] * 5))
    lines = header(config, 1, {"sequences": 3})
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= 200


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("learnin_rate: 1\n", "unknown key learnin_rate (did you mean learning_rate?)"),
        ("epsilon_high: 0.1\n", "epsilon_high=0.1 is below epsilon=0.2"),
    ],
)
def test_a_plan_says_why_its_trainer_refuses_the_file(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(BASE + ROLES + text)
    with pytest.raises(ConfigError) as error:
        load_config(GRPOConfig, ["--config", str(file)])
    plan = make_plan(str(file), None, None, None, 80.0, "grpo")
    assert [str(one) for one in plan.findings.mistakes] == [str(error.value)]
    assert told in str(error.value)
    unnamed = make_plan(str(file), None, None, None, 80.0, None)
    assert not unnamed.findings.mistakes  # it may be the file of one's own trainer
    assert any("no trainer of the package takes the file" in one and told in one for one in unnamed.findings.warnings)


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("dataset: no_such.jsonl\nreport_to: [none]\n", "there is no file 'no_such.jsonl'"),
        ("dataset: rows\nreport_to: [wandb]\n", "report_to has wandb, which is not installed"),
    ],
)
def test_a_plan_says_once_what_this_machine_lacks_and_that_a_trainer_takes_the_file(
    missing: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainers.run.trackers._is_installed", lambda module: False)
    (tmp_path / "x.yaml").write_text(f"model: m\n{missing}train: {{gpus: 2}}\n")
    (one,) = make_plan(str(tmp_path / "x.yaml"), None, None, None, 80.0, None).findings.warnings
    assert one.startswith("on this machine the trainer would not start: ")
    assert told in one
    (tmp_path / "x.yaml").write_text(f"model: m\n{missing}train: {{gpus: 2}}\nlearnin_rate: 1\n")
    warnings = make_plan(str(tmp_path / "x.yaml"), None, None, None, 80.0, None).findings.warnings
    assert sum("no trainer of the package takes the file" in line for line in warnings) == 1


def test_a_plan_and_a_header_give_one_reason_for_the_engine(tmp_path: Path) -> None:
    keys = {"model": save_tiny(tmp_path / "reading"), "dataset": "rows", "reward_funcs": ["exact_answer"]}
    keys |= {"use_ray": True, "rollout_engine": "auto"}
    groups = {"all": {"device": "GPU", "ranks": [0, 1], "workers": ["train", "rollout"]}}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump({**keys, "device_groups": groups}))
    plan = make_plan(str(tmp_path / "x.yaml"), None, None, None, 80.0, "grpo")
    config = load_config(GRPOConfig, ["--config", str(tmp_path / "x.yaml")])
    assert "rollout_engine: hf  # auto: the workers that train also generate" in header(config, 1, {})
    assert "rollout_engine: hf (auto: the workers that train also generate)" in plan.findings.assumed


def test_a_command_without_the_dashes_is_told_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "swift", "sft", "--model", "m"]) == 2
    assert "write -- before it: rayhelper plan -- swift sft --model m" in capsys.readouterr().err


def test_a_plan_shows_the_roles_that_live_with_others(tmp_path: Path) -> None:
    for keys, shown in (({}, ("reference",)), ({"reward_model": ["judge"]}, ("reference", "reward"))):
        (tmp_path / "x.yaml").write_text(yaml.safe_dump({"train": {"gpus": 2}, "rollout": {"gpus": 2}, **keys}))
        plan = make_plan(str(tmp_path / "x.yaml"), None, None, None, 80.0, "grpo")
        assert {one.group.name: one.guests for one in plan.groups} == {"train": shown, "rollout": ()}
        assert f"  also     {', '.join(shown)}, which no group names; memory not counted" in list(as_lines(plan))


def _trained(folder: str, tmp_path: Path, trainer: str = "sft", role: str = "train", **keys: Any) -> dict[str, int]:
    """Bytes of each term of the memory of the role that learns on one GPU, and ``all``: parameters of its model."""
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump({"model": folder, "dataset": "rows", role: {"gpus": 1}, **keys}))
    plan = make_plan(str(file), None, None, None, 80.0, trainer)
    assert not any("Llama" in line for line in plan.findings.assumed)
    (planned,) = plan.groups[0].roles
    assert planned.shape is not None
    assert planned.memory is not None
    return {term.name: term.num_bytes for term in planned.memory.terms} | {"all": planned.shape.num_parameters}


@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl"])
def test_a_plan_counts_all_of_a_vision_model_and_what_learns_of_it(name: str, tmp_path: Path) -> None:
    folder = save_vision(tmp_path / "seeing", name)
    module = AutoModelForImageTextToText.from_pretrained(folder)
    parts, size = part_of(module), dict(module.named_parameters())
    tower = sum(weight.numel() for name, weight in size.items() if parts[name] != "llm")
    linear = linear_layers(module, ["vit", "aligner"])
    beside = 8 * sum(sum(module.get_submodule(layer).weight.shape) for layer in linear)
    full = _trained(folder, tmp_path)
    assert full["all"] == sum(weight.numel() for weight in size.values())
    assert full["gradients"] == 4 * full["all"]
    frozen = _trained(folder, tmp_path, freeze_vit=True, freeze_aligner=True)
    assert (frozen["gradients"], frozen["weights"]) == (full["gradients"] - 4 * tower, full["weights"])
    adapter = _trained(folder, tmp_path, tuner_type="lora")
    assert adapter["gradients"] < 4 * (full["all"] - tower)
    with_tower = _trained(folder, tmp_path, tuner_type="lora", freeze_vit=False, freeze_aligner=False)
    assert with_tower["gradients"] == adapter["gradients"] + 4 * beside
    itself = _trained(folder, tmp_path, tuner_type="lora", lora_kwargs={"modules_to_save": ["vit", "aligner"]})
    assert itself["optimizer"] == adapter["optimizer"] + 8 * tower
    megatron = _trained(folder, tmp_path, backend="megatron")
    assert megatron["gradients"] == 4 * (full["all"] - tower)
    thawed = _trained(folder, tmp_path, backend="megatron", freeze_vit=False, freeze_aligner=False)
    assert thawed["gradients"] == 4 * full["all"]


def test_a_tiny_vision_model_is_written_by_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vision.main(["qwen2_5_vl", str(tmp_path / "seeing")])
    assert capsys.readouterr().out == f"wrote {tmp_path / 'seeing'}\n"
    assert num_parameters(str(tmp_path / "seeing"))


def test_a_plan_says_that_it_counts_no_tower_of_sizes_alone(tmp_path: Path) -> None:
    config = json.loads((Path(save_vision(tmp_path / "seeing")) / "config.json").read_bytes())
    file = tmp_path / "x.yaml"
    file.write_text("train: {gpus: 1}\n")
    assumed = make_plan(str(file), None, None, json.dumps(config), 80.0, "sft").findings.assumed
    assert "of --model the language model alone: its other parts cannot be counted here" in assumed


def test_a_plan_counts_the_reference_that_shares_the_workers_of_dpo(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "reading")
    full = _trained(model, tmp_path, "dpo", "default")
    assert full["reference"] == 2 * full["all"]
    for keys in ({"tuner_type": "lora"}, {"reference_free": True}):
        assert "reference" not in _trained(model, tmp_path, "dpo", "default", **keys)
        lines = list(as_lines(make_plan(str(tmp_path / "x.yaml"), None, None, None, 80.0, "dpo")))
        assert "  also     reference, which no group names; memory counted above" in lines


def test_the_name_of_an_own_trainer_is_short() -> None:
    class WinnersConfig(GRPOConfig):
        __module__ = "winners"

    own = WinnersConfig(model="m", dataset="sums", reward_funcs=["exact_answer"])
    assert trainer_name(own) == "winners"


def test_a_plan_of_a_file_that_its_trainer_takes_has_no_mistakes() -> None:
    plan = make_plan("examples/ms_swift/gkd_rollout_colocate_teacher_standalone.yaml", None, None, None, 80.0, None)
    assert not plan.findings.mistakes
    assert any("sequence_parallel" in one for one in plan.findings.warnings)


def test_what_would_not_run_is_not_printed(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(f"{BASE}epsilon_high: 0.1\n")
    command = [warm.python(), "-m", "trainers", "grpo", "--config", str(tmp_path / "x.yaml"), "--print_config"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 2
    assert "epsilon_high=0.1" in ran.stderr
    assert "epsilon_high" not in ran.stdout
