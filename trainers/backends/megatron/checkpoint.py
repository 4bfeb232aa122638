"""Checkpoints of a model in parts: megatron-core's distributed format, which any other layout reads.

    folder/config.json, model*.safetensors    the Hugging Face model (``weights.py``)
    folder/megatron/                          weights and what the optimizer keeps of each, every shard once
    folder/scheduler.pt, rng_state_*.pth      schedule, and the random state of every rank

What the optimizer keeps is written as whole tensors of the weights' shapes, also where workers of a data-parallel group
have a part of each: they take turns in collecting and writing, so that no memory holds more than such a part of them.
Megatron-core plans who writes what, the files are written by torch, in this process; megatron-core's own writer would
start others.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from trainers.backends.megatron.moments import MAIN, Kept, kept
from trainers.backends.saved_files import check_distributed
from trainers.checkpoint import Writing

FOLDER = "megatron"
EXTRA = "_extra_state"  # in the names of what a layer keeps beside its weights
BATCH_BYTES = 4 * 2**30  # that a rank reads of the optimizer's part at a time


class Writer:
    """Writes a rank's files, at once or, ``in_background``, from a copy in the host's memory while training goes on."""

    def __init__(self, *, in_background: bool = False) -> None:
        self.in_background = in_background
        self.thread: threading.Thread | None = None
        self.folder: Path | None = None
        self.error: BaseException | None = None

    @contextlib.contextmanager
    def writing(self, folder: Path) -> Iterator[FileSystem]:
        """Inside, files are given to the file system that comes; behind it ``folder`` is whole, or soon will be.

        Until then it is marked as unfinished. Every rank enters.
        """
        mark = Writing(folder, dist.get_rank())
        if dist.get_rank() == 0:  # on a shared disk the marks of other nodes might be seen too late
            for rank in range(dist.get_world_size()):
                Writing(folder, rank).begin()
        dist.barrier()
        files: FileSystem = HostFiles() if self.in_background else FileSystem()
        yield files
        dist.barrier()
        if isinstance(files, HostFiles):
            self.folder = folder
            self.thread = threading.Thread(target=self._write, args=(files, mark), name=f"writer of {folder.name}")
            self.thread.start()
        else:
            mark.end()
            dist.barrier()

    def _write(self, files: HostFiles, mark: Writing) -> None:
        try:
            files.write()
            mark.end()
        except BaseException as error:
            self.error = error
            mark.fail(error)

    def wait(self) -> None:
        """Returns when every rank has written what it had to write. Every rank calls it.

        Raises:
            RuntimeError: a rank could not.
        """
        if self.folder is None:
            return
        assert self.thread is not None
        self.thread.join()
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, self.error and f"{type(self.error).__name__}: {self.error}")
        folder, error = self.folder, self.error
        self.folder = self.thread = self.error = None
        failed = [f"rank {rank}: {words}" for rank, words in enumerate(told) if words]
        if failed:
            raise RuntimeError(
                f"{folder} could not be written and is not a checkpoint ({'; '.join(failed)})"
            ) from error


class _Stream(io.BytesIO):
    """Keeps what was written when it is closed."""

    def close(self) -> None: ...


class HostFiles(FileSystem):
    """Files in the memory of the host, until ``write``."""

    def __init__(self) -> None:
        self.streams: dict[Path, _Stream] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", "they are only written"
        yield self.streams.setdefault(Path(path), _Stream())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self.streams[Path(new_path)] = self.streams.pop(Path(path))

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return Path(path) in self.streams

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        del self.streams[Path(path)]

    def write(self) -> None:
        """Puts all on the disk, and gives the memory back file by file."""
        while self.streams:
            path, stream = self.streams.popitem()
            with path.open("wb") as file:
                file.write(stream.getbuffer())
                file.flush()
                os.fsync(file.fileno())


class _Strategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Saves in megatron-core's format, into a given file system, without further processes."""

    def __init__(self, files: FileSystem) -> None:
        super().__init__("torch_dist", 1)
        self.files = files

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        own, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        writer = FileSystemWriter(checkpoint_dir, sync_files=not isinstance(self.files, HostFiles))
        writer.fs = self.files
        planner = MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        state_dict_saver.save(mcore_to_pyt_state_dict(own, False), storage_writer=writer, planner=planner)


def save_parts(folder: Path, stages: Sequence[Any], optimizer: Any, files: FileSystem) -> None:
    """Writes the weights of all stages and what the optimizer keeps of them. Every rank."""
    folder = folder / FOLDER
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    dist.barrier()
    state = _shards(stages)
    places = _places(state)
    own = list(kept(optimizer))
    names, step = _agreed(own)
    for k, one in enumerate(own):
        place = places[id(one.weight)]
        state[f"kept {k}"] = {name: _given(one, name, place, k) for name in _names_of(one, names)}
    state["optimizer"] = {"names": names, "step": step}
    dist_checkpointing.save(state, str(folder), _Strategy(files))


def check_parts(folder: Path, *, dtype: torch.dtype) -> None:
    """Returns if training can go on from the folder.

    Raises:
        FileNotFoundError: it was not written in training.
        ValueError: it was written in another ``dtype``.
        ConfigError: it holds more than tensors, numbers and text.
    """
    if not (folder / FOLDER / "metadata.json").is_file():
        raise FileNotFoundError(
            f"{folder} was not written by a training run with backend: megatron: there is no {FOLDER}/, and no "
            "optimizer state. Continue with the backend that wrote it, or start a new run from it as model."
        )
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))["dtype"]
    if getattr(torch, saved) != dtype:
        raise ValueError(f"{folder} is from a run with dtype: {saved}; this one has {dtype}. Change that back.")
    check_distributed(folder / FOLDER)


def load_parts(folder: Path, stages: Sequence[Any], optimizer: Any, *, batch_bytes: int = BATCH_BYTES) -> None:
    """Takes what ``save_parts`` wrote, in any layout. Every rank.

    Raises:
        megatron.core.dist_checkpointing.core.CheckpointingException: the checkpoint is of a model of another shape.
    """
    found = _load(folder, _shards(stages))
    for k, stage in enumerate(stages):
        others = stage.load_state_dict(found[f"stage {k}"], strict=False)
        odd = [name for name in (*others.missing_keys, *others.unexpected_keys) if EXTRA not in name]
        assert not odd, f"all weights are needed, but the request names {odd[:3]}"
    names, step = found["optimizer"]["names"], found["optimizer"]["step"]
    places = _places(_shards(stages))
    own = list(kept(optimizer))
    for one in own:
        one.forget()
    device = next(stages[0].parameters()).device
    for batch in _batched(own, len(names), batch_bytes, device):
        asked = {
            f"kept {k}": {name: _wanted(one, name, places[id(one.weight)]) for name in _names_of(one, names)}
            for k, one in enumerate(batch)
        }
        found = _load(folder, asked)
        for k, one in enumerate(batch):
            for name in _names_of(one, names):
                one.take(name, found[f"kept {k}"][name])
    for one in own:
        if step is not None:
            one.count(step)


def _load(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = dist_checkpointing.load(state, str(folder / FOLDER), validate_access_integrity=False)
    return found


def _shards(stages: Sequence[Any]) -> dict[str, Any]:
    """Where the weights of each stage lie in the model, whichever layers have them.

    What else TransformerEngine's layers keep is of recipes for fp8 that are refused.
    """
    return {
        f"stage {k}": {name: shard for name, shard in stage.sharded_state_dict().items() if EXTRA not in name}
        for k, stage in enumerate(stages)
    }


def _places(shards: Mapping[str, Any]) -> dict[int, Any]:
    """The same by the weights' ids."""
    kinds = (ShardedTensor, ShardedTensorFactory)
    return {id(shard.data): shard for shard in nested_values(shards) if isinstance(shard, kinds)}


def _names_of(one: Kept, names: Sequence[str]) -> list[str]:
    return [MAIN, *names] if one.has_main else list(names)


def _agreed(own: Sequence[Kept]) -> tuple[list[str], float | None]:
    """What is kept beside the main weights, and the steps that were counted, as all ranks say."""
    mine = ({name for one in own for name in one.names()} - {MAIN}, {one.step() for one in own} - {None})
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    names: set[str] = set().union(*(names for names, _ in told))
    steps: set[float] = set().union(*(steps for _, steps in told))
    assert len(steps) <= 1, f"all weights have been stepped equally often, and not {sorted(steps)} times"
    return sorted(names), next(iter(steps), None)


def _given(one: Kept, name: str, shard: Any, turn: int) -> ShardedTensor | ShardedTensorFactory:
    """What is written of a weight: by the worker of its data-parallel group whose turn it is."""
    size = 1 if one.group is None else one.group.size()
    owner = turn % size
    whole = one.whole(name, owner)
    if whole is None:  # takes no memory, and is not written
        whole = torch.empty(1).expand(one.weight.shape)
    replica = shard.replica_id if size == 1 else (*shard.replica_id[:-1], (shard.replica_id[-1] - owner) % size)
    return _named(shard, name, whole, replica_id=replica)


def _wanted(one: Kept, name: str, shard: Any) -> ShardedTensor | ShardedTensorFactory:
    return _named(shard, name, torch.zeros(one.weight.shape), replica_id=shard.replica_id)  # rows of padding stay zero


def _named(shard: Any, name: str, data: torch.Tensor, **changes: Any) -> ShardedTensor | ShardedTensorFactory:
    if isinstance(shard, ShardedTensor):
        changes["dtype"] = data.dtype
    named: ShardedTensor | ShardedTensorFactory = replace(
        shard, key=f"optimizer.{name}.{shard.key}", data=data, **changes
    )
    return named


def _batched(own: Sequence[Kept], num_names: int, num_bytes: int, device: torch.device) -> Iterator[Sequence[Kept]]:
    """Parts of about so many bytes, as many on every rank."""
    batches: list[list[Kept]] = [[]]
    size = 0
    for one in own:
        size += one.weight.numel() * 4 * (num_names + one.has_main)
        batches[-1].append(one)
        if size >= num_bytes:
            batches.append([])
            size = 0
    most = torch.tensor(len(batches), device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    yield from batches
    yield from [[]] * (int(most) - len(batches))
