"""Checkpoints of the megatron backend: runs that go on in any layout, files that are whole or known not to be."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests import megatron_on_cpu
from tests.backends.batches import samples_of, weighted_loss
from tests.backends.ranks import run_ranks
from tests.backends.test_megatron import (
    EP,
    ETP,
    FIRST,
    MICRO,
    OVERLAP,
    PLAIN,
    PP,
    SP,
    TP,
    TRAINING,
    VPP,
    Layout,
    save,
)
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.fsdp.hf_model import named_weights, read_weights
from trainers.checkpoint import is_written

megatron_on_cpu.take_back()

BEFORE, AFTER = 1, 2  # steps
BATCH_BYTES = 1 << 30


@dataclass(frozen=True)
class Part:
    """A run, or what it does after it went on from a checkpoint."""

    layout: Layout
    load: str | None = None
    before: int = 0  # steps before it saves
    save: str | None = None
    after: int = AFTER
    arguments: dict[str, Any] = field(default_factory=dict)
    batch_bytes: int = BATCH_BYTES


@contextmanager
def backend_of(model: Path, layout: Layout, **arguments: Any) -> Iterator[Any]:
    from trainers.backends.megatron.backend import MegatronBackend
    from trainers.backends.megatron.settings import MegatronSettings

    megatron_on_cpu.install()
    yield MegatronBackend(model, settings=MegatronSettings(**layout), **TRAINING | arguments)
    megatron_on_cpu.end_groups()


def steps(backend: Any, count: int) -> list[float]:
    """This worker's part of the loss of each step; 0 if another answers for it."""
    index, size, leader = backend.shard
    samples = samples_of()
    mine = samples[np.array_split(np.arange(len(samples)), size)[index]]
    loss = partial(weighted_loss, float(samples.target_mask.values.sum()))
    values = [backend.step(mine, loss, micro_batch_size=MICRO).values() for _ in range(count)]
    return [step["loss"] if leader else 0.0 for step in values]


def of_parts(rank: int, model: Path, folder: Path, parts: list[Part]) -> list[dict[str, Any]]:
    from trainers.backends.megatron import backend as module
    from trainers.backends.megatron.checkpoint import load_parts

    found = []
    for part in parts:
        module.load_parts = partial(load_parts, batch_bytes=part.batch_bytes)  # type: ignore[assignment]
        with backend_of(model, part.layout, **part.arguments) as backend:
            if part.load:
                backend.load(folder / part.load)
            before = steps(backend, part.before)
            if part.save:
                backend.save(folder / part.save)
            after = steps(backend, part.after)
            weights = {name: weight.clone() for name, weight in backend.named_weights()}
            found.append({"losses": np.array(before + after), "weights": weights})
    return found


def tensors(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    """All of a checkpoint's tensors in megatron's format, whole."""
    from megatron.core.dist_checkpointing import load_plain_tensors

    megatron_on_cpu.install()
    found = load_plain_tensors(str(folder / "megatron"))
    return {name: value for name, value in found.items() if torch.is_tensor(value)}


def losses(ranks: list[list[dict[str, Any]]], k: int) -> np.ndarray:
    total: np.ndarray = np.sum([rank[k]["losses"] for rank in ranks], 0)
    return total


def started(num_ranks: int, model: Path, folder: Path, parts: list[Part]) -> list[list[dict[str, Any]]]:
    return run_ranks(num_ranks, of_parts, model, folder, parts, folder=folder)


SAVED: dict[str, Layout] = {"qwen3": {TP: 2, PP: 2, FIRST: 1} | SP, "qwen3_moe": {TP: 2, EP: 2, ETP: 1} | SP}
OTHERS: dict[str, list[Layout]] = {
    "qwen3": [{TP: 4} | SP | PLAIN, {PP: 4}],
    "qwen3_moe": [{EP: 4} | PLAIN, {TP: 2, EP: 2, ETP: 2} | SP],
}
SECOND: dict[str, Layout] = {"qwen3": {PP: 2, VPP: 2} | OVERLAP, "qwen3_moe": {PP: 2, EP: 2} | OVERLAP}


@pytest.mark.parametrize("family", SAVED)
def test_a_resumed_run_is_the_uninterrupted_one_in_any_layout(family: str, tmp_path: Path) -> None:
    model = save(family, tmp_path)
    first = Part(SAVED[family], before=BEFORE, save="first")
    again = Part(SAVED[family], load="first")
    others = [Part(layout, load="first") for layout in OTHERS[family]]
    others[1] = replace(others[1], batch_bytes=1 << 16)
    second = Part(SECOND[family], load="first", before=1, save="second", after=1)
    plain = Part(OTHERS[family][0], load="first", save="plain", after=0)
    ranks = started(4, model, tmp_path, [first, again, *others, second, plain])
    whole = losses(ranks, 0)
    alone = FsdpBackend(model, **TRAINING)
    loss = partial(weighted_loss, float(samples_of().target_mask.values.sum()))
    right = [alone.step(samples_of(), loss, micro_batch_size=MICRO).values()["loss"] for _ in whole]
    np.testing.assert_allclose(whole, right, atol=1e-5)
    np.testing.assert_array_equal(losses(ranks, 1), whole[BEFORE:])
    for rank in ranks:
        for name, weight in rank[0]["weights"].items():
            assert torch.equal(rank[1]["weights"][name], weight), name
    single = [Part({}, load="first"), Part(PLAIN, load="plain"), Part({}, load="second", after=1)]
    alone_again = started(1, model, tmp_path, single)
    found = {str(part.layout): losses(ranks, k) for k, part in enumerate([*others, second], start=2)}
    found |= {f"alone from {part.load}": losses(alone_again, k) for k, part in enumerate(single)}
    for layout, numbers in found.items():
        np.testing.assert_allclose(numbers, whole[-len(numbers) :], atol=1e-6, err_msg=layout)


def test_main_weights_and_moments_are_kept_in_any_layout(tmp_path: Path) -> None:
    model = save("qwen3_moe", tmp_path)
    half = {"dtype": "bfloat16"}
    layouts: list[Layout] = [{EP: 2}, {EP: 2, "moe_grouped_gemm": True}, {PP: 2, FIRST: 3} | PLAIN, {TP: 2} | SP]
    parts = [Part(layouts[0], before=1, save="0", after=1, arguments=half)]
    parts += [Part(layout, load=str(k), save=str(k + 1), after=0, arguments=half) for k, layout in enumerate(layouts)]
    parts += [Part(layouts[0], load="4", after=1, arguments=half)]
    ranks = started(2, model, tmp_path, parts)
    np.testing.assert_array_equal(losses(ranks, -1), losses(ranks, 0)[1:])
    first, last = (run_ranks(1, tensors, tmp_path / name, folder=tmp_path)[0] for name in ("0", "4"))
    assert first.keys() == last.keys()
    assert {name.split(".")[1] for name in first if name.startswith("optimizer.")} == {"param", "exp_avg", "exp_avg_sq"}
    for name, value in first.items():
        rows = min(len(value), len(last[name]))  # words behind the last are padding
        assert torch.equal(value[:rows], last[name][:rows]), name
        assert value.any(), name


def test_optimizers_that_do_not_count_or_have_not_begun_go_on_too(tmp_path: Path) -> None:
    model, sgd = save("qwen3", tmp_path), {"optim": "sgd"}
    new = [Part({}, save="new", after=1), Part({}, load="new", after=1)]
    first = Part(PLAIN, before=2, save="sgd", after=2, arguments=sgd)
    momentum = [first, Part(PLAIN, load="sgd", after=2, arguments=sgd)]
    ranks = started(2, model, tmp_path, [*new, *momentum])
    for whole, again in ((0, 1), (2, 3)):
        np.testing.assert_array_equal(losses(ranks, again), losses(ranks, whole)[-len(losses(ranks, again)) :])


def test_the_export_in_a_checkpoint_is_the_model(tmp_path: Path) -> None:
    model = save("qwen3_moe", tmp_path)
    ranks = started(2, model, tmp_path, [Part({EP: 2}, before=1, save="saved", after=0)])
    weights = ranks[0][0]["weights"]
    built = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    loaded = dict(named_weights(built))
    assert loaded.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(loaded[name], weight), name


def of_values(rank: int, model: Path) -> list[str]:
    from trainers.backends.megatron import layout
    from trainers.backends.megatron.model import build_stages
    from trainers.backends.megatron.settings import MegatronSettings

    megatron_on_cpu.install()
    settings = MegatronSettings(pipeline_model_parallel_size=2)
    layout.start(settings, seed=1)
    config = AutoConfig.from_pretrained(model)
    stage = build_stages(config, settings, head="value", dtype=torch.float32, device=torch.device("cpu"))[0]
    places = stage.sharded_state_dict()
    placed = {id(getattr(place, "data", None)) for place in places.values()}
    assert all(id(weight) in placed for weight in stage.parameters())
    return [place.key for place in places.values()]


def test_a_value_head_has_its_place_in_a_checkpoint(tmp_path: Path) -> None:
    first, last = run_ranks(2, of_values, save("qwen3", tmp_path), folder=tmp_path)
    assert "values.weight" in last
    assert "values.weight" not in first


# While training goes on


def in_background(rank: int, model: Path, folder: Path) -> dict[str, Any]:
    from trainers.backends.megatron.checkpoint import HostFiles, Writer

    may_write, write = threading.Event(), HostFiles.write

    def later(files: HostFiles) -> None:
        may_write.wait()
        write(files)

    def never(files: HostFiles) -> None:
        raise OSError("no space left")

    with backend_of(model, {TP: 2}, async_save=True) as backend:
        steps(backend, 1)
        background, backend.writer = backend.writer, Writer()
        backend.save(folder / "at once")
        backend.writer = background
        HostFiles.write = later  # type: ignore[method-assign]
        backend.save(folder / "later")
        drawn = torch.rand(3), np.random.random(3)
        losses = steps(backend, 2)
        waited = not is_written(folder / "later")
        may_write.set()
        backend.export(folder / "export")
        written = is_written(folder / "later")
        if rank == 1:
            HostFiles.write = never  # type: ignore[method-assign]
        backend.save(folder / "never")
        with pytest.raises(RuntimeError, match=r"never could not be written .*rank 1: OSError: no space left"):
            backend.save(folder / "next")
        with pytest.raises(RuntimeError, match=r"rank_1 could not write its part .OSError: no space left"):
            backend.load(folder / "never")
        HostFiles.write = write  # type: ignore[method-assign]
        backend.load(folder / "later")
        assert torch.equal(torch.rand(3), drawn[0])
        np.testing.assert_array_equal(np.random.random(3), drawn[1])
        again = steps(backend, 2)
    return {"losses": losses, "again": again, "waited": waited, "written": written}


def test_steps_go_on_while_a_checkpoint_is_written_and_a_failure_is_told(tmp_path: Path) -> None:
    model = save("qwen3", tmp_path)
    for rank in run_ranks(2, in_background, model, tmp_path, folder=tmp_path):
        assert rank["waited"]
        assert rank["written"]
        assert rank["again"] == rank["losses"]
    sync, later = ({path.relative_to(folder): path for path in folder.rglob("*.*")} for folder in folders(tmp_path))
    assert sync.keys() == later.keys()
    one, other = (run_ranks(1, tensors, folder, folder=tmp_path)[0] for folder in folders(tmp_path))
    assert one.keys() == other.keys()
    assert all(torch.equal(other[name], value) for name, value in one.items())
    for name, path in sync.items():
        if path.is_file() and not path.name.startswith(("rng_state", ".metadata")):  # which has a random number in it
            assert path.read_bytes() == later[name].read_bytes(), name


def folders(folder: Path) -> list[Path]:
    return [folder / "at once", folder / "later"]


def killed(rank: int, model: Path, folder: Path) -> None:
    from trainers.backends.megatron.checkpoint import HostFiles

    def write_one_and_die(files: Any) -> None:
        path, stream = files.streams.popitem()
        path.write_bytes(stream.getvalue()[:100])
        os._exit(1)

    with backend_of(model, {}, async_save=True) as backend:
        steps(backend, 1)
        HostFiles.write = write_one_and_die  # type: ignore[method-assign]
        backend.save(folder / "killed")
        backend.writer.wait()


def refused(rank: int, model: Path, folder: Path) -> None:
    with backend_of(model, {}) as backend:
        with pytest.raises(RuntimeError, match="killed is incomplete"):
            backend.load(folder / "killed")
        with pytest.raises(FileNotFoundError, match=r"no megatron/.*start a new run from it as model"):
            backend.load(model)
        backend.save(folder / "float32")
    with backend_of(model, {}, dtype="bfloat16") as backend, pytest.raises(ValueError, match="dtype: float32"):
        backend.load(folder / "float32")
    theirs = folder / "fsdp"
    FsdpBackend(model, learning_rate=1e-3).save(theirs)
    with backend_of(folder / "float32", {}, learning_rate=None) as scorer:
        before = scorer.token_logps(samples_of(), micro_batch_size=MICRO).values
        scorer.mix_weights(((name, torch.zeros_like(weight)) for name, weight in scorer.named_weights()), 0.5)
        scorer.load(theirs)
        after = scorer.token_logps(samples_of(), micro_batch_size=MICRO).values
        np.testing.assert_array_equal(before, after)
        scorer.save(folder / "scorer")
    given, written = dict(read_weights(model)), load_file(folder / "scorer" / "model.safetensors")
    assert given.keys() == written.keys()
    assert all(torch.equal(given[name], written[name]) for name in given)
    assert {path.name for path in (folder / "scorer").glob("*")} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "rng_state_0.pth",
    }


def test_what_is_not_whole_or_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    model = save("qwen3", tmp_path)
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(1, killed, model, tmp_path, folder=tmp_path)
    assert not is_written(tmp_path / "killed")
    run_ranks(1, refused, model, tmp_path, folder=tmp_path)
