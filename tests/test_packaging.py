"""The wheel: installed into an empty environment, it runs from a folder whose trainers.py is the user's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

import rayhelper

ROOT = Path(__file__).resolve().parents[1]
FEW = "--max_steps 2 --global_batch_size 64 --per_device_train_batch_size 64 --eval_dataset null".split()
FEW += "--val_before_train false --output_dir out".split()


@dataclass
class Installed:
    """An environment with the wheel, and the folder of its user."""

    bin: Path
    folder: Path

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "RAY_raylet_start_wait_time_s": "300"}
        command = [str(self.bin / program), *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=800, check=False
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel of this tree in an environment which has nothing else but the packages of this one."""
    built, home = tmp_path_factory.mktemp("built"), tmp_path_factory.mktemp("installed")
    (built / "source").mkdir()
    for name in ("rayhelper", "trainers", "examples", "README.md", "LICENSE", "pyproject.toml", "setup.py"):
        (built / "source" / name).symlink_to(ROOT / name)
    # a build writes into the folder it is in: not into the tree
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    folder = built / "source"
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", built, folder], check=True, timeout=600)
    (wheel,) = built.glob("rayhelper-*.whl")
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True, timeout=600)
    (packages,) = home.glob("lib/python3*/site-packages")
    (packages / "of_the_tests.pth").write_text(sysconfig.get_path("purelib"))
    folder = tmp_path_factory.mktemp("user")
    (folder / "trainers.py").write_text("raise RuntimeError('the trainers of the user was imported')\n")
    return Installed(home / "bin", folder)


def test_the_quickstart_runs_from_a_folder_with_a_trainers_of_its_own(installed: Installed) -> None:
    """On Ray, whose workers find the user's file first: they are given the folder's path."""
    copied = installed.run("rayhelper", "examples", "copy", "mine")
    assert copied.returncode == 0, copied.stderr
    assert "rayhelper grpo --config mine/grpo/quickstart.yaml" in copied.stdout
    addition = installed.folder / "mine" / "grpo" / "addition.py"
    addition.write_text(addition.read_text().replace("WARM_START_STEPS = 150", "WARM_START_STEPS = 5"))
    quickstart = ["grpo", "--config", "mine/grpo/quickstart.yaml", *FEW]
    done = installed.run("rayhelper", *quickstart, "--use_ray", "true", "--reward_processes", "1")
    assert done.returncode == 0, done.stderr
    assert "the model is in out/final" in done.stdout
    assert "step 2 of 2; finished." in (installed.folder / "out" / "report.html").read_text()
    done = installed.run("rayhelper", "report", "out", "--output", "again.html")
    assert (done.returncode, done.stdout) == (0, "The report is in again.html. Open it in a browser.\n"), done.stderr
    assert (installed.folder / "again.html").is_file()
    lines = (installed.folder / "out" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2


def test_a_trainer_of_the_package_is_a_module_to_run(installed: Installed) -> None:
    """With a row of its user's: the keys are read, and the files are looked for."""
    done = installed.run("python", "-m", "rayhelper.trainers.sft", "--model", "none", "--dataset", "none.jsonl")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error: ") == 1
    assert "none" in done.stderr


def test_the_command_says_its_version_and_imports_no_torch_for_it(installed: Installed) -> None:
    done = installed.run("python", "-X", "importtime", str(installed.bin / "rayhelper"), "--version")
    assert done.stdout == f"rayhelper {rayhelper.__version__}\n"
    assert not [line for line in done.stderr.splitlines() if line.endswith((" torch", " transformers", " ray"))]
    assert not [line for line in done.stderr.splitlines() if line.endswith(" trainers")]


def test_help_names_the_commands_of_the_core_and_of_the_trainers(installed: Installed) -> None:
    done = installed.run("rayhelper", "--help")
    assert done.returncode == 0
    for name in "plan check prove stacks debug timeline grpo sft dpo report translate examples".split():
        assert re.search(rf"^ +(\w+, )*{name}\b", done.stdout, re.MULTILINE), name
    done = installed.run("rayhelper", "gpro")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: there is no command 'gpro' (did you mean grpo?). Known: plan, check, ")


def test_two_names_of_the_package_give_the_same_modules(installed: Installed) -> None:
    (installed.folder / "theirs.py").write_text("import trainers\n")
    code = """
import rayhelper.trainers, trainers, trainers.batch, rayhelper.trainers.metrics
from rayhelper.trainers.grpo import GRPOConfig
from rayhelper.trainers import sft_config
import rayhelper.trainers.grpo.config, trainers.sft.config
assert rayhelper.trainers is trainers
assert rayhelper.trainers.batch is trainers.batch and rayhelper.trainers.metrics is trainers.metrics
assert rayhelper.trainers.grpo.config.GRPOConfig is GRPOConfig and GRPOConfig.__module__ == "trainers.grpo.config"
assert sft_config is trainers.sft.config
"""
    done = installed.run("python", "-c", code)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_folder_trainers_of_the_user_stays_importable_and_a_conflict_is_told(installed: Installed) -> None:
    (installed.folder / "project" / "trainers").mkdir(parents=True)
    (installed.folder / "project" / "trainers" / "__init__.py").write_text("")
    (installed.folder / "project" / "trainers" / "mine.py").write_text("NUMBER = 3\n")
    start = "import sys; sys.path.insert(0, 'project'); "
    done = installed.run("python", "-c", f"{start}import rayhelper.trainers; from trainers.mine import NUMBER")
    assert (done.returncode, done.stderr) == (0, "")
    done = installed.run("python", "-c", f"{start}import rayhelper.trainers.nothing_of_that_name")
    assert "No module named 'rayhelper.trainers.nothing_of_that_name'" in done.stderr
    done = installed.run("python", "-c", f"{start}import trainers; import rayhelper.trainers")
    assert "this process has imported your module trainers (" in done.stderr
    assert "Import rayhelper.trainers first" in done.stderr


def test_the_examples_are_listed_and_no_folder_is_overwritten(installed: Installed) -> None:
    done = installed.run("rayhelper", "examples")
    assert {"grpo/quickstart.yaml", "sft/gsm8k.yaml"} <= set(done.stdout.splitlines())
    (installed.folder / "full").mkdir()
    (installed.folder / "full" / "kept.txt").write_text("kept")
    done = installed.run("rayhelper", "examples", "copy", "full")
    assert (done.returncode, done.stderr) == (
        2,
        "error: full already exists and is not empty. Name another folder.\n",
    )
    assert [file.name for file in (installed.folder / "full").iterdir()] == ["kept.txt"]


def test_the_copied_examples_name_their_files_where_these_now_are(installed: Installed) -> None:
    assert installed.run("rayhelper", "examples", "copy", "copies/of").returncode == 0
    folder = installed.folder / "copies" / "of"
    named = [
        path
        for file in folder.rglob("*.yaml")
        for path in re.findall(r"(?<![\w/.-])[\w/]*copies/of/[\w/.]+", file.read_text())
    ]
    assert len(named) > 20
    assert [path for path in named if not (installed.folder / path.rstrip(".")).exists()] == []


def test_every_extra_is_in_all(installed: Installed) -> None:
    code = "from importlib.metadata import requires; print(*requires('rayhelper'), sep='\\n')"
    of_extra: dict[str, set[str]] = {}
    for line in installed.run("python", "-c", code).stdout.splitlines():
        requirement, _, extra = line.partition("; extra == ")
        of_extra.setdefault(extra.strip('"'), set()).add(requirement)
    assert {"vllm", "megatron", "lora", "wandb", "all", "dev", ""} <= set(of_extra)
    for_users = [found for name, found in of_extra.items() if name not in ("all", "dev", "")]
    assert of_extra["all"] == set().union(*for_users)
