"""From a file and a command line to a configuration, and from there to a run."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import yaml

from rayhelper import ConfigError, DeviceGroups, PlacementError, RayHelper
from rayhelper.timeline.trace import read as read_trace
from tests import warm
from trainers import cli, commands
from trainers.cli import load_config, main, placement, run, save_config
from trainers.configuration import mistakes
from trainers.configuration.reading import command_line
from trainers.configuration.reading.help import print_help
from trainers.configuration.shared import RunConfig, TrainConfig
from trainers.dpo.config import DPOConfig
from trainers.grpo.config import GRPOConfig
from trainers.run import origin
from trainers.run.origin import without_secrets
from trainers.sampling.config import SamplingConfig
from trainers.sft.config import PretrainConfig, SFTConfig

ROOT = Path(__file__).parents[2]
NEEDED = ["--model", "tiny", "--dataset", "sums"]
pytestmark = pytest.mark.xdist_group("outputs")  # the default output_dir, which one run at a time may have


@dataclass(frozen=True, kw_only=True)
class Config(TrainConfig):
    """Keys of a trainer of these tests."""

    loss_type: Literal["nll", "dft"] = "nll"
    scale: Literal["group", "none"] | bool = "group"
    reward_funcs: list[Any] = field(default_factory=list)
    weights: list[float] | None = None
    stops: tuple[int, ...] = ()


def load(*argv: str, text: str | None = None, tmp_path: Path | None = None) -> Config:
    """The configuration of a YAML text, if one is given, and arguments."""
    if text is None:
        return load_config(Config, [*NEEDED, *argv])
    assert tmp_path is not None
    (tmp_path / "x.yaml").write_text("model: tiny\ndataset: sums\n" + text)
    return load_config(Config, ["--config", str(tmp_path / "x.yaml"), *argv])


# What may be written


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--learning_rate", "1e-5"], "learning_rate", 1e-5),
        (["--learning-rate=1e-5"], "learning_rate", 1e-5),
        (["--lr", "1e-5"], "learning_rate", 1e-5),
        (["--train_iters", "7"], "max_steps", 7),
        (["--max_steps", "-1"], "max_steps", -1),
        (["--max_epochs", "0.5"], "num_train_epochs", 0.5),
        (["--micro_batch_size", "4"], "per_device_train_batch_size", 4),
        (["--use_ray", "true"], "use_ray", True),
        (["--use_ray", "False"], "use_ray", False),
        (["--use_ray"], "use_ray", True),
        (["--report_to", "none"], "report_to", ["none"]),
        (["--report_to", "[none]"], "report_to", ["none"]),
        (["--reward_funcs", "a", "b"], "reward_funcs", ["a", "b"]),
        (["--reward_funcs", '{"name": "a", "scale": "10"}'], "reward_funcs", [{"name": "a", "scale": "10"}]),
        (["--weights", "1", "2.5"], "weights", [1.0, 2.5]),
        (["--stops", "[1, 2]"], "stops", (1, 2)),
        (["--dataset=a.csv,b"], "dataset", "a.csv,b"),
        (["--resume_from_checkpoint", "true"], "resume_from_checkpoint", True),
        (["--resume_from_checkpoint", "auto"], "resume_from_checkpoint", "auto"),
        (["--run_name", "7"], "run_name", "7"),
        (["--run_name", "null"], "run_name", None),
        (["--eval_dataset", "null"], "eval_dataset", None),
        (["--system", "-- be brief"], "system", "-- be brief"),
        (["--system=--"], "system", "--"),
        (["--prompt_template", "{question}"], "prompt_template", "{question}"),
        (["--scale", "false"], "scale", False),
        (["--columns.question", "prompt"], "columns", {"question": "prompt"}),
        (["--device_groups", '{"train": {"cpus": 2}}'], "device_groups", {"train": {"cpus": 2}}),
        (["--train.cpus", "2"], "device_groups", {"train": {"cpus": 2}}),
        (["--report_to", "tensorboard none"], "report_to", ["tensorboard", "none"]),
        (["--weights", "1 2.5"], "weights", [1.0, 2.5]),
        (["--ENV.A", "1"], "env", {"A": 1}),
        (["--env", '{"A": "x"}'], "env", {"A": "x"}),
    ],
    ids=str,
)
def test_an_argument_is_read_as_its_key_asks(argv: list[str], name: str, value: Any) -> None:
    arguments = [*argv, "--model", "tiny"] + ([] if name == "dataset" else ["--dataset", "sums"])
    found = getattr(load_config(Config, arguments), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("lr: 1e-5", "learning_rate", 1e-5),
        ("report_to: none", "report_to", ["none"]),
        ("reward_funcs: exact", "reward_funcs", ["exact"]),
        ("reward_funcs: [{name: a, scale: '10'}]", "reward_funcs", [{"name": "a", "scale": "10"}]),
        ("model_init_kwargs: {a: '10', b: 1e-5}", "model_init_kwargs", {"a": "10", "b": 1e-5}),
        ("run_name: '007'", "run_name", "007"),
        ("learning_rate: 1", "learning_rate", 1.0),
        ("env: {OMP_NUM_THREADS: 1, NAME: '1'}", "env", {"OMP_NUM_THREADS": 1, "NAME": "1"}),
        ("ENV: {A: 1}", "env", {"A": 1}),
        ("env: '{\"A\": 1}'", "env", {"A": 1}),
        ("lr: '1e-5'", "learning_rate", 1e-5),
        ("adam_epsilon: 1e-8", "adam_epsilon", 1e-8),
        ("use_ray: 'true'", "use_ray", True),
        ("use_ray: 'False'", "use_ray", False),
        ("report_to: tensorboard none", "report_to", ["tensorboard", "none"]),
        ("reward_funcs: a b", "reward_funcs", ["a", "b"]),
        ("reward_funcs: '[a, {name: b, k: 1}]'", "reward_funcs", ["a", {"name": "b", "k": 1}]),
        ("weights: 0.1 1", "weights", [0.1, 1.0]),
        ("dataset_split: train", "dataset_split", "train"),
        ('columns: \' {"a": "b"}\'', "columns", {"a": "b"}),
        ("model_init_kwargs: {a: 1e-6}", "model_init_kwargs", {"a": 1e-6}),
    ],
)
def test_a_key_of_a_file_is_read_as_its_key_asks(text: str, name: str, value: Any, tmp_path: Path) -> None:
    found = getattr(load(text=text, tmp_path=tmp_path), name)
    assert found == value
    assert type(found) is type(value)


def test_the_name_of_a_file_may_hold_spaces(tmp_path: Path) -> None:
    (tmp_path / "my rewards.py").write_text("")
    assert load("--external_plugins", f"{tmp_path}/my rewards.py").external_plugins == [f"{tmp_path}/my rewards.py"]


def test_the_command_line_wins_over_the_file_under_any_name(tmp_path: Path) -> None:
    found = load("--lr", "4", text="learning_rate: 3\nseed: 7\n", tmp_path=tmp_path)
    assert (found.learning_rate, found.seed) == (4.0, 7)


def test_a_mistake_is_looked_for_where_it_was_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^command line: seed must be a whole number"):
        load("--seed", "x", text="seed: 7\n", tmp_path=tmp_path)


def test_a_key_inside_a_mapping_can_be_overridden_alone(tmp_path: Path) -> None:
    found = load("--columns.a", "z", text="columns: {a: x, b: y}\n", tmp_path=tmp_path)
    assert found.columns == {"a": "z", "b": "y"}


def test_an_empty_file_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("# nothing\n")
    assert load_config(Config, ["--config", str(tmp_path / "x.yaml"), *NEEDED]) == load()


def test_any_dataclass_can_be_loaded() -> None:
    @dataclass
    class Small:
        size: int
        name: str = "x"
        count: ClassVar[int] = 0

    assert load_config(Small, ["--size", "3"]) == Small(3)


# Sections of roles

SECTIONS = """
colocate_groups: [[train, rollout]]
train: {gpus: 2, timeout_s: 60}
rollout: {gpus: 2}
teacher: {cpus: 1}
nproc_per_node: 8
"""


def test_sections_of_roles_are_gathered_into_device_groups(tmp_path: Path) -> None:
    groups = DeviceGroups.parse(load(text=SECTIONS, tmp_path=tmp_path).device_groups or {})
    assert [group.roles for group in groups.groups] == [("train", "rollout"), ("teacher",)]
    assert groups.nproc_per_node == 8


def test_a_section_can_be_resized_from_the_command_line(tmp_path: Path) -> None:
    found = load("--teacher.cpus", "3", text=SECTIONS, tmp_path=tmp_path)
    assert DeviceGroups.parse(found.device_groups or {}).group_of("teacher").num_workers == 3


def test_device_groups_of_the_command_line_replace_the_sections_of_the_file(tmp_path: Path) -> None:
    found = load("--device_groups", '{"train": {"cpus": 1}}', text=SECTIONS, tmp_path=tmp_path)
    assert found.device_groups == {"train": {"cpus": 1}}


# What is refused

FILE_MISTAKES: list[tuple[str, list[str]]] = [
    ("learning_rat: 1", ["x.yaml", "unknown key learning_rat", "did you mean learning_rate?"]),
    ("bogus: 1", ["unknown key bogus", "--help all lists all keys"]),
    ("1: 2", ["unknown key 1"]),
    ("lr: 1\nlearning_rate: 2", ["lr and learning_rate", "two names of one key", "remove one"]),
    ("seed: 1\nseed: 2", ["x.yaml", "'seed' is written twice", "line 4"]),
    ("seed: abc", ["x.yaml", "seed must be a whole number", "'abc'"]),
    ("seed: 1.5", ["seed must be a whole number", "1.5"]),
    ("seed: true", ["seed must be a whole number", "true"]),
    ("seed:", ["seed must be a whole number", "null"]),
    ("learning_rate: fast", ["learning_rate must be a number", "'fast'"]),
    ("run_name: 7", ["run_name must be text or null", "got 7", "Put it in quotes"]),
    ("run_name: 2024-01-01", ["run_name must be text or null", "2024-01-01", "Put it in quotes"]),
    ("use_ray: 1", ["use_ray must be true or false", "got 1"]),
    ("dtype: float16", ["dtype must be one of auto, float32, bfloat16", "'float16'", "did you mean bfloat16?"]),
    ("loss_type: nl", ["loss_type must be one of nll, dft", "did you mean nll?"]),
    ("columns: [a]", ["columns must be a mapping", "['a']"]),
    ("columns: {a: 1}", ["columns must be a mapping (each value text)"]),
    ("external_plugins: [1]", ["external_plugins must be a list (each item text)"]),
    ("weights: [a]", ["weights must be a list (each item a number) or null"]),
    ("[a", ["x.yaml", "not valid YAML"]),
    ("rollout: {gpu: 2}", ["rollout", "gpus", "did you mean gpus?"]),
    ("train: {gpus: 2}\ndevice_groups: {train: {gpus: 2}}", ["device_groups and train both", "move everything"]),
    ("train: {gpus: 2}\ncolocate_groups: [[train, rolout]]", ["colocate_groups", "'rolout'", "section"]),
    ("env: [A]", ["env must be a mapping"]),
    ("env: {A: true}", ["env must be a mapping (each value text or"]),
    ("learning_rate: -1", ["learning_rate must be at least 0", "-1"]),
]


@pytest.mark.parametrize(("text", "told"), FILE_MISTAKES, ids=lambda value: str(value)[:50])
def test_a_mistake_in_a_file_is_told_with_its_remedy(text: str, told: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(text=text, tmp_path=tmp_path)
    for words in told:
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--learning_rat", "1"], ["command line", "learning_rat", "did you mean learning_rate?"]),
        (["--lr"], ["--learning_rate has no value"]),
        (["--run_name"], ["--run_name has no value"]),
        (["--dataset"], ["--dataset has no value"]),
        (["--lr", "1", "--learning_rate", "2"], ["learning_rate and lr", "give one of them"]),
        (["--seed", "1", "--seed", "2"], ["seed is given twice"]),
        (["--seed", "1", "2"], ["seed must be a whole number", "['1', '2']"]),
        (["--config", "a.yaml", "--config", "b.yaml"], ["--config is given twice"]),
        (["--config"], ["--config takes the name of one YAML file"]),
        (["--device_groups", "{broken"], ["device_groups"]),
        (["--device_groups", "groups.yaml"], ["device_groups"]),
        (["--train.cpu", "2"], ["unknown key train", "did you mean cpus?"]),
        (["--report_to+", "wandb"], ["'--report_to+' is not an option", "--key value"]),
        (
            ["--device_groups", '{"a": {"cpus": 1}, "a": {"cpus": 2}}'],
            ["device_groups", "key 'a' is written twice", "Remove one"],
        ),
        (["--columns", "{a: b, a: c}"], ["columns", "key 'a' is written twice"]),
    ],
    ids=lambda value: " ".join(value)[:50],
)
def test_a_mistake_on_the_command_line_is_told_with_its_remedy(argv: list[str], told: list[str]) -> None:
    needed = ["--model", "tiny"] if "--dataset" in argv else NEEDED
    with pytest.raises(ConfigError) as error:
        load_config(Config, [*needed, *argv])
    for words in told:
        assert words in str(error.value)


def test_all_mistakes_of_file_and_command_line_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(
            "--warmup_step",
            "3",
            "--seed",
            "x",
            text="bogus: 1\nloss_type: nl\nlr: 1\nlearning_rate: 2\n",
            tmp_path=tmp_path,
        )
    message = str(error.value)
    for words in ("bogus", "loss_type", "lr and learning_rate", "warmup_steps?", "seed must be"):
        assert words in message
    assert message.count("\n  - ") == 5


def test_a_missing_file_is_answered_with_the_one_beside_it(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"no file .*quickstrat.yaml.*did you mean quickstart.yaml\?"):
        load_config(Config, ["--config", str(tmp_path / "quickstrat.yaml")])


def test_keys_that_must_be_given_are_all_named() -> None:
    with pytest.raises(ConfigError, match="model and dataset must be given"):
        load_config(Config, [])


def test_an_argument_without_a_key_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'x\.txt' belongs to no key"):
        load_config(Config, ["x.txt", *NEEDED])


# Help, printing, saving


def test_help_tells_every_key_its_meaning_and_its_other_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        load_config(Config, ["--help", "all"], prog="python -m trainers.grpo")
    assert exit_.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f"--{key.name} " in shown for key in dataclasses.fields(Config))
    assert "Larger gradients are scaled down to this norm. 0: no limit." in shown
    assert "lr = learning_rate" in shown


@pytest.mark.parametrize(
    ("config_type", "own", "common", "rest"),
    [
        (GRPOConfig, ["epsilon", "loss_type"], ["model", "reward_funcs", "num_generations"], ["top_k", "vllm_patches"]),
        (PretrainConfig, ["packing"], ["model", "max_length", "save_steps"], ["optim", "pipeline_model_parallel_size"]),
        (DPOConfig, ["loss_type", "beta"], ["model", "lora_rank"], ["ref_model", "lora_alpha"]),
    ],
)
def test_help_shows_common_keys_then_those_of_the_trainer_and_the_names_of_the_others(
    config_type: type[Any], own: list[str], common: list[str], rest: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load_config(config_type, ["--help"])
    shown = capsys.readouterr().out
    titles = ("\ncommon keys:", "\nkeys of this trainer:", "\nfurther keys, of all trainers or of several:")
    places = [shown.index(title) for title in titles]
    assert places == sorted(places)
    assert all(places[1] < shown.index(f"\n  --{name}") < places[2] for name in own)
    assert all(places[0] < shown.index(f"\n  --{name}") < places[1] for name in common)
    further = shown[places[2] :]
    assert all(re.search(rf"\b{name}\b", further) for name in rest)
    assert max(map(len, shown.splitlines())) <= 120


@pytest.mark.parametrize(
    ("topic", "default", "held"),
    [
        ("gradient_checkpointing", "auto", "auto"),
        ("token_budget", "auto", "auto"),
        ("per_device_train_batch_size", "auto (8 per step)", 8),
        ("learning_rate", "2.0e-05", 2e-5),
    ],
)
def test_help_shows_the_default_that_holds_where_a_file_says_nothing(
    topic: str, default: str, held: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert getattr(load_config(SFTConfig, ["--model", "m", "--dataset", "d"]), topic) == held
    with pytest.raises(SystemExit):
        print_help(SFTConfig, None, topic)
    assert f"default: {default}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("topic", "there", "not_there"),
    [
        ("vllm", ["vllm_max_model_len", "vllm_patches"], ["learning_rate", "rollout_engine"]),
        ("megatron", ["tensor_model_parallel_size", "megatron"], ["learning_rate"]),
        ("Placement", ["use_ray", "device_groups"], ["learning_rate"]),
        ("eval", ["eval_steps", "num_generations_eval", "eval_dataset"], ["learning_rate"]),
        ("--learning_rate", ["learning_rate"], ["use_ray"]),
    ],
)
def test_help_about_a_group_or_a_word_shows_its_keys_alone(
    topic: str, there: list[str], not_there: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        print_help(GRPOConfig, None, topic)
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"\n  --{name}" in shown for name in there)
    assert not [name for name in not_there if f"\n  --{name}" in shown]


def test_help_about_what_is_no_key_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        load_config(GRPOConfig, ["--help", "megatrn"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "error: no key and no group of keys has 'megatrn' (did you mean megatron?)\n"


@pytest.mark.parametrize("config_type", [SFTConfig, PretrainConfig, GRPOConfig])
def test_every_key_of_every_trainer_has_a_meaning_in_its_help(
    config_type: type[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load_config(config_type, ["--help", "all"])
    shown = " ".join(capsys.readouterr().out.split())
    for key in dataclasses.fields(config_type):
        (told,) = re.findall(rf" --{key.name} (.*?)\((?:required, )?type", shown)
        assert len(told.split()) >= 2, key.name


def test_what_is_printed_reads_back_to_the_same_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        load("--lr", "1e-5", "--stops", "[1, 2]", "--print_config")
    assert exit_.value.code == 0
    (tmp_path / "x.yaml").write_text(capsys.readouterr().out)
    found = load_config(Config, ["--config", str(tmp_path / "x.yaml")])
    assert found == load("--lr", "1e-5", "--stops", "[1, 2]")


def test_the_printed_defaults_are_a_template_even_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(Config, ["--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert list(printed) == [key.name for key in dataclasses.fields(Config)]
    assert printed["model"] is None


def test_a_saved_configuration_reads_back_to_an_equal_one(tmp_path: Path) -> None:
    config = Config(
        model="tiny",
        dataset=[{"prompt": "1+1=", "answer": "2"}, {"prompt": "ü\n'\"", "answer": "on"}],
        learning_rate=1e-5,
        adam_epsilon=1e-08,
        weight_decay=0.1 + 0.2,
        run_name="007",
        system="",
        prompt_template="Q: {question}\n",
        model_init_kwargs={"a": "10", "b": [1, 2.5, None], "c": {"d": "null"}},
        reward_funcs=["exact", {"name": "length", "target": 3}],
        weights=[0.1, 1.0],
        stops=(1, 2),
        scale=False,
        save_total_limit=2,
        resume_from_checkpoint=True,
        device_groups={"train": {"cpus": 2, "env": {"A": "1"}}},
        env={"A": "1", "B": 2},
        report_to=["none"],
    )
    save_config(config, tmp_path / "outputs")
    assert load_config(Config, ["--config", str(tmp_path / "outputs" / "config.yaml")]) == config
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["config.yaml"]


REAL = [
    SFTConfig(model="tiny", dataset="texts", packing=True, max_length=64, eos_token="", loss_type="dft"),
    PretrainConfig(model="tiny", dataset=["a.txt", "b"], max_steps=7, run_name="1e-5", seed=0),
    GRPOConfig(
        model="tiny",
        dataset=[{"prompt": [{"role": "user", "content": "1+1="}], "answer": 2}],
        eval_dataset="sums",
        reward_funcs=["exact_answer", {"name": "soft_overlong_punishment", "max_completion_len": 9}],
        reward_weights=[1, 0.1],
        scale_rewards=False,
        epsilon_high=0.28,
        device_groups={"all": {"device": "GPU", "ranks": "list(range(0, 2))", "workers": ["train", "rollout"]}},
        use_ray=True,
        generation_kwargs={"typical_p": 0.9},
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}",
        resume_from_checkpoint="auto",
    ),
]


@pytest.mark.parametrize("config", REAL, ids=lambda config: type(config).__name__)
def test_the_saved_configuration_of_a_trainer_reads_back_to_an_equal_one(config: Any, tmp_path: Path) -> None:
    save_config(config, tmp_path)
    assert load_config(type(config), ["--config", str(tmp_path / "config.yaml")]) == config


def test_many_rows_passed_in_python_are_not_written_out(tmp_path: Path) -> None:
    save_config(Config(model="tiny", dataset=[{"text": "a"}] * 100_000), tmp_path)
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert saved["dataset"] == "100000 rows passed in Python, from {'text': 'a'} on"


def test_what_python_alone_can_pass_is_saved_as_a_description(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"prompt": "1+1="}])
    config = Config(model="tiny", dataset=rows, reward_funcs=[len], output_dir=str(tmp_path))
    save_config(config, tmp_path)
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert saved["dataset"].startswith("Dataset(")
    assert saved["reward_funcs"] == ["<built-in function len>"]


# Running


@RayHelper.worker(group=["train", "rollout"])
class DummyTrainer:
    """Remembers that it ran."""

    made: ClassVar[list[Config]] = []
    problem: ClassVar[BaseException | None] = None

    def __init__(self, config: Config) -> None:
        self.made.append(config)

    def train(self) -> dict[str, float]:
        if self.problem is not None:
            raise self.problem
        return {"loss": 0.5}


DUMMY = f"{__name__}:DummyTrainer"
LOADING = f"{DUMMY}: loading model tiny, data sums\n"  # the first line of every run


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations of the dummies that ran."""
    monkeypatch.setattr(DummyTrainer, "made", [])
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    return DummyTrainer.made


def test_main_runs_the_trainer_with_its_configuration(made: list[Config]) -> None:
    main(DUMMY, [*NEEDED, "--seed", "7"])
    assert [config.seed for config in made] == [7]


def test_main_answers_a_mistake_with_one_line_and_exit_code_2(
    made: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(DUMMY, [*NEEDED, "--sead", "7"])
    assert exit_.value.code == 2
    assert (
        capsys.readouterr().err
        == "error: command line: unknown key sead (did you mean seed?); --help all lists all keys\n"
    )
    assert made == []


def test_a_mistake_that_the_trainer_finds_is_answered_the_same_way(
    made: list[Config], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(DummyTrainer, "problem", ConfigError("no row has a prompt"))
    with pytest.raises(SystemExit) as exit_:
        main(DUMMY, NEEDED)
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"{LOADING}error: no row has a prompt\n"


@pytest.mark.parametrize("is_torchvision", [True, False])
def test_a_torchvision_for_another_torch_ends_in_one_line(
    is_torchvision: bool, made: list[Config], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ModuleNotFoundError("Could not import module 'Qwen3ForCausalLM'")  # as transformers tells it
    error.__cause__ = RuntimeError(f"operator {'torchvision' if is_torchvision else 'plugin'}::nms does not exist")
    versions = {"torch": "2.5.0+cpu", "torchvision": "0.28.0"}
    monkeypatch.setattr(DummyTrainer, "problem", error)
    monkeypatch.setattr(mistakes, "version", versions.__getitem__)
    with pytest.raises(SystemExit if is_torchvision else ModuleNotFoundError) as ended:
        main(DUMMY, NEEDED)
    if is_torchvision:
        assert isinstance(ended.value, SystemExit)
        assert ended.value.code == 2
        told = capsys.readouterr().err.removeprefix(f"{LOADING}error: ")
        assert told.startswith("torchvision 0.28.0 does not fit torch 2.5.0+cpu. Run pip uninstall -y torchvision; ")
        assert told.endswith("torch==2.5.0+cpu --index-url https://download.pytorch.org/whl/cpu\n")


def test_bars_are_off_in_all_processes_but_the_first_unless_the_shell_wants_them(
    made: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str | None, str | None]] = []
    monkeypatch.setattr(cli, "run", lambda *_: seen.append(tuple(map(os.environ.get, cli.NO_BARS))))
    monkeypatch.setattr(cli, "NO_BARS", frozenset({"TQDM_DISABLE"}))
    main(DUMMY, NEEDED)  # where a user's own bars are to be seen
    monkeypatch.setattr(cli, "_is_other_process", lambda: True)
    main(DUMMY, NEEDED)
    monkeypatch.setenv("TQDM_DISABLE", "0")
    main(DUMMY, NEEDED)
    monkeypatch.delenv("TQDM_DISABLE")
    assert seen == [(None,), ("1",), ("0",)]
    assert "TQDM_DISABLE" not in os.environ


def test_a_bug_keeps_its_traceback(made: list[Config], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DummyTrainer, "problem", RuntimeError("bug"))
    with pytest.raises(RuntimeError, match="bug"):
        main(DUMMY, NEEDED)


SESSION = RayHelper.session


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands for Ray: what the session was opened with, and 'closed' once it was left."""
    events: list[Any] = []

    @contextmanager
    def opened(
        device_groups: DeviceGroups, *, runtime: str = "", ray_address: str | None = None, trace: Path | None = None
    ) -> Iterator[None]:
        events.extend([device_groups, runtime or ray_address, *([] if trace is None else [trace])])
        try:
            yield
        finally:
            events.append("closed")

    monkeypatch.setattr(RayHelper, "session", opened)
    monkeypatch.delattr(RunConfig, "__rayhelper_off__")  # as a real session is, this one is taken for one
    return events


def test_ctrl_c_stops_the_workers_and_exits_with_130(
    made: list[Config], session: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(DummyTrainer, "problem", KeyboardInterrupt())
    with pytest.raises(SystemExit) as exit_:
        main(DUMMY, [*NEEDED, "--use_ray", "true"])
    assert exit_.value.code == 130
    assert session[-1] == "closed"
    assert capsys.readouterr().err == f"{LOADING}interrupted\n"


def test_sigterm_before_the_first_step_ends_the_process_though_it_may_be_process_1(
    made: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel keeps signals without a handler from process 1 of a container: a pod would wait for its kill."""
    monkeypatch.setattr(DummyTrainer, "check", lambda *_: os.kill(os.getpid(), signal.SIGTERM), raising=False)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit) as exit_:
            main(DUMMY, NEEDED)
        assert exit_.value.code == 143
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not made


def test_without_device_groups_one_worker_hosts_all_roles(made: list[Config], session: list[Any]) -> None:
    main(DUMMY, [*NEEDED, "--use_ray", "true", "--ray_address", "head:6379"])
    groups, address, _ = session
    (group,) = groups.groups
    assert (group.roles, group.num_workers, address) == (("train", "rollout"), 1, "head:6379")
    assert len(made) == 1


def test_run_does_from_python_what_the_command_line_does(
    made: list[Config], session: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLI_TEST_A", "shell")
    groups = {"train": {"cpus": 2}, "rollout": {"cpus": 1}}
    assert run(DummyTrainer, config_on(groups, use_ray=True, env={"CLI_TEST_A": 1})) == {"loss": 0.5}
    assert [(group.roles, group.num_workers) for group in session[0].groups] == [(("train",), 2), (("rollout",), 1)]
    assert (session[-1], len(made), os.environ["CLI_TEST_A"]) == ("closed", 1, "1")
    with pytest.raises(ConfigError, match="role 'rollout' is not in device_groups"):
        run(DummyTrainer, config_on({"train": {"cpus": 1}}, use_ray=True))


def test_a_trainer_that_asks_for_ray_is_not_constructed_without_it(made: list[Config]) -> None:
    with pytest.raises(ConfigError, match=r"use_ray is true, but DummyTrainer .*import run; run\(DummyTrainer, config"):
        DummyTrainer(Config(model="tiny", dataset="sums", use_ray=True))
    with pytest.raises(ConfigError, match="Or set use_ray=False"):
        DummyTrainer(config=config_on({"train": {"cpus": 1}}, use_ray=True))
    assert made == []
    with RayHelper.session(
        {"one": {"device": "CPU", "ranks": 1, "workers": ["train", "rollout"]}}, runtime="inprocess"
    ):
        DummyTrainer(Config(model="tiny", dataset="sums", use_ray=True))
    assert len(made) == 2  # on the driver and on the worker


def test_device_groups_without_use_ray_are_told_to_be_unused(
    made: list[Config], session: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="trainers.cli"):
        main(DUMMY, [*NEEDED, "--train.cpus", "1", "--rollout.cpus", "1"])
    assert session == []
    assert "device_groups is not used, because use_ray is false" in caplog.text


@pytest.mark.parametrize("where", [["--timeout_s", "5"], ["--train.cpus", "1", "--train.timeout_s", "5"]])
def test_timeout_s_holds_in_one_process(made: list[Config], session: list[Any], where: list[str]) -> None:
    if where[0] == "--train.cpus":
        where = [*where, "--rollout.cpus", "1"]
    main(DUMMY, [*NEEDED, *where])
    assert session[1] == "off"
    assert session[0].limit_of("train")[0] == 5


@RayHelper.worker(group=["train"])
class TracedTrainer:
    """As a trainer of one call."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    @RayHelper.function(group="train")
    def step(self) -> float:
        return 0.5

    def train(self) -> dict[str, float]:
        return {"loss": self.step()}


def test_trace_records_the_calls_of_a_run_in_its_folder(
    tmp_path: Path, made: list[Config], session: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    config = Config(model="tiny", dataset="sums", output_dir=str(folder), trace=True)
    with monkeypatch.context() as real:
        real.setattr(RayHelper, "session", SESSION)
        run(TracedTrainer, config)
    spans, metadata = read_trace(folder / "trace.json.gz")
    assert metadata["runtime"] == "off"
    assert [span.name for span in spans if (span.role, span.phase) == ("train", "run")] == ["TracedTrainer.step"]
    run(DummyTrainer, dataclasses.replace(config, use_ray=True))
    assert session[2] == folder / "trace.json.gz"


def config_on(groups: dict[str, Any], **changed: Any) -> Config:
    return Config(model="tiny", dataset="sums", device_groups=groups, **changed)


def test_timeout_and_env_hold_for_groups_that_say_nothing_else() -> None:
    groups = placement(
        DummyTrainer,
        config_on(
            {"train": {"cpus": 1}, "rollout": {"cpus": 1, "timeout_s": 5, "env": {"A": "own"}}},
            timeout_s=60.0,
            env={"A": "shared", "B": 2},
        ),
    )
    train, rollout = groups.groups
    assert groups.limit_of("driver")[0] == 60.0  # reward functions are the driver's
    assert (train.timeout_s, dict(train.env)) == (60.0, {"A": "shared", "B": "2"})
    assert (rollout.timeout_s, dict(rollout.env)) == (5.0, {"A": "own", "B": "2"})


def test_a_role_of_the_trainer_must_be_hosted() -> None:
    with pytest.raises(ConfigError, match="role 'rollout' is not in device_groups"):
        placement(DummyTrainer, config_on({"train": {"cpus": 1}}))


@pytest.mark.parametrize(
    "groups",
    [
        {"default": {"device": "CPU", "ranks": 2, "workers": ["default"]}, "g": {}},
        {"nproc_per_node": 4, "a": {"device": "CPU", "ranks": 2, "workers": ["rlhf:default"]}, "g": {}},
        '{"device_groups": {"a": {"device": "CPU", "ranks": 2, "workers": "pt:default"}, "g": {}}}',
        {"default": {"cpus": 2}, "rollout": {"cpus": 1}},
    ],
    ids=["default", "rlhf:default", "in JSON", "as a section"],
)
def test_the_names_that_ms_swift_has_for_roles_are_ours(groups: Any) -> None:
    if isinstance(groups, str):
        groups = groups.replace('"g": {}', '"g": {"device": "CPU", "ranks": 1, "workers": ["rollout"]}')
    elif "g" in groups:
        groups["g"] = {"device": "CPU", "ranks": 1, "workers": ["rollout"]}
    placed = placement(DummyTrainer, config_on(groups)).groups
    assert [(group.roles, group.num_workers) for group in placed] == [(("train",), 2), (("rollout",), 1)]


def test_a_role_that_no_trainer_has_would_stand_idle(tmp_path: Path) -> None:
    groups = {"train": {"cpus": 1}, "rollout": {"cpus": 1}, "judge": {"cpus": 1}}
    with pytest.raises(ConfigError, match=r"hosts 'judge', but DummyTrainer has only the roles train, rollout"):
        placement(DummyTrainer, config_on(groups))
    (tmp_path / "judges.py").write_text("")
    assert "judge" in placement(DummyTrainer, config_on(groups, external_plugins=[str(tmp_path / "judges.py")])).roles


@pytest.fixture
def four_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As process 0 of the four that torchrun started."""
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)


def test_the_processes_of_torchrun_host_all_roles(made: list[Config], session: list[Any], four_processes: None) -> None:
    main(DUMMY, NEEDED)
    groups, runtime, closed = session
    (group,) = groups.groups
    assert (group.roles, group.num_workers, runtime, closed) == (("train", "rollout"), 4, "torchrun", "closed")
    assert len(made) == 1


def test_device_groups_say_which_processes_of_torchrun_host_a_role(
    made: list[Config], session: list[Any], four_processes: None
) -> None:
    main(DUMMY, [*NEEDED, "--train.cpus", "3", "--rollout.cpus", "1"])
    assert [(group.roles, group.num_workers) for group in session[0].groups] == [(("train",), 3), (("rollout",), 1)]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--use_ray", "true"], "torchrun started 4 processes, each of which would start the workers of use_ray"),
        (["--train.cpus", "1", "--rollout.cpus", "1", "--train.env.A", "1"], "group 'train' has env, which torchrun's"),
    ],
    ids=["ray", "env"],
)
def test_what_torchrun_cannot_do_is_refused(
    argv: list[str], told: str, made: list[Config], four_processes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(DUMMY, [*NEEDED, *argv])
    assert exit_.value.code == 2
    assert told in capsys.readouterr().err
    assert made == []


def test_a_mistake_that_process_0_does_not_find_is_told_after_a_while(
    four_processes: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []
    monkeypatch.setenv("RANK", "1")
    for name in ("TQDM_DISABLE", "HF_DATASETS_DISABLE_PROGRESS_BARS"):  # which process 1 sets for itself
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    monkeypatch.setattr(cli.time, "sleep", waited.append)
    with pytest.raises(SystemExit) as exit_:
        main("sft", ["--sead", "7"])
    assert (exit_.value.code, waited) == (2, [cli.TOLD_BY_FIRST_S])
    assert "unknown key sead" in capsys.readouterr().err


def test_env_of_the_file_is_exported_and_wins_over_the_shell(
    made: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLI_TEST_A", "shell")
    monkeypatch.setenv("CLI_TEST_B", "shell")
    (tmp_path / "x.yaml").write_text("env: {CLI_TEST_A: 1}\n")
    main(DUMMY, ["--config", str(tmp_path / "x.yaml"), *NEEDED])
    assert (os.environ["CLI_TEST_A"], os.environ["CLI_TEST_B"]) == ("1", "shell")


# As a user meets it: a process of its own


def python(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [warm.python(), *arguments],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_the_key_rlhf_type_chooses_the_trainer(
    made: list[Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in (commands, command_line):
        monkeypatch.setattr(module, "rlhf_types", lambda: {"grpo": Config})
    monkeypatch.setattr(commands, "trainer_of", {Config: DummyTrainer}.get)
    (tmp_path / "x.yaml").write_text("rlhf_type: grpo\nseed: 7\n")
    main("rlhf", ["--config", str(tmp_path / "x.yaml"), *NEEDED])
    assert [config.seed for config in made] == [7]


RLHF_TYPES = "cpo, simpo, orpo, dpo, gkd, grpo, kto, ppo, rm"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], f"rlhf_type must be given, in the file or as --rlhf_type: one of {RLHF_TYPES}"),
        (["--rlhf_type", "ppoo"], f"rlhf_type must be one of {RLHF_TYPES}, got 'ppoo'"),
    ],
    ids=["none", "typo"],
)
def test_an_rlhf_type_without_a_trainer_is_told_what_to_use(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main("rlhf", argv)
    assert exit_.value.code == 2
    assert told in capsys.readouterr().err


def test_an_unknown_trainer_is_answered_with_the_nearest() -> None:
    done = python("-m", "trainers", "grop", "--config", "x.yaml")
    assert done.returncode == 2
    assert "there is no trainer 'grop' (did you mean grpo?)" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def no_ray(tmp_path: Path) -> str:
    """A folder for PYTHONPATH, in which ``ray`` is a package that cannot be imported: nobody starts it unseen."""
    (tmp_path / "path" / "ray").mkdir(parents=True)
    (tmp_path / "path" / "ray" / "__init__.py").write_text("raise SystemExit('ray was imported')")
    return str(tmp_path / "path")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--learning_rat", "1"], "unknown key learning_rat (did you mean learning_rate?)"),
        (["--device_groups", '{"a": {"device": "CPU", "ranks": 2, "workers": ["train"]}}'], "role 'rollout' is not in"),
        (["--train.cpus", "2", "--rollout.cpus", "1", "--num_generations", "3"], "multiple of num_generations=3"),
        (["--reward_funcs", "exact_answr"], "Did you mean 'exact_answer'?"),
    ],
    ids=["unknown key", "role without a group", "groups torn apart", "unknown reward"],
)
def test_a_mistake_costs_one_line_and_exit_code_2_and_starts_nothing(argv: list[str], told: str, no_ray: str) -> None:
    needed = ["--model", "tiny", "--dataset", "sums", "--use_ray"]
    needed += [] if "--reward_funcs" in argv else ["--reward_funcs", "exact_answer"]
    done = python("-m", "trainers.grpo", *needed, *argv, PYTHONPATH=no_ray)
    *before, line = done.stderr.splitlines()
    assert before in ([], ["grpo: loading model tiny, data sums"]), "of mistakes in single keys not even that"
    assert line.startswith("error: ")
    assert told in line
    assert (done.returncode, done.stdout) == (2, "")


def test_env_reaches_what_is_read_at_import(tmp_path: Path) -> None:
    """Libraries read the environment when they are imported, so the configuration is read first."""
    (tmp_path / "x.yaml").write_text("env: {READ_AT_IMPORT: 3}\nmodel: m\ndataset: d\n")
    (tmp_path / "reader.py").write_text(
        "import os\n"
        "from rayhelper import RayHelper\n"
        "from trainers.configuration.shared import RunConfig\n"
        "at_import = os.environ.get('READ_AT_IMPORT')\n"
        "@RayHelper.worker(group='train')\n"
        "class Trainer:\n"
        "    def __init__(self, config: RunConfig): pass\n"
        "    def train(self):\n"
        "        print(at_import)\n"
        "        return {}\n"
    )
    reader = f"{tmp_path / 'reader.py'}:Trainer"
    done = python("-m", "trainers", reader, "--config", str(tmp_path / "x.yaml"), READ_AT_IMPORT="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3\n"


@pytest.mark.parametrize("name", ["grpo", "sft"])
def test_a_mistake_is_told_without_importing_torch(name: str, tmp_path: Path) -> None:
    done = python("-X", "importtime", "-m", f"trainers.{name}", "--lerning_rate", "1")
    assert done.returncode == 2
    assert "did you mean learning_rate?" in done.stderr
    assert not [line for line in done.stderr.splitlines() if line.endswith((" torch", " transformers", " ray"))]


SECRET = "hunter2"


def test_secrets_are_written_nowhere_and_come_from_the_shell_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "APIKEY")
    open_names = ("TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "PWD", "MONITOR")
    url = "mongodb://me:{}@host:1/x"
    env: dict[str, str | int | float] = dict.fromkeys(names, SECRET) | dict.fromkeys(open_names, "8")
    env["RUNS"] = url.format(SECRET)
    groups = {"all": {"device": "CPU", "ranks": 1, "workers": ["train"], "env": {"GROUP_TOKEN": SECRET}}}
    config = Config(model="m", dataset="d", env=env, device_groups=groups)
    save_config(config, tmp_path)
    text = (tmp_path / "config.yaml").read_text()
    assert SECRET not in text
    shown = dict.fromkeys(names, "***") | dict.fromkeys(open_names, "8") | {"RUNS": url.format("***")}
    assert yaml.safe_load(text)["env"] == shown
    arguments = ["--config", str(tmp_path / "config.yaml")]
    with pytest.raises(
        ConfigError, match=r"env: HF_TOKEN, .* was masked when the file was written. Set it in the shell"
    ):
        load_config(Config, arguments)
    for name in (*names, "GROUP_TOKEN"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("RUNS", url.format(SECRET))
    assert load_config(Config, arguments) == config
    assert without_secrets(["--env.RUNS", url.format(SECRET)], config)[1] == url.format("***")
    with pytest.raises(SystemExit):
        load_config(Config, [*NEEDED, "--env.HF_TOKEN", SECRET, "--print_config"])
    assert SECRET not in capsys.readouterr().out


def test_secrets_among_arguments_and_addresses_are_written_nowhere(
    tmp_path: Path,
) -> None:
    keys: dict[str, Any] = {
        "model_init_kwargs": {"token": SECRET, "revision": "main"},
        "chat_template_kwargs": {"a_token": "shown"},
        "columns": {"key": "prompt"},
        "dataset": [f"https://me:{SECRET}@host/a", f"https://host/b?v=1&api_key={SECRET}&x=2", "c"],
        "vllm_engine_kwargs": {"hf_token": SECRET, "max_num_seqs": 4},
        "reward_funcs": [{"name": "judge", "api_key": SECRET, "headers": {"Authorization": f"Bearer {SECRET}"}}],
        "environment": {"name": "shop", "base_url": f"http://me:{SECRET}@shop", "eos_token": "</s>"},
        "rollout_engine": "vllm",
    }
    config = GRPOConfig(model="m", **keys)
    save_config(config, tmp_path)
    text = (tmp_path / "config.yaml").read_text()
    assert SECRET not in text
    origin.begin(tmp_path, config, trainer="x", first_step=0, num_steps=1)
    assert SECRET not in (tmp_path / "run.json").read_text()
    said = yaml.safe_load(text)
    assert said["model_init_kwargs"] == {"token": "***", "revision": "main"}
    assert said["dataset"] == ["https://me:***@host/a", "https://host/b?v=1&api_key=***&x=2", "c"]
    assert said["environment"] == {"name": "shop", "base_url": "http://me:***@shop", "eos_token": "</s>"}
    assert (said["columns"], said["chat_template_kwargs"]) == ({"key": "prompt"}, {"a_token": "shown"})
    assert said["reward_funcs"][0]["headers"] == {"Authorization": "***"}
    with pytest.raises(ConfigError, match=r"was masked when the file was written. Write its value"):
        load_config(GRPOConfig, ["--config", str(tmp_path / "config.yaml")])
    words = ["--model_init_kwargs", json.dumps(keys["model_init_kwargs"]), f"--dataset={keys['dataset'][0]}"]
    assert SECRET not in " ".join(without_secrets(words, config))
    sampling = SamplingConfig(model="m", dataset="d", engine_kwargs={"token": SECRET})
    assert SECRET not in str(sampling.deciding())


class LeavingTrainer:
    """As one whose plugin, or a library that it calls, ends the process."""

    __rayhelper_roles__: ClassVar = ("train",)

    def __init__(self, config: TrainConfig) -> None:
        sys.exit(0)


def test_a_run_that_something_ends_by_sys_exit_has_not_ended_well(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"called sys.exit\(0\)"):
        run(LeavingTrainer, Config(model="m", dataset="d", output_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({"trust_remote_code": True}, "model_init_kwargs holds trust_remote_code, which is the key trust_remote_code"),
        ({"torch_dtype": "float16"}, "model_init_kwargs holds torch_dtype, which is the key dtype"),
        ({"device_map": "auto"}, "model_init_kwargs holds device_map, which the trainer decides"),
    ],
)
def test_arguments_of_a_model_do_not_overrule_keys(kwargs: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Config(model="m", dataset="d", model_init_kwargs=kwargs)


def test_a_cluster_without_room_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise PlacementError("group 'policy' needs 4 GPUs, and the cluster has 0")

    monkeypatch.setattr(cli, "run", full)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    with pytest.raises(SystemExit) as ended:
        main("sft", ["--model", "m", "--dataset", str(rows)])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: group 'policy' needs 4 GPUs, and the cluster has 0"
