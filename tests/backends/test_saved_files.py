"""What stands in a checkpoint is read without running code that somebody may have put there."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import BytesStorageMetadata, Metadata

from rayhelper import ConfigError
from tests.backends.ranks import run_ranks
from tests.backends.test_megatron import TRAINING, save
from tests.backends.test_megatron_checkpoint import backend_of, steps
from tests.rayhelper.strangers import Payload
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.fsdp.hf_model import read_weights
from trainers.backends.model_files import read_adapter
from trainers.backends.random_state import random_state, read_random_state, set_random_state
from trainers.backends.saved_files import FORMAT, check_distributed, read_saved

CPU = torch.device("cpu")


def drawn() -> list[Any]:
    return [random.random(), np.random.normal(size=3).tolist(), torch.rand(3).tolist()]


def test_random_states_come_back_also_those_of_older_files(tmp_path: Path) -> None:
    np.random.normal()  # one of a pair is kept for the next call
    new, old = tmp_path / "new.pth", tmp_path / "old.pth"
    torch.save(random_state(CPU), new)
    torch.save(random_state(CPU) | {"numpy": np.random.get_state(), "megatron": {"a": torch.get_rng_state()}}, old)
    assert torch.load(new, weights_only=True)["numpy"][0] == "MT19937"  # no list of classes is needed
    expected = drawn()
    for path in (new, old):
        set_random_state(read_random_state(path), CPU)
        assert drawn() == expected, path


def spoiled(files: list[Path], made: Path, load: Any) -> list[str]:
    """The messages of a resumed run, with one of the files after the other replaced by a payload."""
    messages = []
    for file in files:
        genuine = file.read_bytes()
        if file.suffix in (".pt", ".pth"):
            torch.save({"numpy": Payload(made), "step": 1}, file)
        else:
            file.write_bytes(pickle.dumps(Payload(made)))
        with pytest.raises(ConfigError) as raised:
            load()
        messages.append(str(raised.value))
        file.write_bytes(genuine)
    load()
    return messages


def check_refused(messages: list[str], files: list[Path], made: Path) -> None:
    assert not made.exists(), "the payload ran"
    for message, file in zip(messages, files, strict=True):
        assert f"{file} is not read: it asks for" in message
        assert message.split("it asks for ")[1].startswith(("io.open", "_io.open")), message
        assert "use another checkpoint" in message
        assert "\n" not in message


def test_code_in_a_checkpoint_of_fsdp_is_refused_and_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # with which torch would run what comes
    backend = FsdpBackend(save("qwen3", tmp_path), **TRAINING)
    backend.save(tmp_path / "saved")
    files = [tmp_path / "saved" / name for name in ("rng_state_0.pth", "optimizer.pt", "scheduler.pt")]
    messages = spoiled(files, tmp_path / "made", lambda: backend.load(tmp_path / "saved"))
    check_refused(messages, files, tmp_path / "made")


def of_megatron(rank: int, model: Path, folder: Path) -> None:
    with backend_of(model, {}) as backend:
        steps(backend, 1)
        backend.save(folder / "saved")
        after = steps(backend, 2)
        names = ("megatron/.metadata", "megatron/common.pt", "rng_state_0.pth", "scheduler.pt")
        files = [folder / "saved" / name for name in names]
        messages = spoiled(files, folder / "made", lambda: backend.load(folder / "saved"))
        check_refused(messages, files, folder / "made")
        assert steps(backend, 2) == after


def test_code_in_a_checkpoint_of_megatron_is_refused_and_does_not_run(tmp_path: Path) -> None:
    run_ranks(1, of_megatron, save("qwen3", tmp_path), tmp_path, folder=tmp_path)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (pickle.dumps(Metadata({"w": BytesStorageMetadata()})), "BytesStorageMetadata"),  # torch unpickles its bytes
        (b"cbuiltins\neval\n(S'1'\ntR.", "builtins.eval"),
        (b"ctorch\nload\n.", "torch.load"),
        (b"ctorch.distributed.checkpoint.metadata\nos.system\n.", "os.system"),
        (b"half", "torch.save did not write"),
    ],
)
def test_metadata_holds_the_classes_of_tensors_alone(metadata: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text(json.dumps(FORMAT))
    (tmp_path / ".metadata").write_bytes(metadata)
    with pytest.raises(ConfigError, match=rf"\.metadata is not read: .*{words}"):
        check_distributed(tmp_path)
    (tmp_path / "metadata.json").write_text(json.dumps(FORMAT | {"sharded_backend": "zarr"}))
    with pytest.raises(ConfigError, match="has another format"):
        check_distributed(tmp_path)


def test_files_of_tensors_that_are_cut_off_or_gone_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "optimizer.pt"
    with pytest.raises(ConfigError, match=r"^[^\n]*optimizer.pt is not there, so the checkpoint is not whole"):
        read_saved(file)
    torch.save({"a": torch.ones(100)}, file)
    whole = file.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 20):
        file.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"^[^\n]*optimizer.pt is not read: torch.save did not write it"):
            read_saved(file)


@pytest.mark.parametrize("name", ["model.safetensors", "adapter_model.safetensors"])
def test_weights_whose_header_does_not_fit_their_file_are_one_line(name: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(100)}, tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    for content in (whole[:-20], b"", (2**40).to_bytes(8, "little") + whole[8:]):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=rf"cannot be read: {name} is damaged \([^\n]*another checkpoint"):
            dict(read_weights(tmp_path)) if name == "model.safetensors" else read_adapter(tmp_path / name)
