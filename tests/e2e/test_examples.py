"""Every example loads, and runs on something small."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from examples.tiny_model import main as write_tiny_model
from tests.conftest import RaySession, without_runtime
from tests.e2e.runs import lines, separate, together
from tests.golden.tiny import save_tiny
from trainers.cli import load_config, placement, run
from trainers.commands import command_named
from trainers.grpo.config import GRPOConfig
from trainers.grpo.trainer import GRPOTrainer
from trainers.plugins import load_plugins
from trainers.sft.config import PretrainConfig, SFTConfig
from trainers.sft.trainer import SFTTrainer

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {
    "grpo/quickstart.yaml": (GRPOTrainer, GRPOConfig),
    "grpo/gsm8k.yaml": (GRPOTrainer, GRPOConfig),
    "grpo/second_try.yaml": (GRPOTrainer, GRPOConfig),
    "grpo/device_groups.yaml": (GRPOTrainer, GRPOConfig),
    "sft/gsm8k.yaml": (SFTTrainer, SFTConfig),
    "sft/pretrain.yaml": (SFTTrainer, PretrainConfig),
}

SAMPLING = [f"sampling/{name}.yaml" for name in ("quickstart", "device_groups", "distill")]  # test_sampling.py
PAIRS = [f"{trainer}/{name}.yaml" for trainer in ("dpo", "reward") for name in ("quickstart", "device_groups")]
JUDGED = ["kto/quickstart.yaml", "kto/device_groups.yaml"]  # test_judged.py
JUDGED += [f"cpo/{name}.yaml" for name in ("quickstart", "simpo", "orpo")]
GKD = [f"gkd/{name}.yaml" for name in ("quickstart", "separate", "vllm_teacher")]  # test_gkd.py, test_gkd_vllm.py
OWN = ["own_trainer/raft.yaml", "own_trainer/online_dpo.yaml"]  # test_own_trainer.py
IMAGES = ["grpo/count_shapes.yaml"]  # tests/images
PPO = ["ppo/quickstart.yaml", "ppo/quickstart_ray.yaml"]  # test_ppo.py


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def configured(name: str, folder: Path, **keys: Any) -> Any:
    arguments = [f"--{key}={value}" for key, value in keys.items()]
    config_type = EXAMPLES[name][1]
    return load_config(config_type, ["--config", f"examples/{name}", f"--output_dir={folder}", *arguments])


def test_every_example_is_known_here() -> None:
    found = {str(path.relative_to(ROOT / "examples")) for path in (ROOT / "examples").rglob("*.yaml")}
    elsewhere = ("ms_swift/", "megatron/")  # test_ms_swift.py, test_megatron_examples.py
    found = {name for name in found if not name.startswith(elsewhere)}
    assert found == {*EXAMPLES, *SAMPLING, *PPO, *PAIRS, *JUDGED, *GKD, *OWN, *IMAGES}


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "grpo/quickstart.yaml"])
def test_an_example_trains_two_steps(name: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    small = {} if name.startswith("sft") else {"max_completion_length": 6, "global_batch_size": 16, "use_ray": "false"}
    config = configured(name, tmp_path / "out", model=model, max_steps=2, report_to="none", **small)
    last = run(EXAMPLES[name][0], config)
    assert last["epoch"] > 0
    assert len([line for line in lines(tmp_path / "out") if "loss" in line]) == 2
    assert (tmp_path / "out" / "final" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "name",
    [
        "sft/gsm8k",
        "dpo/device_groups",
        "kto/device_groups",
        "reward/device_groups",
        "gkd/separate",
        "ppo/quickstart_ray",
    ],
)
def test_an_example_trains_two_steps_on_ray(name: str, tmp_path: Path, ray_session: RaySession) -> None:
    """From its file, which has a place for every role; the run makes do with workers that are there."""
    command = command_named(name.partition("/")[0])
    trainer, config_type = command.trainer, command.config_type
    keys = {"model": save_tiny(tmp_path / "model"), "output_dir": tmp_path / "out", "max_steps": 2, "report_to": "none"}
    keys |= {"eval_steps": "null", "val_before_train": "false", "global_batch_size": 8, "dtype": "float32"}
    if name.startswith(("grpo", "ppo", "gkd")):
        keys["max_completion_length"] = 6
    if name.startswith("gkd"):
        keys["teacher_model"] = save_tiny(tmp_path / "teacher", seed=1)
    config = load_config(config_type, ["--config", f"examples/{name}.yaml", *(f"--{k}={v}" for k, v in keys.items())])
    config = dataclasses.replace(config, eval_dataset=None)
    assert config.use_ray == (name != "sft/gsm8k")
    assert set(placement(trainer, config).roles) == set(trainer.__rayhelper_roles__)
    with ray_session(separate()):
        trainer(config).train()
    assert [line["step"] for line in lines(tmp_path / "out") if "loss" in line] == [1, 2]
    assert (tmp_path / "out" / "final" / "model.safetensors").is_file()


def test_the_quickstart_logs_the_same_off_and_with_ray(
    tmp_path: Path, ray_session: RaySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    (addition,) = load_plugins(["examples/grpo/addition.py"])
    monkeypatch.setattr(addition, "WARM_START_STEPS", 50)  # enough to solve some problems
    monkeypatch.setattr(addition, "NUM_TEST_PROBLEMS", 50)
    small = {"max_steps": 3, "global_batch_size": 64, "eval_steps": 2}
    with without_runtime():
        off = run(GRPOTrainer, configured("grpo/quickstart.yaml", tmp_path / "off", **small))
        config = configured("grpo/quickstart.yaml", tmp_path / "ray", **small)
        assert [group.num_workers for group in placement(GRPOTrainer, config).groups] == [1]
        with ray_session(together(1)):
            on = dict(GRPOTrainer(config).train())
    assert off.keys() == on.keys()
    assert lines(tmp_path / "off") == lines(tmp_path / "ray")
    steps = [line for line in lines(tmp_path / "off") if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert any(0 < line["reward"] < 1 for line in steps)


def test_the_placements_of_the_readme_are_read() -> None:
    text = (ROOT / "examples" / "grpo" / "README.md").read_text()
    snippets = [part.partition("```")[0] for part in text.split("```yaml\n")[1:]]
    assert len(snippets) == 2
    sizes = []
    for snippet in snippets:
        file = yaml.safe_load(snippet)
        groups = file.get("device_groups") or {name: value for name, value in file.items() if name != "use_ray"}
        config = load_config(
            GRPOConfig, ["--model=m", "--dataset=d", "--reward_funcs=[format]", f"--device_groups={json.dumps(groups)}"]
        )
        sizes.append([(group.roles, group.num_workers) for group in placement(GRPOTrainer, config).groups])
    guests = ("reference", "teacher", "reward")
    assert sizes == [[(("train", "rollout", *guests), 4)], [(("train", *guests), 2), (("rollout",), 2)]]


def test_the_tiny_model_of_dry_runs_trains_on_its_rows_and_knows_a_chat(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "model"))
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "ü?"}], add_generation_prompt=True, tokenize=False
    )
    assert asked == "<|im_start|>user\nü?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer(asked)["input_ids"]) == asked
    data = ["--model", str(tmp_path / "model"), "--dataset", str(tmp_path / "rows.jsonl")]
    sizes = ["--max_steps", "1", "--max_completion_length", "4", "--global_batch_size", "8", "--report_to", "none"]
    more = ["--reward_funcs", "ms_swift_accuracy", "--output_dir", str(tmp_path / "run")]
    run(GRPOTrainer, load_config(GRPOConfig, [*data, *sizes, *more]))
    (line,) = lines(tmp_path / "run")
    assert line["rewards/ms_swift_accuracy/mean"] == 0, "random weights do not add"
    assert line["completions/max_length"] <= 4
