"""Model folders that lack a file, or hold a broken one, are one line that names the key before anything starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayhelper import ConfigError
from tests.golden.tiny import save_tiny
from trainers.cli import load_config, main
from trainers.configuration.shared import TrainConfig
from trainers.dpo.config import DPOConfig
from trainers.gkd.config import GKDConfig
from trainers.gkd.vocabularies import common_vocab_size
from trainers.parts.model_checks import check_files, check_weights
from trainers.parts.tokenizer import load_tokenizer
from trainers.ppo.config import PPOConfig
from trainers.sft.config import SFTConfig

Break = Callable[[Path], Any]
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


def written(name: str, content: str | bytes) -> Break:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def fields(**said: Any) -> Break:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | said))

    return change


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])


def indexed(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    about = {"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(about))


def only_an_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def check_all(config: TrainConfig) -> None:
    check_files(config, None)
    check_weights(config, None)


BROKEN: list[tuple[Break, str]] = [
    (lambda folder: (folder / "config.json").unlink(), r"has no config.json\. Give the folder that holds it"),
    (only_an_adapter, r"has no config.json\. It holds an adapter alone"),
    (written("config.json", '{"model_type": "qw'), "config.json' cannot be read as JSON: Unterminated string"),
    (written("config.json", b"\xff\xfe\x00"), "config.json' cannot be read as JSON: "),
    (written("config.json", "[1, 2]"), "config.json' is not a JSON object of fields"),
    (written("config.json", "null"), "config.json' is not a JSON object of fields"),
    (fields(hidden_size="big"), "has no configuration that can be read: .*'hidden_size' expected int"),
    (fields(num_hidden_layers=9), "has no configuration that can be read: .*must be equal to the number of"),
    (fields(auto_map=3), "has no configuration that can be read: "),
    (fields(dtype="floot"), "has no configuration that can be read: .*'floot'"),
    (lambda folder: (folder / WEIGHTS).unlink(), "it has neither model.safetensors nor shards with"),
    (cut, r"model.safetensors is damaged \(.*file not fully covered"),
    (written(WEIGHTS, b""), r"model.safetensors is damaged \("),
    (written(WEIGHTS, (2**40).to_bytes(8, "little") + b"{}"), r"model.safetensors is damaged \(.*header too large"),
    (indexed, "index.json names model-00001-of-00002.safetensors, which is not there"),
    (lambda folder: (indexed(folder), written(f"{WEIGHTS}.index.json", "{")(folder)), "index.json cannot be read"),
    (written("adapter_config.json", '{"base_model_name_or_path": "/x"}'), "holds an adapter beside a model"),
    (written("generation_config.json", "[]"), "generation_config.json is not a JSON object"),
    (written("generation_config.json", '{"eos_token_id": "x"}'), "has eos_token_id 'x', which is not a token id"),
]  # fmt: skip


@pytest.mark.parametrize(("broken", "told"), BROKEN)
def test_a_broken_folder_is_named_with_its_key_whatever_role_it_is_for(
    broken: Break, told: str, model: str, tmp_path: Path
) -> None:
    folder = str(shutil.copytree(model, tmp_path / "broken"))
    broken(Path(folder))
    given: dict[str, Any] = {"model": model, "dataset": "d"}
    configurations = {
        "model": SFTConfig(**given | {"model": folder}),
        "ref_model": DPOConfig(**given, ref_model=folder),
        "value_model": PPOConfig(**given, reward_funcs=["format"], value_model=folder),
        "teacher_model": GKDConfig(**given, teacher_model=folder),
    }
    for key, config in configurations.items():
        with pytest.raises(ConfigError, match=rf"^{key}: [^\n]*{told}[^\n]*$"):
            check_all(config)


def test_whole_folders_are_accepted_and_hub_names_not_looked_at(model: str, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "shards")
    (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
    about = {"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(about))
    for teacher in (model, "nobody/nothing", str(folder)):
        config = GKDConfig(model=model, dataset="d", teacher_model=teacher)
        check_all(config)


def test_a_run_ends_before_its_start_where_the_weights_are_damaged(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "broken"))
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    cut(folder)
    arguments = ["--model", str(folder), "--dataset", str(tmp_path / "rows.jsonl")]
    with pytest.raises(SystemExit) as ended:
        main("sft", [*arguments, "--output_dir", str(tmp_path / "run")])
    assert ended.value.code == 2
    assert "error: model: " in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", ["[]", "3", '{"added_tokens_decoder": 3}'])
def test_a_tokenizer_that_cannot_be_read_is_one_line(content: str, model: str, tmp_path: Path) -> None:
    folder = str(shutil.copytree(model, tmp_path / "broken"))
    written("tokenizer_config.json", content)(Path(folder))
    with pytest.raises(ConfigError, match=r"^no tokenizer could be loaded from [^\n]*$"):
        load_tokenizer(SFTConfig(model=model, tokenizer=folder, dataset="d"), model)
    config = GKDConfig(model=model, teacher_model=folder, dataset="d")
    with pytest.raises(ConfigError, match=r"^teacher_model: no tokenizer could be loaded from [^\n]*$"):
        common_vocab_size(config, model, folder, load_tokenizer(config, model))


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
@pytest.mark.parametrize("defaults", ["trl", "ms-swift"])
def test_defaults_that_ask_the_model_do_not_fail_with_it(
    backend: str, defaults: str, model: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(model, tmp_path / "broken")
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")
    arguments = ["--model", str(folder), "--dataset", "d", "--backend", backend, "--defaults", defaults]
    assert load_config(SFTConfig, [*arguments, "--router_aux_loss_coef", "0"]).model == str(folder)
