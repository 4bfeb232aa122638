"""The pages of docs/: they build without a warning, and what they say of keys, roles and code is so."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config as load_site
from torch.distributed.run import parse_args as parse_torchrun

import rayhelper as rayhelper_package
from rayhelper.__main__ import main as rayhelper
from rayhelper.planning.dry_run import make_plan
from rayhelper.planning.plan_page import page as plan_page
from rayhelper.text import parse_text
from rayhelper.timeline import html
from rayhelper.timeline.trace import STEP, Span
from tests import screens
from tests.sentences import faults, sentences
from tests.trainers.test_report import a_run
from trainers import parts, plugins
from trainers.cli import placement
from trainers.commands import command_named
from trainers.configuration.completion import CompletionConfig
from trainers.configuration.reading.command_line import translated
from trainers.configuration.reading.folders import configurations, names_of
from trainers.configuration.reading.role_sections import is_placement
from trainers.configuration.shared import RunConfig, TrainConfig
from trainers.data.sources import read_source
from trainers.grpo.config import GRPOConfig
from trainers.losses.policy import policy_gradient_loss
from trainers.report.page import page as report_page
from trainers.report.recorded import recorded
from trainers.rewards.estimators import RewardBatch, estimated
from trainers.rewards.functions import resolve_rewards
from trainers.rollout.environments import resolve_environment
from trainers.rollout.tool_call_forms import ToolCall
from trainers.rollout.tool_calls import tool_call_parser
from trainers.rollout.tools import resolve_tools
from trainers.run.throughput import WORK

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
GUIDES = sorted([*DOCS.glob("guides/*.md"), *DOCS.glob("zh/*.md"), DOCS / "faq.md"])
PAGES = sorted({names_of(config_type)[0] for config_type in configurations().values()})


class Rows(HTMLParser):
    """The cells of every row of every table."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.is_cell = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag == "td":
            self.rows[-1].append("")
            self.is_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag == "td":
            self.is_cell = False

    def handle_data(self, data: str) -> None:
        if self.is_cell:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages; a link to nowhere, or an example that is not there, ends the build."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        build(load_site(str(DOCS / "site" / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


def keys_of(page: Path) -> dict[str, list[str]]:
    """Type, default and text of every key that a page has a row of."""
    rows = Rows(page.read_text(encoding="utf-8")).rows
    return {row[0]: row[1:] for row in rows if len(row) == 4}


def default_of(field: Any) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


@pytest.mark.parametrize("name", PAGES)
def test_every_key_stands_on_the_trainers_page_or_among_the_shared_ones_with_its_default(name: str, site: Path) -> None:
    config_type = command_named(name).config_type
    base = next(base for base in (CompletionConfig, TrainConfig, RunConfig) if issubclass(config_type, base))
    shared = {field.name: default_of(field) for field in dataclasses.fields(base)}
    own_page, shared_page = keys_of(site / "trainers" / f"{name}.html"), keys_of(site / "shared_keys.html")
    if base is CompletionConfig:
        shared_page |= keys_of(site / "rollouts.html")
    for field in dataclasses.fields(config_type):
        default = default_of(field)
        is_shared = field.name in shared and shared[field.name] == default
        assert (field.name in own_page) != is_shared, field.name
        _, shown, text = (shared_page if is_shared else own_page)[field.name]
        assert text, field.name
        if default is dataclasses.MISSING:
            assert shown == "required"
        else:
            assert parse_text(shown, field.name) == default, field.name


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_every_role_of_its_trainer(name: str, site: Path) -> None:
    roles = command_named(name).trainer.__rayhelper_roles__
    text = (DOCS / "trainers" / f"{name}.md").read_text(encoding="utf-8").partition("## Data")[0]
    assert [role for role in roles if not re.search(rf"\b{role}\b", text)] == []


def test_every_metric_that_is_measured_is_explained() -> None:
    code = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "trainers").rglob("*.py"))
    measured = set(re.findall(r'metrics\.(?:sum|mean|min|max|same)\(\s*"([^"]+)"', code))
    measured |= set(re.findall(r'rates\["([^"]+)"\]', code))
    measured -= {"chosen_token_accuracy", *WORK}  # never written
    assert {"throughput/mfu", "loss", "grad_norm", "clip_ratio/low_min", "rewards/margins"} <= measured
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    assert sorted(name for name in measured if f"`{name}`" not in pages) == []


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page, without those that are files of examples/."""
    found = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [block for block in found if "--8<--" not in block]


def written_configurations() -> list[tuple[str, str]]:
    """The trainer and the text of each configuration that stands in a page itself."""
    pages = {name: DOCS / "trainers" / f"{name}.md" for name in PAGES}
    found = [(name, block) for name, page in pages.items() for block in blocks(page, "yaml")]
    others = [block for page in ("placement", "rewards", "rollouts") for block in blocks(DOCS / f"{page}.md", "yaml")]
    return [*found, *(("grpo", block) for block in others)]


@pytest.mark.parametrize(("name", "text"), written_configurations(), ids=lambda text: text.split("\n")[0])
def test_configurations_in_the_pages_have_known_keys_and_a_place_for_every_role(name: str, text: str) -> None:
    trainer, config_type = command_named(name).trainer, command_named(name).config_type
    found = yaml.safe_load(text)
    known = {field.name for field in dataclasses.fields(config_type)}
    sections = {key: value for key, value in found.items() if is_placement(key, value)}
    assert found.keys() - sections.keys() <= known
    groups = found.get("device_groups") or sections
    if groups:
        config = SimpleNamespace(device_groups=groups, external_plugins=[], timeout_s=None, env={})
        hosted = {role for group in placement(trainer, config).groups for role in group.roles}
        assert hosted == set(trainer.__rayhelper_roles__)


def test_the_first_class_of_the_index_gives_what_it_says() -> None:
    first, *_ = blocks(DOCS / "index.md", "python")
    names: dict[str, Any] = {"__name__": "docs_index"}
    exec(compile(first, "docs/index.md", "exec"), names)
    assert str(names["BestOf"](bonus=1).run([3, 1, 2])) in first


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "zh" / "README.md"], ids=["en", "zh"])
def test_the_first_class_is_the_same_on_every_first_page(page: Path) -> None:
    first, shown = (ast.dump(ast.parse(blocks(path, "python")[0])) for path in (DOCS / "index.md", page))
    assert shown == first  # only comments differ


def commands_of(page: Path) -> list[str]:
    """The commands of a page that need no GPU and no network, each on one line; what follows ``#`` is no part of it."""
    marked = re.compile(r"# needs (GPUs|a network)\b")
    ours = [block for block in blocks(page, "bash") if not marked.match(block)]
    return [line.partition(" #")[0].strip() for block in ours for line in block.splitlines() if line.strip()]


COMMANDS = {line for page in GUIDES for line in commands_of(page)}


@pytest.mark.parametrize("line", sorted(COMMANDS))
def test_the_commands_of_the_guides_run(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training up to the resolved configuration only: the quickstart itself is trained in tests/e2e."""
    program, name, *arguments = shlex.split(line)
    assert program == "rayhelper", "another program needs a mark: # needs GPUs, or # needs a network"
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "outputs" / "quickstart").mkdir(parents=True)
    (tmp_path / "outputs" / "quickstart" / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # where no run is announced
    trains = "--config" in arguments and name not in ("plan", "check")
    try:
        code = rayhelper([name, *arguments, *(["--print_config"] if trains else [])])
    except SystemExit as ended:
        code = ended.code or 0
    shown = capsys.readouterr()
    if name == "stacks":
        assert code == 2
        assert "no runs of this user on this machine" in shown.out + shown.err
    else:
        assert code == 0, shown.err
        assert shown.out


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_configurations_of_the_guides_have_known_keys_and_a_place_for_every_role(page: Path) -> None:
    for text in blocks(page, "yaml"):
        test_configurations_in_the_pages_have_known_keys_and_a_place_for_every_role("grpo", text)


def test_the_reference_has_every_public_name(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    headings = set(re.findall(r"<h[34] id=[^>]*>([\w.]+)<", page))
    assert {*rayhelper_package.__all__, *parts.__all__, "run", "RayHelper.initialize", "Policy.step"} <= headings
    assert "Raises ConfigError" not in re.findall(r"<h[34].*", page)


def fakes(folder: Path, programs: dict[str, str]) -> str:
    """A PATH on which these programs are scripts of ours."""
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_a_slurm_job_starts_a_cluster_of_its_nodes_and_then_the_run(tmp_path: Path) -> None:
    """The script itself, on two nodes that are this machine; srun runs the command once per node."""
    listens = "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); s.accept(); s.accept()"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray = 'echo "ray $*${RAY_ADDRESS+ at $RAY_ADDRESS} with $RAY_AUTH_MODE of ${#RAY_AUTH_TOKEN}"; '
    ray += f'[ "$2" != --head ] || exec {sys.executable} -c "{listens}" {port}'
    path = fakes(
        tmp_path,
        {
            "srun": '[ "$1" = --cpu-bind=none ] && shift; SLURM_NODEID=0 "$@" & SLURM_NODEID=1 "$@"; wait',
            "ray": ray,
            "rayhelper": 'echo "rayhelper $* at $RAY_ADDRESS with $RAY_AUTH_MODE of ${#RAY_AUTH_TOKEN}"',
        },
    )
    env = {"PATH": path, "RAY_HEAD": "127.0.0.1", "RAY_PORT": str(port)}
    script = str(ROOT / "deploy" / "slurm_ray.sh")
    command = ["bash", script, "grpo", "--config", "x.yaml"]
    done = subprocess.run(command, env=env, check=True, timeout=60, stdout=subprocess.PIPE, text=True)
    head, *others = done.stdout.splitlines()  # of all processes: the pipe ends with the last of them
    at, token = f"127.0.0.1:{port}", "with token of 64"
    assert head == f"ray start --head --node-ip-address=127.0.0.1 --port={port} --block {token}"
    assert sorted(others) == [
        f"ray start --address={at} --block {token}",
        f"rayhelper grpo --config x.yaml at {at} {token}",
    ]


@pytest.mark.parametrize("script", sorted(ROOT.glob("deploy/slurm_*.sh")), ids=lambda script: script.stem)
def test_a_slurm_job_asks_for_whole_nodes_and_a_signal_before_its_end(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    head, *lines = script.read_text(encoding="utf-8").splitlines()
    assert head == "#!/bin/bash"
    first = next(place for place, line in enumerate(lines) if not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:]), "SLURM reads none behind the first command"
    asked = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH "))
    signal = asked.pop("signal")
    assert asked == {"job-name": "rayhelper", "ntasks-per-node": "1", "gpus-per-node": "8", "exclusive": "", "mem": "0"}
    ends_in_python = "exec rayhelper" in lines[-1]  # else srun has started it, and the signal goes to its processes
    assert signal == ("B:USR1@600" if ends_in_python else "USR1@600")
    page = (DOCS / "guides" / "many_nodes.md").read_text(encoding="utf-8")
    assert f"sbatch --nodes 2 --time 24:00:00 deploy/{script.name} grpo" in page


def test_a_slurm_job_gives_every_process_of_torchrun_the_same_key(tmp_path: Path) -> None:
    path = fakes(
        tmp_path, {"srun": '[ "$1" = --cpu-bind=none ] && shift; "$@"', "torchrun": 'echo "${#RAYHELPER_KEY} $*"'}
    )
    env = {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "TORCHRUN_HEAD": "10.0.0.1"}
    script = str(ROOT / "deploy" / "slurm_torchrun.sh")
    done = subprocess.run(["bash", script, "sft", "--lr", "1e-5"], env=env, check=True, capture_output=True, text=True)
    length, *words = done.stdout.split()
    assert int(length) == 64
    options = parse_torchrun(words)
    assert (options.nnodes, options.rdzv_id, options.rdzv_endpoint) == ("2", "7", "10.0.0.1:29500")
    assert (options.training_script, options.training_script_args) == ("rayhelper.trainers", ["sft", "--lr", "1e-5"])


def test_a_job_of_kuberay_has_what_its_pods_need() -> None:
    job = yaml.safe_load((ROOT / "deploy" / "kuberay.yaml").read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    pinned = re.search(r"^ray==(.+)$", (ROOT / "requirements" / "run.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["rayVersion"] == pinned[1], "the operator refuses tokens without a version"
    assert f"\nARG RAY={pinned[1]}\n" in (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert all(isinstance(amount, str) for amount in container["resources"]["limits"].values())
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    name, *arguments = shlex.split(job["spec"]["entrypoint"])[1:]
    given, mistakes = translated(
        [word for word in arguments if "/shared" not in word and word != "--config"], GRPOConfig
    )
    assert (name, mistakes, given.get("use_ray")) == ("grpo", [], True)


def test_the_plugins_of_the_pages_are_found_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (plugins.REWARDS, plugins.DATASETS, plugins.ENVIRONMENTS, plugins.TOOLS, plugins.TOOL_CALL_PARSERS):
        monkeypatch.setattr(registry, "entries", {})
    for registry in (plugins.ADVANTAGES, plugins.LOSSES):
        monkeypatch.setattr(registry, "entries", dict(registry.entries))
    for page in ("data", "rewards"):
        for block in blocks(DOCS / f"{page}.md", "python"):
            exec(compile(block, f"docs/{page}.md", "exec"), {"__name__": f"docs_{page}"})
    assert read_source("sums")[0] == {"prompt": "1+1=", "answer": "2"}
    ((reward, _),), _ = resolve_rewards(["correct_sum"])
    assert reward(["46", "47"], answer=["46", "46"]) == [1.0, 0.0]
    guess = resolve_environment("guess")()
    guess.reset({"number": "7"})
    assert (guess.step("6").done, guess.step("7").reward) == (False, 1.0)
    assert resolve_tools(["add"])["add"](1, 2) == 3
    batch = RewardBatch(np.array([[0.0], [4.0], [1.0]]), np.ones(1), 3, np.ones(3, np.int64))
    advantages, _ = estimated({"name": "above_median", "scale": 0.5}, SimpleNamespace(), batch)
    assert advantages.tolist() == [-0.5, 1.5, 0.0]
    logps, old_logps = torch.tensor([[-1.0, -2.0]], requires_grad=True), torch.tensor([[-1.5, -9.0]])
    loss, _ = policy_gradient_loss(
        logps, old_logps, torch.ones(1), torch.ones(1, 2), loss_type="truncated", normaliser=2, epsilon_high=2.0
    )
    loss.backward()
    assert logps.grad is not None
    assert logps.grad.tolist() == [pytest.approx([-np.exp(0.5) / 2, -3 / 2])]
    assert tool_call_parser("shouted", None, [])("add!3", {}) == [ToolCall("add", {"a": 3, "b": 0})]


BROKEN = """<!DOCTYPE html><html><body><h2>Second</h2><h4>Fourth</h4><img src="x.svg"><a href="y"></a>
<p style="color: #999; background: #fff">Faint.</p><pre style="width: 600px">Wide.</pre></body></html>"""
FOUND = ("60[08] pixels wide at 390", "not one heading", "heading Fourth leaves out", "picture without words")
FOUND += ("without words: <a", "names no language", "2.85 to 1: p")


@pytest.mark.skipif(screens.PROGRAM is None, reason="Chromium is not installed")
def test_no_page_scrolls_sideways_and_all_can_be_read(site: Path, tmp_path: Path) -> None:
    """Every page of the site, the report of a run and of two, a timeline and a plan, at 1280 and at 390 pixels."""
    folder = tmp_path / "all"
    shutil.copytree(site, folder)
    runs = [recorded(a_run(tmp_path / name)) for name in ("first", "second")]
    plan = make_plan(str(ROOT / "examples" / "grpo" / "device_groups.yaml"), None, None, None, 80.0, None)
    spans = [Span("train", 0, "run", "Trainer.update", 0, 100, 1), Span("driver", 0, STEP, "step 1", 0, 100, 0)]
    ours = {"report": report_page(runs[:1]), "two": report_page(runs), "plan": plan_page(plan)}
    for name, text in (ours | {"timeline": html(spans, {}), "broken": BROKEN}).items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    pages = sorted(str(page.relative_to(folder)) for page in folder.rglob("*.html"))
    assert len(pages) > 70
    found = screens.findings(folder, pages)
    assert [line for line in found if not line.startswith("broken.html")] == []
    assert [line for line, told in zip(found, FOUND, strict=True) if re.search(told, line) is None] == []


def test_only_the_page_of_commands_and_the_modules_themselves_say_python_m() -> None:
    """Everything else that a person reads says ``rayhelper NAME``."""
    own = {"README.md", "docs/commands.md", "trainers/cli.py", "trainers/program.py", "rayhelper/__main__.py"}
    own |= {"rayhelper/trainers/__init__.py"}
    read = [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("benchmarks/*.py")]
    read += [*ROOT.glob("rayhelper/**/*.py"), *ROOT.glob("trainers/**/*.py"), *ROOT.glob("deploy/*")]
    says = [file for file in read if re.search(r"python -m\s+(trainers|rayhelper)", file.read_text(encoding="utf-8"))]
    names = {str(file.relative_to(ROOT)) for file in says if file.name != "__main__.py"}
    assert names <= own
    assert {"README.md", "docs/commands.md"} <= names


def test_the_page_of_your_own_trainer_shows_the_lines_of_the_example() -> None:
    page = (ROOT / "docs" / "own_trainer.md").read_text(encoding="utf-8")
    example = (ROOT / "examples" / "own_trainer" / "raft.py").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)\n```", page, re.DOTALL)
    shown = [block for block in blocks if "".join(block.split()) in "".join(example.split())]  # however it is indented
    assert len(shown) >= 8, "the keys, the parts, the loop and the loss"
    assert all("RayHelper.session" in block for block in blocks if block not in shown)


def test_no_sentence_breaks_a_rule_of_plain_english_that_a_machine_decides() -> None:
    found = [f"{where}: {', '.join(told)}: {text}" for _, where, text in sentences() if (told := faults(text))]
    assert found == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (" ".join(["word"] * 23) + ".", ["23 words"]),
        (f"A call of `{'x ' * 30}` and [a page](<a b c d e f g h i j k l m n o p q r s t>) is short.", []),
        ("Write a; or write b; or write c.", ["two semicolons"]),
        ("`a; b; c`, q_proj; k_proj; v_proj", []),
        ("The user is told the name.", ["write: RayHelper reports, or raises"]),
        (
            "The actor is told what — it asks.",
            ["write: RayHelper reports, or raises", "write: a full stop, a comma or a colon"],
        ),
        ("A worker makes room for it, as its other's weights are under way.", 3),
    ],
)
def test_a_sentence_that_breaks_a_rule_is_found(text: str, told: Any) -> None:
    found = faults(text)
    assert (found if isinstance(told, list) else len(found)) == told


def test_the_python_script_of_trl_becomes_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[GRPOConfig] = []
    monkeypatch.setattr("trainers.grpo.GRPOTrainer", lambda config: made.append(config) or SimpleNamespace(train=dict))
    text = (DOCS / "equivalents.md").read_text(encoding="utf-8").partition("### A Python script of TRL")[2]
    block = text.partition("```python\n")[2].partition("```")[0]
    exec(compile(block, "docs/equivalents.md", "exec"), {"__name__": "docs_equivalents"})
    ((reward, name),), _ = resolve_rewards(made[0].reward_funcs)
    assert (name, made[0].model, made[0].rollout_engine) == ("length", "Qwen/Qwen3-0.6B", "hf")
    assert reward(completions=[[{"role": "assistant", "content": "x" * 18}]]) == [-2]
