"""A trainer of your own: found by its class, with its keys, roles, checks, plan and placement declared in its files."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trainers
from rayhelper import ConfigError
from rayhelper.check.checker import findings
from rayhelper.device_groups import DeviceGroups
from rayhelper.planning.dry_run import make_plan
from rayhelper.planning.refusals import UNNAMED
from rayhelper.text import parse_text
from tests import warm
from trainers.cli import load_config, placement, run
from trainers.commands import command_named, commands, refusals
from trainers.configuration.reading import folders
from trainers.configuration.roles import TRAIN, Role
from trainers.configuration.shared import TrainConfig

ROOT = Path(__file__).parents[2]
RAFT = '''
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from rayhelper import ConfigError, RayHelper
from trainers.configuration.completion import CompletionConfig
from trainers.configuration.roles import ROLLOUT, TRAIN, Role


@dataclass(frozen=True, kw_only=True)
class RaftConfig(CompletionConfig):
    """Keys of expert iteration."""

    ROLES: ClassVar = {
        "learner": replace(TRAIN, also=("train", "default")),
        "rollout": ROLLOUT,
        "judge": Role("judges", models=("judge_model",), host="learner", keys=("strictness",), also=("prm",)),
    }

    num_kept: int = 2
    """Completions of a prompt that are learned from."""
    judge_model: str | None = None
    """What judges completions."""
    strictness: float = 0.5
    """Of the judge."""


@RayHelper.worker(group=["learner", "rollout", "judge"])
class RaftTrainer:
    def __init__(self, config: RaftConfig) -> None:
        self.config = config

    @staticmethod
    def check(config: RaftConfig, groups) -> None:
        if config.num_kept > 4:
            raise ConfigError(f"num_kept is {config.num_kept}, and there are 4 completions. Write 4 or less.")

    @RayHelper.function(group="rollout", dispatch="slice", collect="flatten")
    def generate(self, prompts):
        return [prompt * 2 for prompt in prompts]

    @RayHelper.function(group="judge", dispatch="slice", collect="flatten")
    def judged(self, texts):
        return [len(text) * self.config.strictness for text in texts]

    @RayHelper.function(group="learner", execute="first")
    def learn(self, texts, rewards):
        best = sorted(zip(rewards, texts))[-self.config.num_kept :]
        return sum(reward for reward, _ in best)

    def train(self):
        texts = self.generate(["a", "bb", "ccc"])
        return {"reward": self.learn(texts, self.judged(texts))}


class Undecorated:
    def __init__(self, config: RaftConfig) -> None: ...


@RayHelper.worker(group="train")
class NoTrain:
    def __init__(self, config: RaftConfig) -> None: ...


@RayHelper.worker(group="train")
class NoConfig:
    def __init__(self, config) -> None: ...
    def train(self): ...


@RayHelper.worker(group="train")
class UnknownConfig(NoConfig):
    def __init__(self, config: Elsewhere) -> None: ...


@RayHelper.worker(group="train")
class AnyConfig(NoConfig):
    def __init__(self, config: dict) -> None: ...


class Forgotten(RaftConfig):
    num_kept: int = 3


@RayHelper.worker(group="train")
class ForgottenConfig(NoConfig):
    def __init__(self, config: Forgotten) -> None: ...


@RayHelper.worker(group="train")
class SaidByName:
    CONFIG: ClassVar = RaftConfig

    def __init__(self, config) -> None: ...
    def train(self): ...


@RayHelper.worker(group=["learner", "rolout", "judge"])
class Misspelt(NoConfig):
    def __init__(self, config: RaftConfig) -> None: ...


@RayHelper.worker(group=["rollout", "judge"])
class Homeless(NoConfig):
    def __init__(self, config: Judged) -> None: ...


class Judged(RaftConfig):
    ROLES: ClassVar = {"rollout": ROLLOUT, "judge": RaftConfig.ROLES["judge"]}


NUMBER = 3
'''
KEYS = "model: m\ndataset: d\nreport_to: none\n"


@pytest.fixture
def raft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with the trainer, in a folder that nobody has heard of."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "raft.py").write_text(RAFT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path / "mine" / "raft.py"
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mine", "alone", "broken")]:
        del sys.modules[name]


def python(folder: Path, *arguments: str, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A process of a user who is in ``folder``."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys([str(path), str(ROOT)]))}
    command = [warm.python(), *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)


# As a user meets it


def test_a_trainer_of_your_own_has_the_command_line(raft: Path) -> None:
    (raft.parents[1] / "x.yaml").write_text(f"{KEYS}num_kept: 1\nlearner: {{cpus: 1}}\njudge: {{cpus: 1, model: j}}\n")
    program = "import runpy, sys; sys.argv[0] = 'x'; from trainers import cli; ran = cli.run; "
    program += "cli.run = lambda *given: print(ran(*given), given[1].judge_model); "
    program += "cli.main(sys.argv[1], sys.argv[2:])"
    done = python(raft.parents[1], "-c", program, "mine.raft:RaftTrainer", "--config", "x.yaml", "--num_kept=2")
    assert (done.returncode, done.stdout) == (0, "{'reward': 5.0} j\n"), done.stderr


def test_its_file_can_be_named_from_anywhere_and_its_help_has_its_keys(raft: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    done = python(tmp_path / "elsewhere", "-m", "trainers", "../mine/raft.py:RaftTrainer", "--help")
    assert done.returncode == 0, done.stderr
    assert "--num_kept" in done.stdout
    assert "Completions of a prompt that are learned from (default: 2)" in " ".join(done.stdout.split())
    assert "usage: python -m trainers ../mine/raft.py:RaftTrainer --config FILE" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("target", "more", "told"),
    [
        ("mine.raft:RaftTrainer", ["--num_kep=1"], "unknown key num_kep (did you mean num_kept?)"),
        ("mine.raft:RaftTrainer", ["--num_kept=5"], "num_kept is 5, and there are 4 completions"),
        ("mine.raft:RaftTrainr", [], "has no class RaftTrainr. Did you mean 'RaftTrainer'?"),
        ("mine/rafts.py:RaftTrainer", [], "there is no file 'mine/rafts.py'. Did you mean 'raft.py'?"),
        ("raft", [], "there is no trainer 'raft'"),
    ],
)
def test_a_mistake_is_one_line_with_its_remedy(target: str, more: list[str], told: str, raft: Path) -> None:
    done = python(raft.parents[1], "-m", "trainers", target, "--model=m", "--dataset=d", *more)
    *before, line = done.stderr.splitlines()
    assert before in ([], [f"{target}: loading model m, data d"])
    assert line.startswith("error: ")
    assert told in line
    assert (done.returncode, done.stdout) == (2, "")


def test_without_a_name_all_trainers_are_named_and_nothing_large_is_imported() -> None:
    done = python(ROOT, "-X", "importtime", "-m", "trainers")
    assert done.returncode == 2
    names = "classification, seq_cls, cpo, simpo, orpo, dpo, embedding, gkd, distillation, grpo, kto, ppo, "
    names += "reranking, reranker, reward, rm, sampling, sample, sft, pretrain, pt, rlhf"
    assert f"NAME is one of {names}" in done.stderr
    assert "path/to/file.py:MyTrainer" in done.stderr
    assert not [line for line in done.stderr.splitlines() if line.endswith((" torch", " transformers", " ray"))]


def test_plans_ask_the_command_line_whose_roles_they_are(tmp_path: Path) -> None:
    """By the entry point of this package, from its own setup.py: what is installed may be older."""
    metadata = tmp_path / "metadata"
    metadata.mkdir()
    made = python(ROOT, "setup.py", "-q", "egg_info", "--egg-base", str(metadata))
    assert made.returncode == 0, made.stderr
    (tmp_path / "x.yaml").write_text("rlhf_type: dpo\nmodel: m\ndefault: {gpus: 2}\n")
    asked = ["-m", "rayhelper", "plan", "--config", "x.yaml", "--json"]
    for more, does in (([], "unknown"), (["--trainer=dpo"], "train"), (["--trainer=rlhf"], "train")):
        done = python(tmp_path, *asked, *more, path=metadata)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["groups"][0]["roles"][0]["does"] == does
    done = python(tmp_path, *asked, "--trainer=dpoo", path=metadata)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no installed package has a trainer 'dpoo'. Write module:Class" in done.stderr


# What is no trainer


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Undecorated", r"raft.py:Undecorated has no roles. Write @RayHelper.worker\(group=\[...\]\) above the class"),
        ("NoTrain", r"raft.py:NoTrain has no method train\(self\), which trains and returns"),
        ("NoConfig", r"does not name its keys. Write def __init__\(self, config: MyConfig\) -> None, with a "),
        ("UnknownConfig", "does not name its keys.* that is known where the class is defined"),
        ("AnyConfig", r"the config of .*raft.py:AnyConfig is a dict, which must be a dataclass that extends TrainConf"),
        (
            "ForgottenConfig",
            r"Forgotten sets num_kept, which RayHelper would ignore. Write @dataclass\(frozen=True, kw_only",
        ),
        ("Misspelt", "Misspelt has role 'rolout', and ROLES of its configuration 'rollout'. Write one name in both"),
        ("Homeless", r"ROLES places role 'judge' with 'learner', which it does not declare \(declared: rollout"),
        ("NUMBER", "raft.py:NUMBER is a int, not a class"),
        ("Elsewhere.Inner", "has no class Elsewhere.Inner"),
        ("", "names no class. Write module:Class, or path/to/file.py:Class"),
    ],
)
def test_a_class_that_is_no_trainer_is_told_what_it_lacks(name: str, told: str, raft: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        command_named(f"{raft}:{name}")


UNDECLARED = """
from rayhelper import RayHelper

@RayHelper.worker(group="train")
class Judged:
    @RayHelper.function(group="judge")
    def judge(self) -> None: ...
"""


def test_a_module_that_cannot_be_found_is_told_and_what_it_raises_is_raised(raft: Path, tmp_path: Path) -> None:
    sys.path.insert(0, str(tmp_path))
    with pytest.raises(ConfigError, match=r"no module 'mine\.rafts': mine\.rafts is neither .* path/to/rafts.py:Raft"):
        command_named("mine.rafts:RaftTrainer")
    with pytest.raises(ConfigError, match=r"'\.raft' is not the name of a module"):
        command_named(".raft:RaftTrainer")
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        command_named("broken:RaftTrainer")
    (tmp_path / "undeclared.py").write_text(UNDECLARED)
    with pytest.raises(ConfigError, match=r"undeclared.py:Judged: Judged.judge belongs to role 'judge', which the cla"):
        command_named(f"{tmp_path}/undeclared.py:Judged")
    (tmp_path / "json.py").write_text(RAFT)
    with pytest.raises(ConfigError, match=r"json.py cannot be imported as json, which is .*Rename the file"):
        command_named(f"{tmp_path}/json.py:RaftTrainer")


@pytest.mark.parametrize(
    ("does", "more", "told"),
    [
        ("judge", {}, "or is other; got 'judge' (did you mean judges?)"),
        ("judges", {"models": "judge_model"}, "models of a role must be a tuple: write models=('judge_model',)"),
        ("scores", {"keys": "ref_model"}, "keys of a role must be a tuple"),
    ],
)
def test_a_role_that_is_declared_wrongly_is_told(does: Any, more: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        Role(does, **more)


def test_a_trainer_without_a_check_of_its_own_has_that_of_the_shared_keys(raft: Path, tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(RAFT.replace("def check(", "def ask("))
    command = command_named(f"{tmp_path}/alone.py:RaftTrainer")
    config = command.config_type(model="m", dataset="d", external_plugins=["no.such_plugin"], num_kept=5)
    with pytest.raises(ConfigError, match=r"plugin 'no.such_plugin' cannot be imported"):
        run(command.trainer, config)


# What it declares


def test_keys_of_sections_hosts_and_other_names_are_those_of_its_roles(raft: Path, tmp_path: Path) -> None:
    command = command_named(f"{raft}:RaftTrainer")

    def load(text: str) -> Any:
        (tmp_path / "x.yaml").write_text(KEYS + text)
        return load_config(command.config_type, ["--config", str(tmp_path / "x.yaml")])

    found = load("default: {cpus: 2, lr: 1, num_kept: 3}\nrollout: {cpus: 1, top_p: 0.5}")
    assert (found.learning_rate, found.num_kept, found.top_p) == (1.0, 3, 0.5)
    placed = placement(command.trainer, found).groups
    assert [(group.roles, group.num_workers) for group in placed] == [(("learner", "judge"), 2), (("rollout",), 1)]
    apart = load("learner: {cpus: 2}\nrollout: {cpus: 1}\nprm: {cpus: 3, model: j, strictness: 2}")
    assert (apart.judge_model, apart.strictness) == ("j", 2.0)
    assert placement(command.trainer, apart).group_of("judge").num_workers == 3
    for text, told in (
        ("learner: {cpus: 1, strictness: 2}", "section 'learner' has strictness, which role judge reads"),
        ("judge: {cpus: 1, lr: 2}", "section 'judge' has lr, which role judge does not read"),
    ):
        with pytest.raises(ConfigError, match=told):
            load(text)


def test_a_plan_knows_what_the_roles_do(raft: Path, tmp_path: Path) -> None:
    shape = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"intermediate_size": 128, "vocab_size": 256}
    groups: dict[str, Any] = {role: {"gpus": 1} for role in ("learner", "rollout", "judge")}
    (tmp_path / "x.json").write_text(
        json.dumps({"model": shape, "judge_model": {**shape, "num_hidden_layers": 1}, **groups})
    )
    plans = [
        make_plan(str(tmp_path / "x.json"), None, 8, None, 80, trainer) for trainer in (None, f"{raft}:RaftTrainer")
    ]
    plain, known = ([group.roles[0] for group in plan.groups] for plan in plans)
    assert [role.does for role in plain] == ["unknown", "generate", "score"]
    assert [role.does for role in known] == ["train", "generate", "score"]
    assert plain[0].memory is None
    assert known[0].memory is not None


def test_check_lets_roles_live_where_they_are_hosted_by_default(raft: Path) -> None:
    trainer = command_named(f"{raft}:RaftTrainer").trainer
    groups = DeviceGroups.parse({"learner": {"cpus": 1}, "rollout": {"cpus": 1}})
    assert findings(trainer, groups) == []


def test_the_type_of_the_keys_may_be_said_by_name(raft: Path) -> None:
    command = command_named(f"{raft}:SaidByName")
    assert command.config_type.__name__ == "RaftConfig"


def test_it_runs_from_python_as_from_the_command_line(raft: Path) -> None:
    command = command_named(f"{raft}:RaftTrainer")
    config = command.config_type(model="m", dataset="d")
    assert command.trainer(config).train() == run(command.trainer, config) == {"reward": 5.0}


def test_a_configuration_that_declares_no_roles_has_those_that_are_well_known() -> None:
    assert list(TrainConfig.ROLES) == ["train", "rollout", "reference", "teacher", "critic", "reward"]
    assert TrainConfig.ROLES["critic"] == Role(
        "values",
        models=("value_model", "reward_model"),
        host="train",
        names={"learning_rate": "value_learning_rate", "lr": "value_learning_rate"},
    )


# Those that lie here


@pytest.mark.parametrize("name", commands()[:-1])
def test_a_trainer_of_a_folder_declares_exactly_its_roles(name: str) -> None:
    command = command_named(name)
    assert set(command.config_type.ROLES) == set(command.trainer.__rayhelper_roles__)
    hosts = {role.host for role in command.config_type.ROLES.values()} - {None}
    assert hosts <= set(command.config_type.ROLES)


def test_every_folder_is_a_command_and_no_name_is_taken_twice() -> None:
    names = [name for kind in set(folders.configurations().values()) for name in folders.names_of(kind)]
    assert sorted(names) == sorted(folders.configurations())
    assert {kind.__module__.split(".")[1] for kind in folders.configurations().values()} == set(folders.folders())


def test_a_folder_with_keys_and_a_trainer_is_a_command_without_an_edit_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "echo").mkdir()
    (tmp_path / "echo" / "config.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "from trainers.configuration.roles import TRAIN\n"
        "from trainers.configuration.shared import RunConfig\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class EchoConfig(RunConfig):\n"
        "    ROLES: ClassVar = {'train': TRAIN}\n"
        "    NAMES: ClassVar = ('echo', 'parrot')\n"
        "    RLHF_TYPE: ClassVar = 'repeat'\n"
    )
    (tmp_path / "echo" / "trainer.py").write_text(
        "from rayhelper import RayHelper\n"
        "from trainers.echo.config import EchoConfig\n"
        "@RayHelper.worker(group='train')\n"
        "class EchoTrainer:\n"
        "    def __init__(self, config: EchoConfig): ...\n"
        "    def train(self): return {}\n"
    )
    monkeypatch.setattr(trainers, "__path__", [*trainers.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    folders.configurations.cache_clear()
    try:
        assert {"echo", "parrot"} <= set(commands())
        assert command_named("echo").trainer.__name__ == "EchoTrainer"
        assert command_named("parrot") == command_named("echo") == command_named("rlhf", "repeat")
        with pytest.raises(ConfigError, match=r"there is no trainer 'parot' \(did you mean parrot\?\)"):
            command_named("parot")
        assert command_named("echo").config_type.ROLES == {"train": TRAIN}
    finally:
        folders.configurations.cache_clear()
        for name in [name for name in sys.modules if name.startswith("trainers.echo")]:
            del sys.modules[name]


def test_a_file_of_no_named_trainer_is_told_what_this_machine_lacks_as_that(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for keys, is_of_the_file in (("dataset: /nowhere/a.jsonl", False), ("dataset: /nowhere/a.jsonl\nbogus: 1", True)):
        file.write_text(f"model: org/model\n{keys}\n")
        (line,) = refusals(None, str(file), parse_text(file.read_text(), "it")) or []
        assert line.startswith(UNNAMED) is is_of_the_file
        assert ("bogus" if is_of_the_file else "there is no file '/nowhere/a.jsonl'") in line
