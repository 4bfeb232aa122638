"""Plugins: found, imported once, and never silently replaced."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayhelper import ConfigError
from tests.conftest import registries_restored
from trainers.cli import load_config
from trainers.configuration.mistakes import mistakes_of
from trainers.configuration.shared import TrainConfig
from trainers.plugins import DATASETS, MODELS, REWARDS, _Entry, load_plugins, register_reward, resolve_model
from trainers.rewards.functions import resolve_rewards
from trainers.run.stopping import Stopped

PLUGIN = """
import os
import signal
from trainers.run.stopping import ends_by_sigterm
from trainers.plugins import register_dataset, register_model, register_reward

@register_reward("short")
def short(completions, **columns):
    return [float(len(completion) < 3) for completion in completions]

@register_dataset("letters")
def letters():
    return [{"prompt": letter} for letter in "abc"]

@register_model("nothing")
def nothing(output_dir, seed):
    return output_dir

@register_model("stopped")
def stopped(output_dir, seed):
    with ends_by_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)

@register_model("something")
def something(output_dir, seed):
    folder = output_dir / f"seed{seed}"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder
"""


@pytest.fixture(autouse=True)
def _clean_registries() -> Iterator[None]:
    with registries_restored():
        yield


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    file = tmp_path / "random.py"  # the name of a standard module
    file.write_text(PLUGIN)
    return file


def test_a_plugin_file_registers_by_name_and_hides_no_other_module(plugin: Path) -> None:
    import random

    [module] = load_plugins([plugin])
    assert REWARDS["short"] is module.short
    assert len(DATASETS["letters"]()) == 3
    assert sys.modules["random"] is random
    assert pickle.loads(pickle.dumps(module.short)) is module.short


def test_a_plugin_is_imported_once_under_any_spelling_of_its_path(
    plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(plugin.parent)
    first, second, third = load_plugins([str(plugin), "random.py", "./random.py"])
    assert first is second is third


def test_a_file_that_is_imported_again_replaces_what_it_registered(plugin: Path) -> None:
    [module] = load_plugins([plugin])
    del sys.modules[module.__name__]
    [again] = load_plugins([plugin])
    assert again is not module
    assert REWARDS["short"] is again.short


def test_a_name_that_another_file_registered_is_refused(plugin: Path) -> None:
    load_plugins([plugin])
    with pytest.raises(ValueError, match=r"reward 'short' is registered twice: by short of .*random.py and by"):
        register_reward("short")(len)


def test_two_functions_of_one_file_cannot_share_a_name() -> None:
    @register_reward("twin")
    def one() -> None: ...

    def other() -> None: ...

    with pytest.raises(ValueError, match="registered twice"):
        register_reward("twin")(other)
    assert REWARDS["twin"] is one


def test_a_decorator_without_a_name_says_so() -> None:
    with pytest.raises(TypeError, match=r"Write @register_reward\('name'\)"):
        register_reward(len)  # type: ignore[arg-type]


def test_a_missing_file_is_answered_with_the_nearest_one(plugin: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"Did you mean 'random.py'\?"):
        load_plugins([plugin.with_name("randon.py")])


def test_a_plugin_that_a_file_names_is_also_found_beside_the_file(
    plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the current folder comes first, as ever; a name on the command line has no file beside which it may be."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ndataset: d\nexternal_plugins: [random.py, a.module]\n")

    def named(*arguments: str) -> list[str]:
        return load_config(TrainConfig, arguments).external_plugins

    assert named("--config", str(file)) == [str(plugin), "a.module"]
    assert named("--config", "../run.yaml") == ["../random.py", "a.module"]
    (elsewhere / "random.py").write_text("")
    assert named("--config", str(file)) == ["random.py", "a.module"]
    (elsewhere / "random.py").unlink()
    with pytest.raises(ConfigError, match=r"external_plugins: there is no file 'random.py'"):
        named("--model", "m", "--dataset", "d", "--external_plugins", "random.py")


@pytest.mark.parametrize(
    ("code", "reason"), [("1 / 0", "ZeroDivisionError"), ("def", "SyntaxError"), ("import nowhere_at_all", "nowhere")]
)
def test_a_plugin_that_fails_names_its_file_and_the_reason(tmp_path: Path, code: str, reason: str) -> None:
    file = tmp_path / "broken.py"
    file.write_text(code)
    with pytest.raises(ImportError, match=rf"broken\.py' cannot be imported: .*{reason}"):
        load_plugins([file])
    assert not [name for name in sys.modules if name.startswith("plugin_broken")]


def test_a_plugin_may_be_a_module_name(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.rename(plugin.with_name("plugin_by_name.py"))
    monkeypatch.syspath_prepend(str(plugin.parent))
    load_plugins(["plugin_by_name"])
    assert resolve_rewards("short")[0] == [(REWARDS["short"], "short")]
    with pytest.raises(ImportError, match=r"'plugin_by_nam' cannot be imported: ModuleNotFoundError"):
        load_plugins(["plugin_by_nam"])


def test_a_registered_model_is_built_and_any_other_name_is_kept(plugin: Path, tmp_path: Path) -> None:
    load_plugins([plugin])
    assert resolve_model("something", output_dir=tmp_path, seed=7) == str(tmp_path / "seed7")
    assert resolve_model("org/model", output_dir=tmp_path, seed=7) == "org/model"
    with pytest.raises(FileNotFoundError, match=r"model 'nothing' returned .* no config\.json"):
        resolve_model("nothing", output_dir=tmp_path / "x", seed=7)
    with pytest.raises(Stopped):  # by a signal, as a run inside is: no error of the model's
        resolve_model("stopped", output_dir=tmp_path, seed=7)


def test_a_run_that_resumes_takes_the_model_that_was_built_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def built(output_dir: Path, seed: int) -> Path:
        seen.append(seed)
        if len(seen) == 5:
            raise KeyboardInterrupt
        folder = output_dir / "warm_start"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
        return folder

    monkeypatch.setitem(MODELS.entries, "warm", _Entry(built, (__file__, "built")))
    for seed, reuse, num_built in ((1, True, 1), (1, True, 1), (1, False, 2), (2, True, 3), (1, True, 4)):
        folder = resolve_model("warm", output_dir=tmp_path, seed=seed, reuse=reuse)
        assert (folder, len(seen)) == (str(tmp_path / "warm_start"), num_built)
    with pytest.raises(KeyboardInterrupt):  # the folder is half of another seed's now
        resolve_model("warm", output_dir=tmp_path, seed=3, reuse=True)
    resolve_model("warm", output_dir=tmp_path, seed=1, reuse=True)
    assert len(seen) == 6
    monkeypatch.setitem(MODELS.entries, "warm", _Entry(built, (str(tmp_path / "plugin_models.json"), "built")))
    resolve_model("warm", output_dir=tmp_path, seed=1, reuse=True)  # another plugin
    assert len(seen) == 7


def test_a_signal_while_a_plugins_code_runs_is_no_mistake_of_the_plugin() -> None:
    with pytest.raises(Stopped), mistakes_of("dataset"):
        raise Stopped(143)


def test_a_plugin_that_exits_as_it_is_imported_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    told = r"external_plugins: its code called sys.exit\(0\)"
    with pytest.raises(ConfigError, match=told), mistakes_of("external_plugins"):
        load_plugins([tmp_path / "leaves.py"])
