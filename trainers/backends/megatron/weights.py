"""A megatron-core model's weights under the names of a Hugging Face checkpoint: read, given, streamed, written.

    checkpoint --load--> slices that this rank has       named tensors --load_named--> the same slices
    slices of all ranks --named_weights--> whole tensors, one at a time --export--> checkpoint

Which parameter is made of which tensors stands in one table (tensors/table.py). It follows from the configuration alone
and is the same on every rank, so ranks agree on names, shapes and order without asking each other. How a model is built
is not decided here: a parameter that the table does not know, or lacks, is refused.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.nn import Parameter

from trainers.backends.megatron.architectures import SEEING, STACKED
from trainers.backends.megatron.tensors import names as called
from trainers.backends.megatron.tensors.kept import FILES, KeptTensors
from trainers.backends.megatron.tensors.names import BESIDE, SIGHT, canonical
from trainers.backends.megatron.tensors.sources import Block, Source
from trainers.backends.megatron.tensors.stacks import STACK, apart, is_transposed, stack_shapes, stacking, unstacked
from trainers.backends.megatron.tensors.table import (
    EMBEDDING,
    GROUPED,
    HEAD,
    VALUES,
    block_sources,
    check,
    tower_blocks,
)
from trainers.backends.megatron.vision.tower import Tower
from trainers.backends.model_files import model_folder, safetensors_files

GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Cut:
    """How parameters lie over the ranks of ``group``: experts over some, each of them cut over ``num_ranks``."""

    group: dist.ProcessGroup
    rank: int
    num_ranks: int
    expert_rank: int = 0
    num_expert_ranks: int = 1


@dataclass(frozen=True)
class Slot:
    """Where a source lies on this rank."""

    source: Source
    rank: int  # among those that the source is cut over
    parameter: Parameter
    view: Callable[[Tensor], Tensor]  # from a tensor of the parameter's shape to one of the source's

    def fill(self, name: str, part: Tensor, share: float | None = None) -> None:
        self.source.fill(self.view(self.parameter.detach()), name, part, share)


@dataclass(frozen=True)
class Bucket:
    """What is gathered at once: sources of equal shapes on each rank that has other experts, once if there are none."""

    stage: int  # of the pipeline, that has them
    cut: Cut
    sources: Sequence[Sequence[Source]]

    @property
    def own(self) -> Sequence[Source]:
        """Those of this rank."""
        return self.sources[self.cut.expert_rank]


class MegatronWeights:
    """The weights of the ``chunks`` of this rank: several with a virtual pipeline; inside wrappers or not.

    Every rank makes one once ``parallel_state`` is initialised, which costs a small all-reduce over the pipeline. It
    holds the parameters, so that what wraps the model later changes nothing. ``head``: of a language model, the linear
    layer of a sequence classifier (``value``) with ``num_labels`` labels, or none (``embedding``). ``bucket_bytes``: of
    a layer's experts at most about so many bytes are gathered at a time. ``whole``: the configuration of a model that
    also sees, of whose language model ``config`` is; ``tower``: its vision tower.

    A checkpoint of such a model may have names that begin with ``model.language_model.``, and is written so again.
    Other tensors than those of the chunks, and what is frozen of the tower, stay as they are (tensors/kept.py).

    Raises:
        ValueError: a model type that is not supported, more tensor-parallel ranks than it can be cut into, or a model
            whose parameters are not those of the configuration.
    """

    def __init__(
        self,
        config: Any,
        chunks: Sequence[Any],
        *,
        head: Literal["lm", "value", "embedding"] = "lm",
        num_labels: int = 1,
        bucket_bytes: int = 1 << 30,
        whole: Any = None,
        tower: Tower | None = None,
    ) -> None:
        from megatron.core import parallel_state as state

        self.config, self.head, self.num_labels = config, head, num_labels
        self.whole = config if whole is None else whole
        self._is_tied = head == "lm" and config.tie_word_embeddings
        self._pipeline: dist.ProcessGroup = state.get_pipeline_model_parallel_group()
        tensor_group = state.get_tensor_model_parallel_group()
        self._plain = Cut(tensor_group, tensor_group.rank(), tensor_group.size())
        self._experts = Cut(
            state.get_expert_tensor_and_model_parallel_group(),
            state.get_expert_tensor_parallel_rank(),
            state.get_expert_tensor_parallel_world_size(),
            state.get_expert_model_parallel_rank(),
            state.get_expert_model_parallel_world_size(),
        )
        cut = self._experts
        assert cut.group.rank() == cut.expert_rank * cut.num_ranks + cut.rank, "ranks of an expert are neighbours"
        check(config, self._plain.num_ranks)
        models = [_unwrapped(chunk) for chunk in chunks]
        num_padded = models[0].vocab_size - config.vocab_size
        if num_padded < 0:
            raise ValueError(f"the model's vocabulary has {models[0].vocab_size} words, fewer than {config.vocab_size}")
        self._blocks = [
            block_sources(
                config,
                block,
                num_ranks=self._plain.num_ranks,
                num_expert_ranks=cut.num_ranks,
                num_padded=num_padded,
                head=head,
                num_labels=num_labels,
            )
            for block in range(config.num_hidden_layers + 2)
        ]
        self._end, self._frozen = len(self._blocks) - 1, Block([])
        if tower is not None:
            self._blocks += tower_blocks(tower.shapes, tower.learned)
            frozen = tower_blocks(tower.shapes, tower.shapes.keys() - tower.learned)
            self._frozen = Block([source for block in frozen for source in block.plain])
        self.shapes: dict[str, tuple[int, ...]] = {
            name: shape
            for block in self._blocks
            for sources in (block.plain, *block.experts)
            for source in sources
            for name, shape in source.tensors.items()
        }
        still = {name: shape for source in self._frozen.plain for name, shape in source.tensors.items()}
        self._all_shapes = self.shapes | still
        self.generation: str | None = None  # how to generate, as the model that was loaded says
        self.kept: KeptTensors | None = None  # what it has beside
        self.beginnings: dict[str, str] = {}  # of its names (tensors/names.py)
        self.is_stacked = False
        self.transposed: set[str] = set()  # stacks whose rows and columns are exchanged
        self._slots: list[Slot] = []
        own_blocks = [block for model in models for block in self._bind(model)]
        self._by_key = {slot.source.key: slot for slot in self._slots}
        self._buckets = list(self._bucketed(own_blocks, bucket_bytes))

    def load(self, model: str | Path) -> None:
        """Reads the weights of a folder or hub name; of each tensor only the part that this rank has.

        The values of a language model, which has none, stay as they are.

        Raises:
            FileNotFoundError: there are no safetensors files.
            ValueError: a tensor is missing or has another shape.
        """
        folder = model_folder(model, GENERATION, *FILES)
        if (folder / GENERATION).is_file():
            self.generation = (folder / GENERATION).read_text(encoding="utf-8")
        with contextlib.ExitStack() as files, torch.no_grad():
            tensors: dict[str, Any] = {}
            found = safetensors_files(folder)
            is_stacked, beginnings = False, dict[str, str]()
            names, transposed = set(), set()
            for file in found:
                opened = files.enter_context(safe_open(file, framework="pt"))
                for outer in opened.keys():  # noqa: SIM118
                    name = canonical(outer)
                    if name in self._all_shapes:
                        tensors[name] = opened.get_slice(outer)
                    elif STACK.fullmatch(name):
                        stack = opened.get_slice(outer)
                        sizes = (self.config.hidden_size, getattr(self.config, "moe_intermediate_size", 0))
                        if is_other := is_transposed(name, stack, *sizes):
                            transposed.add(outer)
                        tensors |= unstacked(name, stack, is_transposed=is_other)
                        is_stacked = True
                    names |= {outer} if name in self.shapes else set()
                    if (beginning := called.beginning_of(outer)) is not None:
                        beginnings[called.BEGINNINGS[beginning]] = beginning
            if self.kept is None:  # a checkpoint of this run, read later, has the same
                self.beginnings, self.is_stacked, self.transposed = beginnings, is_stacked, transposed
                self.kept = KeptTensors.of(folder, found, BESIDE if self.head == "lm" else (), without=names)
            self._check_all_given([*tensors, VALUES], self._all_shapes)
            for name, tensor in tensors.items():
                self._check_shape(name, tuple(tensor.get_shape()))
            for slot in self._slots:
                for name in slot.source.tensors.keys() & tensors.keys():
                    slot.fill(name, slot.source.part(name, tensors[name], slot.rank))

    def load_named(self, named: Iterable[tuple[str, Tensor]], share: float | None = None) -> None:
        """Copies whole tensors in place, the same on every rank, in any order; a tied head may be among them.

        A policy whose vision tower is frozen gives none, and its tower stays as it is here too.

        ``share``: each weight moves only that part of the way from what it is to what is given.

        Raises:
            ValueError: a name or shape the model does not have, or a weight that was not given.
        """
        places: dict[str, list[Slot]] = {name: [] for name in self._all_shapes}
        for slot in self._slots:
            for name in slot.source.tensors:
                places[name].append(slot)
        given: set[str] = set()
        with torch.no_grad():
            for outer, weight in apart(named):
                name = canonical(outer)
                if name == HEAD and self._is_tied:
                    name = EMBEDDING
                self._check_shape(name, tuple(weight.shape))
                if name in given:
                    continue
                given.add(name)
                for slot in places[name]:
                    slot.fill(name, slot.source.part(name, weight, slot.rank), share)
        self._check_all_given(given, [name for name in self.shapes if not name.startswith(SIGHT)])

    def named_weights(self, of: Callable[[Parameter], Tensor] = Tensor.detach) -> Iterator[tuple[str, Tensor]]:
        """Every whole tensor under its name in a checkpoint, on every rank, one at a time; a tied head once.

        Every rank iterates to the end. ``of`` says which tensor of a parameter, of its shape, is meant: the value, a
        gradient, a moment; all are of one dtype. What comes has memory of its own. A layer costs one broadcast over the
        pipeline and one all-gather over tensor-parallel ranks; its experts cost the same once more over the ranks that
        have them, for each ``bucket_bytes`` of them. Over a single rank nothing is sent.
        """
        first = of(self._slots[0].parameter)
        for bucket in self._buckets:
            for name, weight in self._gathered(bucket, of, first.dtype, first.device):
                yield self.outer(name), weight

    def as_in_checkpoints(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The ``named_weights`` under names that models of transformers are given: stacks where they know no experts.

        All tensors of an expert's layer are among them, or none.
        """
        if self.config.model_type not in STACKED:
            return weights
        shapes = {self.outer(name): shape for name, shape in self.shapes.items()}
        return stacking(weights, stack_shapes(shapes))

    def outer(self, name: str) -> str:
        """The name in the checkpoint that was loaded."""
        return called.outer(name, self.beginnings)

    @property
    def width(self) -> int:
        """Numbers that the head gives for each target, of a model that gives no words."""
        return int(self.config.hidden_size) if self.head == "embedding" else self.num_labels

    def num_active(self) -> float:
        """Parameters that a token goes through: of a mixture's experts those that it is sent to; no vision tower."""
        sizes = {name: math.prod(shape) for name, shape in self.shapes.items() if not name.startswith(SIGHT)}
        of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
        if not of_experts:
            return sum(sizes.values())
        share: float = self.config.num_experts_per_tok / self.config.num_experts
        return sum(sizes.values()) - of_experts * (1 - share)

    def export(self, folder: Path, *, dtype: torch.dtype, max_file_bytes: int = 5 * 10**9) -> None:
        """Writes a Hugging Face folder, weights in ``dtype``; every rank calls it, and rank 0 writes.

        A language model keeps the ``generation_config.json`` of the one that was loaded: which tokens end a completion.

        It has the weights of one file in its memory. Of those of an earlier export nothing is left in the folder, which
        is complete when this returns, on any rank.
        """
        from safetensors.torch import save_file

        kept = self.kept or KeptTensors()
        files = self._planned_files(dtype, max_file_bytes)
        is_writer = dist.get_rank() == 0
        if is_writer:
            self._begin_folder(folder, dtype, files)
            kept.copy_files(folder)
        weights = self.named_weights()
        if self.is_stacked:
            weights = stacking(weights, self._written_shapes(), self.transposed)
        for file, names in files.items():
            in_file = {}
            for name in names:
                if name in kept.files:
                    if is_writer:
                        in_file[name] = kept.read(name)
                    continue
                given, weight = next(weights)
                assert given == name, "weights arrive in the planned order"
                if is_writer:
                    in_file[name] = weight.to("cpu", dtype)
            if is_writer:
                save_file(in_file, folder / file, metadata={"format": "pt"})
        dist.barrier()

    def _bind(self, model: Any) -> Iterator[int]:
        """Finds the parameters of one chunk in the table; its blocks."""
        tied = model.share_embeddings_and_output_weights
        if tied != self._is_tied:
            raise ValueError(
                f"the checkpoint has tie_word_embeddings={self.config.tie_word_embeddings}, but the model was built "
                f"with share_embeddings_and_output_weights={tied}: make them equal"
            )
        parameters = dict(model.named_parameters())
        unknown = set(parameters)
        prefixes = {layer.layer_number: f"decoder.layers.{k}." for k, layer in enumerate(model.decoder.layers)}
        if model.pre_process:
            prefixes |= dict.fromkeys((0, *range(self._end + 1, len(self._blocks))), "")
            for slot, name in self._slots_of(self._frozen, "", parameters):
                self._slots.append(slot)
                unknown.discard(name)
        if model.post_process:
            prefixes[self._end] = ""
        for block, prefix in prefixes.items():
            for slot, name in self._slots_of(self._blocks[block], prefix, parameters):
                self._slots.append(slot)
                unknown.discard(name)
            yield block
        if tied and model.post_process and not model.pre_process:  # a copy of what another stage of the pipeline has
            copied = replace(self._blocks[0].plain[0], parameters=("output_layer.weight",))
            self._slots.append(_slot(copied, copied.parameters[0], parameters, self._plain))
            unknown.discard(copied.parameters[0])
        if unknown:
            raise ValueError(
                f"{len(unknown)} parameters belong to no tensor of this {self.config.model_type} checkpoint, among "
                f"them {sorted(unknown)[:3]}: was the model built from another configuration?"
            )

    def _slots_of(self, block: Block, prefix: str, parameters: Mapping[str, Parameter]) -> Iterator[tuple[Slot, str]]:
        """The slots of a block of this rank, and the names of their parameters."""
        own = [(source, self._plain, 0) for source in block.plain]
        num_local = len(block.experts) // self._experts.num_expert_ranks
        for local in range(num_local):
            sources = block.experts[self._experts.expert_rank * num_local + local]
            own += [(source, self._experts, local) for source in sources]
        for source, cut, local in own:
            names = [prefix + name.format(local) for name in source.parameters]
            name = next((name for name in names if name in parameters), None)
            if name is None:
                raise ValueError(
                    f"{source.key} of the checkpoint has no place in the model: there is no {' and no '.join(names)}"
                )
            yield _slot(source, name, parameters, cut, local, num_local), name

    def _bucketed(self, own_blocks: Sequence[int], bucket_bytes: int) -> Iterator[Bucket]:
        parameter = self._slots[0].parameter
        stages = torch.full((len(self._blocks),), -1, device=parameter.device)
        stages[list(own_blocks)] = self._pipeline.rank()
        dist.all_reduce(stages, dist.ReduceOp.MAX, group=self._pipeline)
        for block, stage in zip(self._blocks, stages.tolist(), strict=True):
            if stage < 0:
                raise ValueError(f"no stage of the pipeline has the layer of {block.plain[0].key}")
            yield Bucket(stage, self._plain, [block.plain])
            if not block.experts:
                continue
            num_local = len(block.experts) // self._experts.num_expert_ranks
            one_each = sum(math.prod(source.shape) for source in block.experts[0]) * self._experts.group.size()
            num_at_once = max(1, bucket_bytes // (one_each * parameter.element_size()))
            for start in range(0, num_local, num_at_once):
                batches = [
                    block.experts[first + start : first + min(start + num_at_once, num_local)]
                    for first in range(0, len(block.experts), num_local)
                ]
                flat = [[source for sources in batch for source in sources] for batch in batches]
                yield Bucket(stage, self._experts, flat)

    def _gathered(
        self, bucket: Bucket, of: Callable[[Parameter], Tensor], dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[str, Tensor]]:
        """Packs this rank's shards and gathers those of all; over the pipeline goes a shard and not the whole."""
        sizes = [math.prod(source.shape) for source in bucket.own]
        packed = torch.empty(sum(sizes), dtype=dtype, device=device)
        if self._pipeline.rank() == bucket.stage:
            slots = [self._by_key[source.key] for source in bucket.own]
            values = {parameter: of(parameter).detach() for parameter in {slot.parameter for slot in slots}}
            for slot, place in zip(slots, packed.split(sizes), strict=True):
                shard = slot.view(values[slot.parameter])
                assert shard.dtype == dtype, f"{slot.source.key} is {shard.dtype}, others {dtype}: cast the model"
                place.view(slot.source.shape).copy_(shard)
        if self._pipeline.size() > 1:
            dist.broadcast(packed, dist.get_global_rank(self._pipeline, bucket.stage), group=self._pipeline)
        gathered = packed
        if bucket.cut.group.size() > 1 and any(source.dim is not None for source in bucket.own):
            gathered = packed.new_empty(bucket.cut.group.size() * len(packed))
            dist.all_gather_into_tensor(gathered, packed, group=bucket.cut.group)
        by_rank = [shards.split(sizes) for shards in gathered.view(-1, len(packed))]
        for k, sources in enumerate(bucket.sources):
            ranks = by_rank[k * bucket.cut.num_ranks : (k + 1) * bucket.cut.num_ranks]
            for place, source in enumerate(sources):
                yield from source.join([shards[place].view(source.shape) for shards in ranks])

    def _planned_files(self, dtype: torch.dtype, max_bytes: int) -> dict[str, list[str]]:
        """The names of the tensors in each file, in the order in which they come."""
        files: list[list[str]] = [[]]
        size = 0
        for name, num_bytes in self._written_bytes(dtype).items():
            if files[-1] and size + num_bytes > max_bytes:
                files.append([])
                size = 0
            files[-1].append(name)
            size += num_bytes
        if len(files) == 1:
            return {"model.safetensors": files[0]}
        return {f"model-{k:05d}-of-{len(files):05d}.safetensors": names for k, names in enumerate(files, start=1)}

    def _written_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of what comes from the workers, under its names in the checkpoint and in the order in which it comes."""
        names = [
            name
            for bucket in self._buckets
            for sources in bucket.sources
            for source in sources
            for name in source.tensors
        ]
        shapes = {self.outer(name): self.shapes[name] for name in names}
        return stack_shapes(shapes) if self.is_stacked else shapes

    def _written_bytes(self, dtype: torch.dtype) -> dict[str, int]:
        written = {name: math.prod(shape) * dtype.itemsize for name, shape in self._written_shapes().items()}
        return written | (self.kept or KeptTensors()).sizes

    def _begin_folder(self, folder: Path, dtype: torch.dtype, files: Mapping[str, Sequence[str]]) -> None:
        """Removes the weights of another export; writes the configuration and, for several files, the index."""
        from transformers.models.auto import modeling_auto as known

        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("model*.safetensors*"):
            old.unlink()
        config = copy.deepcopy(self.whole)
        if self.head == "lm" and config.model_type in SEEING:
            config.architectures = [known.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[config.model_type]]
        elif self.head == "embedding":
            config.architectures = [known.MODEL_MAPPING_NAMES[config.model_type]]
        elif self.head == "lm":
            config.architectures = [known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
        else:
            seeing = known.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(config.model_type, "")
            made = seeing.replace("ForConditionalGeneration", "ForSequenceClassification")  # as fsdp calls its own
            names = known.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
            config.architectures = [names.get(config.model_type, made)]
            config.num_labels = self.num_labels
            config.get_text_config().pad_token_id = config.pad_token_id  # as it was asked for (read_config)
        config.dtype = dtype
        config.save_pretrained(folder)
        if self.head == "lm" and self.generation is not None:
            (folder / GENERATION).write_text(self.generation, encoding="utf-8")
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(self._written_bytes(dtype).values())},
                "weight_map": {name: file for file, names in files.items() for name in names},
            }
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _check_shape(self, name: str, given: tuple[int, ...]) -> None:
        own = self._all_shapes.get(name)
        if given != own:
            there = f"has {own}" if own else "has no weight of that name"
            raise ValueError(
                f"weight {name!r} {given} does not fit: this {self.config.model_type} model {there}. "
                "Are these the weights of another model?"
            )

    def _check_all_given(self, given: Iterable[str], wanted: Collection[str]) -> None:
        missing = sorted(set(wanted) - set(given))
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(wanted)} weights of the model were not given, among them {missing[:3]}"
            )


def _slot(
    source: Source, name: str, parameters: Mapping[str, Parameter], cut: Cut, local: int = 0, num_local: int = 1
) -> Slot:
    """``local``: which of the rank's ``num_local`` experts the source is, where they share a parameter."""
    parameter = parameters[name]
    view: Callable[[Tensor], Tensor] = _itself
    fits = tuple(parameter.shape) == source.shape
    if name.endswith((GROUPED.format(1), GROUPED.format(2))):
        view = partial(_of_grouped, shape=source.shape, index=local)
        fits = parameter.numel() == num_local * math.prod(source.shape)
    if not fits:
        raise ValueError(
            f"parameter {name} is {tuple(parameter.shape)}, but {' and '.join(source.tensors)} make it {source.shape}: "
            "was the model built from another configuration?"
        )
    return Slot(source, cut.rank, parameter, view)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _of_grouped(tensor: Tensor, *, shape: tuple[int, ...], index: int) -> Tensor:
    """One expert of those that GroupedMLP keeps transposed in one parameter."""
    return tensor.view(-1, *reversed(shape))[index].t()


def _unwrapped(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk
