"""What ``rayhelper check`` finds: every seeded mistake, and nothing in code that is right."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayhelper import DeviceGroups, RayHelper, RayHelperError
from rayhelper.check import Finding, check, findings
from rayhelper.planning.role_kinds import default_hosts
from tests.rayhelper import check_fixture, check_fixture_parts, check_fixture_parts_right, check_fixture_right

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
MARK = re.compile(r"# finding: ([a-z-]+)")


def marked(file: Path) -> set[tuple[int, str]]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return {(number, rule) for number, line in enumerate(lines, 1) for rule in MARK.findall(line)}


def classes_of(module: Any) -> list[type]:
    return [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]


def printed(text: str) -> set[tuple[int, str]]:
    return {(int(line), rule) for line, rule in re.findall(r"^\S+?:(\d+): ([a-z-]+): ", text, re.MULTILINE)}


def groups_of(*hosted: list[str], ranks: int = 2) -> DeviceGroups:
    sections = {f"g{k}": {"device": "CPU", "ranks": ranks, "workers": roles} for k, roles in enumerate(hosted)}
    return DeviceGroups.parse(sections)


def rules(cls: type, groups: DeviceGroups | None = None) -> set[str]:
    return {finding.rule for finding in findings(cls, groups)}


@pytest.mark.parametrize("module", [check_fixture, check_fixture_parts], ids=["one class", "parts"])
def test_every_seeded_mistake_is_found_and_nothing_besides(module: Any) -> None:
    found = {(finding.line, finding.rule) for cls in classes_of(module) for finding in findings(cls)}
    expected = marked(Path(module.__file__))
    assert found == expected
    assert len(expected) >= 37


@pytest.mark.parametrize("module", [check_fixture_right, check_fixture_parts_right], ids=["one class", "parts"])
@pytest.mark.parametrize(
    "groups",
    [
        None,
        groups_of(["train"], ["rollout"], ["judge"]),
        groups_of(["train", "rollout"], ["judge"]),
        groups_of(["train", "rollout", "judge"]),
    ],
    ids=["unknown", "apart", "judge apart", "together"],
)
def test_correct_code_has_no_finding(module: Any, groups: DeviceGroups | None) -> None:
    for cls in classes_of(module):
        assert findings(cls, groups) == []


@pytest.mark.parametrize("target", ["trainers.grpo:GRPOTrainer", "trainers.sft:SFTTrainer"])
def test_our_trainers_have_no_finding(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(target) == 0
    assert capsys.readouterr().out == f"{target}: 0 findings\n"


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in (ROOT / "trainers").glob("*/trainer.py")))
def test_every_trainer_has_no_finding_together_or_apart(folder: str) -> None:
    for cls in classes_of(importlib.import_module(f"trainers.{folder}.trainer")):
        roles = getattr(cls, "__rayhelper_roles__", ())
        apart = [[role] for role in roles if role not in default_hosts(cls)]
        for groups in (None, groups_of([*roles]), groups_of(*apart)) if roles else ():
            assert findings(cls, groups) == []


def test_the_documentation_names_every_rule_that_is_seeded() -> None:
    page = (ROOT / "docs" / "core.md").read_text(encoding="utf-8")
    seeded = {rule for file in FOLDER.glob("check_fixture*.py") for _, rule in marked(file)}
    assert {rule for rule in seeded if f"`{rule}`" not in page} == set()


def test_the_deliberate_mistakes_of_the_tests_are_the_only_ones_there() -> None:
    from tests.rayhelper import test_calls, test_workers

    source = (FOLDER / "test_calls.py").read_text(encoding="utf-8").splitlines()
    found = [(source[finding.line - 1].strip(), finding.rule) for finding in findings(test_calls.Trainer)]
    assert found == [
        ("return self.grade([1, 2])", "call-across-roles"),
        ("return self.on_driver()", "call-to-driver"),
    ]
    assert findings(test_calls.Judge) == []
    assert rules(test_workers.Probe) == {"return-cannot-travel"}  # its method unsendable


def test_the_examples_of_the_documentation_have_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    checked = []
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)):
            if "from rayhelper import" in code:
                module = f"example_{page.stem}_{number}"
                (tmp_path / f"{module}.py").write_text(code, encoding="utf-8")
                names = re.findall(r"^@RayHelper\.worker\(.*\n^class (\w+)", code, re.MULTILINE)
                checked += [check(f"{module}:{name}") for name in names]
    assert checked
    assert set(checked) == {0}


def test_a_class_that_cannot_be_defined_is_checked_by_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    groups = '{"a": {"device": "CPU", "ranks": 1, "workers": ["train"]}}'
    assert check("tests.rayhelper.check_fixture_undefined:Undefined", device_groups=groups) == 1
    assert printed(capsys.readouterr().out) == marked(FOLDER / "check_fixture_undefined.py")


def test_a_module_that_starts_workers_is_not_imported(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("tests.rayhelper.check_fixture_started:Started") == 1
    out = capsys.readouterr().out
    assert printed(out) == marked(FOLDER / "check_fixture_started.py")
    assert out.endswith("check_fixture_started:Started: 3 findings\n")


def test_another_decoration_error_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["from rayhelper import RayHelper", "", "@RayHelper.worker(group=[])", "class Empty:", "    pass", ""]
    (tmp_path / "empty_roles.py").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert check("empty_roles:Empty") == 1
    out = capsys.readouterr().out
    assert f"{tmp_path / 'empty_roles.py'}:3: cannot-decorate: " in out
    assert "takes a role or a list of roles" in out


def test_roles_of_one_device_group_share_their_state_and_calls() -> None:
    apart = groups_of(["train"], ["rollout"])
    together = groups_of(["train", "rollout"])
    assert rules(check_fixture.StateAcrossRoles, apart) == {"state-across-roles", "state-from-worker"}
    assert rules(check_fixture.StateAcrossRoles, together) == {"state-from-worker"}
    assert rules(check_fixture.CallsAcross, apart) == {"call-across-roles", "call-to-driver"}
    assert rules(check_fixture.CallsAcross, together) == {"call-to-driver"}


def test_without_groups_the_message_says_that_colocation_would_do() -> None:
    (first, *_) = [found for found in findings(check_fixture.CallsAcross) if found.rule == "call-across-roles"]
    assert "unless one device group hosts both" in first.message
    apart = findings(check_fixture.CallsAcross, groups_of(["train"], ["rollout"]))
    assert all("unless" not in finding.message for finding in apart)


def test_a_default_is_told_as_what_the_read_finds() -> None:
    said = {found.message.partition(" is ")[0]: found.message for found in findings(check_fixture.OtherNames)}
    assert "the read finds its default." in said["self.other"]
    assert "the read finds nothing." in said["self.by_name"]
    assert "the read finds the value from before." in said["self.plain"]


def test_one_worker_has_no_others_to_wait_for() -> None:
    several = rules(check_fixture.Processes, groups_of(["train"]))
    alone = rules(check_fixture.Processes, groups_of(["train"], ranks=1))
    assert several - alone == {"collective-on-first", "state-on-first-worker"}


def test_a_role_that_no_group_hosts_is_told_for_each_role() -> None:
    found = [entry.message for entry in findings(check_fixture_right.Tricky, groups_of(["train"]))]
    assert len(found) == 2
    assert "'rollout'" in found[0] + found[1]
    assert "'judge'" in found[0] + found[1]


def test_a_message_names_the_way_by_which_a_helper_is_reached() -> None:
    (found,) = [entry for entry in findings(check_fixture.CallsAcross) if entry.rule == "call-to-driver"]
    assert "write belongs to the driver" in found.message
    assert "_log, reached from step" in found.message


def test_findings_are_sorted_and_print_as_linters_do() -> None:
    found = findings(check_fixture.Values)
    assert found == sorted(found)
    assert re.fullmatch(r".*check_fixture\.py:\d+: [a-z-]+: .+", str(found[0]))
    assert str(Finding("a.py", 3, "rule", "why")) == "a.py:3: rule: why"


def test_groups_come_from_the_command_line_or_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = "tests.rayhelper.check_fixture:CallsAcross"
    inside, sections, neither = tmp_path / "inside.yaml", tmp_path / "sections.yaml", tmp_path / "neither.yaml"
    inside.write_text("lr: 1e-3\ndevice_groups:\n  a: {device: CPU, ranks: 1, workers: [train, rollout]}\n")
    sections.write_text("lr: 1e-3\ncolocate_groups: [[train, rollout]]\ntrain: {cpus: 2}\nrollout: {cpus: 2}\n")
    neither.write_text("lr: 1e-3\n")
    seen = {}
    for file in (inside, sections, neither):
        assert check(target, config=str(file)) == 1
        seen[file.stem] = {rule for _, rule in printed(capsys.readouterr().out)}
    assert seen["inside"] == seen["sections"] == {"call-to-driver"}
    assert seen["neither"] == {"call-across-roles", "call-to-driver"}


def test_a_file_is_checked_as_its_module_is(capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(__file__).with_name("check_fixture_right.py")
    assert check(f"{file}:Timed") == check("tests.rayhelper.check_fixture_right:Timed")
    by_file, by_module = capsys.readouterr().err.splitlines()
    assert by_file == by_module.replace("tests.rayhelper.check_fixture_right:Timed", f"{file}:Timed")
    raft = ROOT / "examples" / "own_trainer" / "raft.py"
    assert check(f"{raft}:RaftTrainer") == 0
    assert check("examples/nowhere.py:Trainer") == 2
    assert "there is no file" in capsys.readouterr().err


def test_a_module_of_the_current_folder_is_found_though_a_console_command_does_not_search_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (tmp_path / "module_of_readme.py").write_text(readme.partition("```python\n")[2].partition("```")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    assert check("module_of_readme:BestOf") == 0, capsys.readouterr()


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("trainers.grpo", "names no class"),
        ("trainers.nothing_here:Trainer", "cannot be found"),
        ("nowhere_at_all.inside:Trainer", "cannot be found"),
        ("tests.rayhelper.check_fixture:Missing", "no class Missing"),
        ("tests.rayhelper.check_fixture:remember", "not a class"),
        ("collections.abc:Missing", "no class Missing"),
        ("broken_module:Trainer", "cannot be imported: ZeroDivisionError"),
        ("broken_syntax:Trainer", "syntax"),
        ("tests.rayhelper.check_fixture_right:Timed", "has no @RayHelper.worker and no method with"),
        ("idle_workers:Idle", "has no method with @RayHelper.function (read: Idle)"),
        ("idle_workers:Own", "has no @RayHelper.worker and no method with @RayHelper.function (read: Own)"),
        ("started_plain:Plain", "has no @RayHelper.worker"),
    ],
)
def test_what_cannot_be_loaded_is_one_line_and_exit_code_2(
    target: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    (tmp_path / "broken_syntax.py").write_text("class\n")
    idle = "from rayhelper import RayHelper\n@RayHelper.worker(group='a')\nclass Idle:\n    def run(self): ...\n"
    (tmp_path / "idle_workers.py").write_text(idle + "from threading import Thread\nclass Own(Thread): ...\n")
    started = "from rayhelper import RayHelper\nRayHelper.initialize({})\nclass Plain: ...\n"
    (tmp_path / "started_plain.py").write_text(started)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert check(target) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_a_mistake_in_the_groups_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("trainers.sft:SFTTrainer", device_groups="{a: {device: TPU, ranks: 1, workers: [train]}}") == 2
    assert "TPU" in capsys.readouterr().err
    assert check("trainers.sft:SFTTrainer", device_groups="{}", config="x.yaml") == 2
    assert "Give one of them" in capsys.readouterr().err


def test_a_class_without_a_file_is_refused() -> None:
    scope: dict[str, Any] = {"RayHelper": RayHelper, "__name__": "nowhere"}
    exec("@RayHelper.worker(group='a')\nclass Typed:\n    pass", scope)
    with pytest.raises(RayHelperError, match="Define the class in a file"):
        findings(scope["Typed"])


def make_local() -> Iterator[type]:
    @RayHelper.worker(group="a")
    class Local:
        @RayHelper.function(group="a")
        def size(self) -> int:
            return 1

        def run(self) -> int:
            return self.size()

    yield Local


def test_a_class_inside_a_function_is_read_too() -> None:
    assert [finding.rule for finding in findings(next(make_local()))] == ["none-value-used"]


def said(cls: type, rule: str, groups: DeviceGroups | None = None) -> list[str]:
    return [finding.message for finding in findings(cls, groups) if finding.rule == rule]


def test_a_part_is_named_as_its_user_writes_it() -> None:
    across = said(check_fixture_parts.Calls, "call-across-roles")
    assert any(message.startswith("Calls.generator.generate belongs to role 'rollout'") for message in across)
    assert any(message.startswith("Calls.scorers[...].best belongs to role 'judge'") for message in across)
    (driver,) = said(check_fixture_parts.Calls, "call-to-driver")
    assert driver.startswith(
        "Calls.scorers[...].write belongs to the driver and is called on the workers of role 'train' ("
    )
    (nested,) = said(check_fixture_parts.Outer, "init-value-used")
    assert "the value of Outer.inner.policy.loss" in nested
    assert "Outer.inner.size and read on the driver (run)" in nested
    read = said(check_fixture_parts.Calls, "state-from-worker")
    assert any("Calls.policy.steps is read on the driver (Calls.policy.summary, reached from run)" in it for it in read)


def test_roles_of_one_device_group_share_their_parts_too() -> None:
    apart, together = groups_of(["train"], ["rollout"], ["judge"]), groups_of(["train", "rollout", "judge"])
    across = {"state-across-roles", "call-across-roles"}
    assert rules(check_fixture_parts.Calls, apart) - rules(check_fixture_parts.Calls, together) == across


def test_the_roles_that_a_whole_must_name_are_told() -> None:
    first, second = said(check_fixture_parts.RolesNotNamed, "part-role-not-named")
    assert "RolesNotNamed.judges['a'] is a Judge, of role 'judge'" in first
    assert "@RayHelper.worker(group=['train', 'judge']) on RolesNotNamed" in first
    assert "RolesNotNamed.generator is a Generator, of role 'rollout'" in second


def test_a_part_that_only_some_processes_build_is_told_with_who_builds_it() -> None:
    told = {
        message.partition(" (")[0]: message
        for message in said(check_fixture_parts.NotEverywhere, "part-not-everywhere")
    }
    assert "built in _load, which runs only on the driver" in told["NotEverywhere.loaded"]
    assert "built in build, which runs only on the workers of role 'train'" in told["NotEverywhere.built"]
    assert "under a condition that is not the same in every process" in told["NotEverywhere.first"]


def test_an_object_lives_where_the_roles_of_its_outermost_whole_do() -> None:
    assert said(Given, "object-not-hosted") == []  # nobody knows which roles share a group
    assert said(Given, "object-not-hosted", groups_of(["train", "judge", "rollout"])) == []
    told = said(Given, "object-not-hosted", groups_of(["train"], ["judge"], ["rollout"]))
    assert len(told) == 4
    assert "Judge is an argument of Given.policy.take, which runs on group 'g0', but it lives on" in told[0]
    assert "groups g1: RoleError" in told[0]
    assert "Given.policy is an argument of Generator, which is constructed on groups g2 as well" in told[-1]


def test_where_an_object_that_was_built_elsewhere_lives_is_not_known() -> None:
    assert said(Apart, "object-not-hosted", groups_of(["train"], ["rollout"])) == []


@RayHelper.worker(group="rollout")
class Apart:
    """A part that is checked alone: its sibling may be a part of the same whole."""

    def __init__(self, policy: check_fixture_parts.Policy) -> None:
        self.policy = policy

    @RayHelper.function(group="driver", execute="first")
    def refresh(self) -> None:
        self.take(self.policy)

    @RayHelper.function(group="rollout")
    def take(self, policy: check_fixture_parts.Policy) -> None:
        assert policy


@RayHelper.worker(group="train")
class Given:
    """Hands objects to groups that may not have them."""

    def __init__(self) -> None:
        self.policy = check_fixture_parts.Policy("policy")

    @RayHelper.function(group="train")
    def use(self, judges: Any) -> None:
        print(judges)

    def run(self) -> None:
        judge = check_fixture_parts.Judge("judge")
        self.policy.take(judge)
        self.policy.take(1, other=[{"a": judge}])
        self.use(judge)
        self.use(self.policy)
        generator = check_fixture_parts.Generator(self.policy)
        generator.report()


OWN = """
from rayhelper import RayHelper

class Model:
    @RayHelper.function(group="own")
    def loss(self) -> float:
        return 0.5

@RayHelper.worker(group="train")
class One(Model):
    @RayHelper.function(group="own", execute="first")
    def size(self) -> int:
        return 1

    def run(self) -> int:
        return self.size() + self.loss()  # finding: none-value-used
"""
SEVERAL = """
@RayHelper.worker(group=["train", "judge"])  # finding: own-of-several-roles
class Several(Model):
    @RayHelper.function(group="train")
    def update(self) -> None:
        return None
"""


def test_a_method_of_role_own_has_the_one_role_of_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_roles.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "own_of_several.py").write_text(OWN.partition("@RayHelper.worker")[0] + SEVERAL, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert check("own_roles:Model") == 0  # it is for others to inherit
    capsys.readouterr()
    assert check("own_roles:One") == 1
    assert printed(capsys.readouterr().out) == marked(tmp_path / "own_roles.py")
    assert check("own_of_several:Several") == 1
    out = capsys.readouterr().out
    assert printed(out) == marked(tmp_path / "own_of_several.py")
    assert "Model.loss, which Several inherits, belongs to role 'own'" in out


APART = """
from rayhelper import RayHelper
from own_parts import Policy

@RayHelper.worker(group=["train", "rollout"])
class Trainer:
    def __init__(self) -> None:
        self.policy = Policy()

    @RayHelper.function(group="rollout")
    def generate(self) -> None:
        self.policy.loss()  # finding: call-across-roles

RayHelper.initialize({})  # finding: initialize-on-import
"""
PARTS = """
from rayhelper import RayHelper

@RayHelper.worker(group="train")
class Policy:
    @RayHelper.function(group="own")
    def loss(self) -> float:
        return 0.5
"""


def test_parts_of_a_module_that_is_not_imported_are_read_in_their_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "started_parts.py").write_text(APART, encoding="utf-8")
    (tmp_path / "own_parts.py").write_text(PARTS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert check("started_parts:Trainer") == 1
    assert printed(capsys.readouterr().out) == marked(tmp_path / "started_parts.py")
    assert not {"started_parts", "own_parts"} & set(sys.modules)


def test_parts_of_one_class_have_one_finding_a_mistake() -> None:
    found = [finding for finding in findings(Twice) if finding.rule == "state-across-roles"]
    assert [(Path(finding.file).name, finding.line) for finding in found] == [("check_fixture_parts.py", 71)]
    assert "in line 22" in found[0].message


@RayHelper.worker(group=["train", "rollout"])
class Twice:
    """Two parts of one class."""

    def __init__(self) -> None:
        self.policy = check_fixture_parts.Policy("policy")
        self.first = check_fixture_parts.Generator(self.policy)
        self.second = check_fixture_parts.Generator(self.policy)

    def run(self) -> None:
        self.policy.build()
        self.first.generate([1])
        self.second.generate([2])


def test_a_line_in_another_file_is_told_with_the_file() -> None:
    (told,) = said(Elsewhere, "state-from-worker")
    assert "Elsewhere.policy.backend is read on the driver (run)" in told
    assert "in line 22 of check_fixture_parts.py" in told


@RayHelper.worker(group="train")
class Elsewhere:
    """Has no decorated method itself, and reads what a part's worker has."""

    def __init__(self) -> None:
        self.policy = check_fixture_parts.Policy("policy")

    def run(self) -> None:
        self.policy.build()
        print(self.policy.backend)


def make_local_parts() -> Iterator[type]:
    @RayHelper.worker(group="train")
    class Part:
        @RayHelper.function(group="train")
        def size(self) -> int:
            return 1

    @RayHelper.worker(group="train")
    class Local:
        def __init__(self) -> None:
            self.part = Part()

        def run(self) -> int:
            return self.part.size()

    yield Local


def test_parts_of_classes_inside_a_function_are_found_too() -> None:
    assert [finding.message.partition(" is ")[0] for finding in findings(next(make_local_parts()))] == [
        "Local.part.size"
    ]
