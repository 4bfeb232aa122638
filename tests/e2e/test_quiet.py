"""What a user sees on the console, and what is in the run's logs: libraries, and what the user's own code says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import warm
from tests.golden.tiny import tiny_model, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TALKER = """
import logging
import sys
import warnings

from rayhelper import RayHelper
from trainers.configuration.shared import RunConfig


@RayHelper.worker(group=["train"])
class Talker:
    def __init__(self, config: RunConfig):
        self.config = config

    @RayHelper.function(group="train", execute="first")
    def talk(self):
        from transformers.utils import logging as library
        from tqdm import tqdm

        print("printed by a method")
        print("printed to stderr", file=sys.stderr)
        logging.getLogger("mine").info("logged by a method")
        logging.getLogger("vllm.some.module").info("a line of a library")
        logging.getLogger("vllm.some.module").debug("a detail of a library")
        logging.getLogger("vllm.some.module").warning("a warning of a library")
        where = "/x/site-packages/library.py"
        warnings.warn_explicit("this is outdated", FutureWarning, where, 1)
        warnings.warn_explicit("this is wrong", UserWarning, where, 2)
        list(library.tqdm(range(2), desc="bar of a library"))
        list(tqdm(range(2), desc="bar of a method"))

    def train(self):
        self.talk()
        return {}
"""
OWN = ("printed by a method", "printed to stderr", "logged by a method", "bar of a method")
WRONG = ("a warning of a library", "this is wrong")
OF_LIBRARIES = ("a line of a library", "this is outdated", "bar of a library")


OF_VLLM = ("VLLM_DIST_IDENT",)  # set in a process that has imported vLLM, as tests may have here


def run(*arguments: str, python: str = sys.executable) -> str:
    """All that is on the console. A warm ``python`` would not say what libraries say as they are imported."""
    done = subprocess.run(
        [python, "-m", "trainers", *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in OF_VLLM},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize(("use_ray", "process"), [("false", "driver"), ("true", "default-0")], ids=["off", "ray"])
def test_libraries_are_quiet_and_a_users_code_is_not(use_ray: str, process: str, tmp_path: Path) -> None:
    (tmp_path / "talker.py").write_text(TALKER)
    needed = [f"{tmp_path / 'talker.py'}:Talker", "--model", "m", "--dataset", "d", "--use_ray", use_ray]
    console = run(*needed, "--output_dir", str(tmp_path / "out"))
    for told in (*OWN, *WRONG):
        assert told in console, console
    for told in (*OF_LIBRARIES, "a detail of a library"):
        assert told not in console, console
    kept = (tmp_path / "out" / "logs" / f"{process}.log").read_text()
    for told in ("a line of a library", "a warning of a library", "this is outdated", "logged by a method"):
        assert told in kept, kept
    console = run(*needed, "--output_dir", str(tmp_path / "all"), "--log_level", "debug", python=warm.python())
    for told in (*OWN, *WRONG, *OF_LIBRARIES, "a detail of a library"):
        assert told in console, console
    assert "a detail of a library" in (tmp_path / "all" / "logs" / f"{process}.log").read_text()


def test_an_engine_of_vllm_says_nothing_where_nothing_is_wrong(tmp_path: Path) -> None:
    tiny_model(head_dim=32).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    keys = {
        **{"model": str(tmp_path / "model"), "dataset": [{"prompt": "abc"}, {"prompt": "def"}]},
        **{"reward_funcs": ["benchmarks.gpu.rewards.even"], "num_generations": 2, "global_batch_size": 4},
        **{"max_completion_length": 4, "max_steps": 2, "rollout_engine": "vllm", "vllm_enforce_eager": True},
        **{"report_to": ["none"], "output_dir": str(tmp_path / "out")},
    }
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(keys))
    lines = [line for line in run("grpo", "--config", str(tmp_path / "x.yaml")).splitlines() if line.strip()]
    unexpected = [line for line in lines if not line.startswith(CONSOLE) and not any(part in line for part in OF_CPUS)]
    assert unexpected == []
    kept = (tmp_path / "out" / "logs" / "driver.log").read_text()
    assert "INFO vllm.config.model: Resolved architecture" in kept
    assert "Enforce eager set" in kept


CONSOLE = (
    "grpo: ",
    "data: ",
    "roles: ",
    "steps: ",
    "per_device_train_batch_size: ",
    "gradient_checkpointing: ",
    "INFO trainers.",
    "the model is in ",
    "the report is in ",
    "step ",
)
OF_CPUS = ("find_triton_kernels", "NUMA binding")  # of torch and of C++, which a GPU's vLLM does not write
