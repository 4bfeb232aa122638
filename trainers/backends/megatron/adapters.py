"""LoRA on megatron-core's parallel layers: the matrices of an adapter, and their names as peft has them.

megatron-core fuses what Hugging Face keeps apart, so a layer may have several pairs of matrices, one for each target:

    q_proj, k_proj, v_proj -> linear_qkv      gate_proj, up_proj -> linear_fc1
    o_proj                 -> linear_proj     down_proj          -> linear_fc2

Function, number of weights and initial values are as with peft on the model in one process, but for one thing: of
targets in one fused layer, dropout takes the same inputs. Gates of shared experts, embedding and head get no
adapter, but the last two are trained themselves where ``modules_to_save`` names them. "all-linear" is attention, dense
MLPs and shared experts, and of qwen3_moe, where names of an MLP mean experts to peft, attention alone.

Experts get one where they are named (adapter_pieces.py).
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

from rayhelper import ConfigError
from trainers.backends.fresh_weights import adapter_a
from trainers.backends.fsdp.vision.parts import VISUAL
from trainers.backends.megatron.adapter_pieces import Piece, Stack, expert_stacks
from trainers.backends.megatron.adapter_targets import (
    chosen_targets,
    expert_names,
    is_router,
    linear_layers,
    names_in_stacks,
    peft_fields,
    whole_names,
)
from trainers.backends.megatron.tensors.names import SIGHT, THINKER, canonical
from trainers.backends.megatron.tensors.sources import Source
from trainers.backends.megatron.tensors.table import EMBEDDING, HEAD, VALUES, block_sources, tower_blocks
from trainers.backends.megatron.vision.tower import Tower
from trainers.backends.megatron.weights import MegatronWeights
from trainers.backends.model_files import read_adapter

PREFIX, FILE = "base_model.model.", "adapter_model.safetensors"
LAYERS = "model.layers."


class MegatronAdapter:
    """The adapter of the ``stages`` of this worker, whose other weights it freezes; a value head stays trained, whole.

    ``settings`` are fields of peft's LoraConfig. Every rank makes one, before gradients and optimizer. Weights are
    float32. A is drawn from ``seed``, the same however the model is cut. ``tower``: of a model that also sees, whose
    adapter it is written as; it learns itself where ``modules_to_save`` has vit and aligner.

    Raises:
        ConfigError: settings that are not supported here.
    """

    def __init__(
        self,
        config: Any,
        stages: Sequence[Any],
        settings: Mapping[str, Any],
        *,
        value_head: bool,
        num_labels: int = 1,
        seed: int,
        tower: Tower | None = None,
    ) -> None:
        from megatron.core import parallel_state

        self.settings, self.value_head = dict(settings), value_head
        inner = "" if tower is None else tower.inner
        self._inner, self._tower = inner, tower
        self._model = inner or "model."
        self._layers = f"{self._model}layers."  # how their names begin in peft's model
        self.rank: int = self.settings.get("r", 8)
        self._tensor = parallel_state.get_tensor_model_parallel_group()
        self._experts = parallel_state.get_expert_tensor_and_model_parallel_group()
        self._within_experts = parallel_state.get_expert_tensor_parallel_group()
        self._pipeline = parallel_state.get_pipeline_model_parallel_group()
        self._device = next(stages[0].parameters()).device
        self._config = config
        self.targets = chosen_targets(config, self.settings, num_stages=self._pipeline.size())
        self.wholes = whole_names(config, self.settings)
        if value_head:  # which has no head of words, and in peft nothing of its name
            self.wholes -= {HEAD}
        self._has_parts = set(VISUAL) <= set(self.settings.get("modules_to_save") or ())
        if self._has_parts:
            assert tower is not None, "who checks the configuration says that there is none"
            self.wholes |= tower.shapes.keys()
        self._in_tower = (
            []
            if tower is None or self._has_parts
            else tower.adaptable(self.settings.get("target_modules", "all-linear"))
        )
        self._originals: dict[Parameter, torch.Tensor] = {}  # of weights that are trained themselves, on the host
        self._is_grouped = bool(stages[0].config.moe_grouped_gemm)
        self._low_ranks: list[Any] = []
        self._deltas: dict[Parameter, Callable[[], torch.Tensor]] = {}  # by the weight that they change
        self._scalings: dict[str, float] = {}  # of the matrices B
        for stage in stages:
            freeze(stage)
        own = {layer.layer_number: layer for stage in stages for layer in stage.decoder.layers}
        self._blocks: list[list[Piece]] = []  # of pieces that are cut over the same workers
        for number, sources in enumerate(linear_layers(config, self._tensor.size()), start=1):
            layer = own.get(number)
            self._blocks.append([piece for source in sources for piece in self._added(source, layer)])
            if expert_names(config, number) & self.targets:
                self._blocks.append(list(self._added_to_experts(number, layer)))
        self._blocks += self._added_to_tower(stages[0])
        self._blocks += self._trained_whole(stages)
        if value_head:
            shape = {f"{PREFIX}score.weight": (num_labels, config.hidden_size)}
            values = getattr(stages[-1], "values", None)
            self._blocks.append([Piece(Source((), shape), None if values is None else values.weight, self._tensor)])
        self._stages = self._found_stages()
        for piece in self._pieces():
            _draw(piece, seed)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The matrices A and B, whole, one layer's at a time, the scaling in B; every rank, to the end."""
        for name, weight in self.state():
            if ".lora_" in name:
                yield name, weight * self._scalings[name] if ".lora_B." in name else weight

    def state(
        self, of: Callable[[Parameter], torch.Tensor] = torch.Tensor.detach
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """As peft writes them: no scaling in B, and a value head behind them. Every rank, to the end.

        ``of`` says which tensor of a parameter, of its shape, is meant.
        """
        for block, stage in zip(self._blocks, self._stages, strict=True):
            yield from self._gathered(block, stage, of)

    def shard(self, parameter: Parameter, wholes: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """This worker's part of what ``state`` gave, in the shape of the parameter."""
        piece = next(piece for piece in self._pieces() if piece.parameter is parameter)
        own = torch.zeros(parameter.shape, device=parameter.device)
        piece.put(own, wholes)
        return own

    def changes(self, name: str) -> bool:
        """Whether training makes another of the weight of that name in the checkpoint."""
        in_tower = canonical(name).removesuffix(".weight") in self._in_tower
        return in_tower or canonical(name) in self.targets | self.wholes or (self.value_head and name == VALUES)

    def merged(self, parameter: Parameter) -> torch.Tensor:
        """This worker's part of a weight with the adapter added, which leaves the weight as it is."""
        weight = parameter.detach()
        if parameter not in self._deltas:
            return weight
        return (weight.float() + self._deltas[parameter]()).to(weight.dtype)

    def merging(self, weights: MegatronWeights) -> MegatronWeights:
        """Reads and writes the model as ``weights`` does, but with the adapter merged."""
        merged = copy.copy(weights)
        merged.named_weights = partial(weights.named_weights, self.merged)  # type: ignore[method-assign]
        return merged

    @contextlib.contextmanager
    def off(self, is_off: bool = True) -> Iterator[None]:
        """Inside, the model is what it was before the adapter was added."""
        originals = self._originals if is_off else {}
        trained = [weight.detach().clone() for weight in originals]
        _put(originals, originals.values())
        for low_rank in self._low_ranks:
            low_rank.is_on = not is_off
        try:
            yield
        finally:
            _put(originals, trained)
            for low_rank in self._low_ranks:
                low_rank.is_on = True

    def save(self, folder: Path) -> None:
        """Writes the adapter as peft does. Every rank calls it; rank 0 writes."""
        from peft import LoraConfig
        from safetensors.torch import save_file

        weights = {name: weight.cpu() for name, weight in self.state()}
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            fields = self._fields()
            if fields.get("target_parameters"):  # beside which peft has no dropout, and here are routers alone
                fields["lora_dropout"] = 0.0
            whole = ["score"] if self.value_head else []
            whole += [one for one in self.settings.get("modules_to_save") or () if one not in VISUAL]
            whole += list(self._tower.modules) if self._has_parts and self._tower is not None else []
            LoraConfig(
                **self.settings | fields | {"modules_to_save": whole or None},
                task_type="SEQ_CLS" if self.value_head else "CAUSAL_LM",
                base_model_name_or_path=self._config.name_or_path,
                inference_mode=True,
            ).save_pretrained(str(folder))
            save_file(weights, folder / FILE, metadata={"format": "pt"})
        dist.barrier()

    def _in_memory(self, name: str) -> str:
        """The name of a layer, or its end, of the embedding, the head or the tower, in transformers' model."""
        if name.startswith((HEAD, *SIGHT)):
            return THINKER + name.removeprefix("model.") if self._inner.startswith(THINKER) else name
        return name.replace(LAYERS, self._layers, 1) if name != EMBEDDING else name.replace("model.", self._model, 1)

    def _fields(self) -> dict[str, Any]:
        """Which layers peft takes; of a model that also sees, those of the tower by whole names."""
        found = peft_fields(self._config, self.settings, self.targets)
        if self._layers == LAYERS or not found["target_modules"]:
            return found
        names = [re.escape(self._in_memory(name).removeprefix(self._inner)) for name in found["target_modules"]]
        language = rf"{re.escape(self._inner)}(.*\.)?({'|'.join(names)})"
        both = "|".join([language, *(re.escape(self._in_memory(name)) for name in self._in_tower)])
        return found | {"target_modules": rf"(.*\.)?({both})"}

    def load(self, folder: Path) -> None:
        """Puts back, in place, what ``save`` or peft wrote. Every rank.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it has other weights than this model's adapter.
            ConfigError: it is damaged.
        """
        given = read_adapter(folder / FILE)
        own = {name: shape for piece in self._pieces() for name, shape in piece.source.tensors.items()}
        found = {name: tuple(weight.shape) for name, weight in given.items()}
        if odd := sorted(name for name in own.keys() | found.keys() if own.get(name) != found.get(name)):
            raise ValueError(f"the adapter in {folder} has other weights than this model, among them {odd[:3]}")
        for piece in self._pieces():
            piece.fill(given)

    def _pieces(self) -> Iterator[Piece]:
        for block in self._blocks:
            yield from block

    def _added(self, source: Source, layer: Any) -> Iterator[Piece]:
        """What the adapter has beside the part ``source`` of a ``layer`` (None: one of another stage)."""
        targets = [name for name in source.tensors if name in self.targets]
        if not targets:
            return
        low_rank = None if layer is None else self._attached(source, targets, layer)
        names = [PREFIX + self._in_memory(name.removesuffix(".weight")) for name in targets]
        rows, columns = zip(*(source.tensors[name] for name in targets), strict=True)
        a = {f"{name}.lora_A.weight": (self.rank, width) for name, width in zip(names, columns, strict=True)}
        b = {f"{name}.lora_B.weight": (height, self.rank) for name, height in zip(names, rows, strict=True)}
        self._scalings |= dict.fromkeys(b, self._scaling())
        for key, tensors, dim in (("a", a, 1), ("b", b, 0)):
            cut = dim if dim == source.dim else None
            sections = {}
            if cut == 0:
                given = zip(tensors, targets, strict=True)
                sections = {name: source.sections[target] for name, target in given if target in source.sections}
            stacked = Source((), tensors, cut, source.num_ranks, sections=sections)
            yield Piece(stacked, getattr(low_rank, key, None), self._tensor)

    def _added_to_tower(self, first: Any) -> Iterator[list[Piece]]:
        """What the adapter has beside each linear layer of those parts of the tower that are not frozen."""
        from trainers.backends.megatron.low_rank import attach_to_linear

        shapes = {} if self._tower is None else self._tower.shapes
        for name in self._in_tower:
            low_rank = None
            if first.pre_process:
                base = first.get_submodule(name.removeprefix("model."))
                settings: dict[str, Any] = {
                    "scaling": self._scaling(),
                    "dropout": self.settings.get("lora_dropout", 0.0),
                }
                low_rank = self._kept(base, attach_to_linear(base, self.rank, **settings))
            height, width = shapes[f"{name}.weight"]
            named = PREFIX + self._in_memory(name)
            a, b = {f"{named}.lora_A.weight": (self.rank, width)}, {f"{named}.lora_B.weight": (height, self.rank)}
            self._scalings |= dict.fromkeys(b, self._scaling())
            own = ((a, getattr(low_rank, "a", None)), (b, getattr(low_rank, "b", None)))
            yield [Piece(Source((), tensors), weight, self._tensor) for tensors, weight in own]

    def _trained_whole(self, stages: Sequence[Any]) -> Iterator[list[Piece]]:
        """What is trained itself: embedding, head, and the layers of the tower; each learns from now on."""
        own = {name: weight for stage in stages for name, weight in stage.named_parameters()}
        cut = {"num_ranks": self._tensor.size(), "num_expert_ranks": 1}
        cut["num_padded"] = stages[0].vocab_size - self._config.vocab_size
        blocks = [block_sources(self._config, block, **cut) for block in (0, self._config.num_hidden_layers + 1)]
        if self._has_parts and self._tower is not None:
            blocks += tower_blocks(self._tower.shapes, self._tower.shapes)
        for block in blocks:
            pieces = []
            for source in (source for source in block.plain if source.key in self.wholes):
                weight = own.get(source.parameters[0])
                if weight is not None:
                    weight.requires_grad_(True)
                    self._originals[weight] = weight.detach().to("cpu", copy=True)
                tensors = {PREFIX + self._in_memory(name): shape for name, shape in source.tensors.items()}
                pieces.append(Piece(replace(source, tensors=tensors), weight, self._tensor))
            yield pieces

    def _added_to_experts(self, number: int, layer: Any) -> Iterator[Piece]:
        """What the adapter has beside the experts of the layer of that number."""
        cuts = self._within_experts.size()
        over = (self._experts.size() // cuts, cuts)
        base = f"{PREFIX}{self._layers}{number - 1}.mlp.experts"
        experts = None if layer is None else layer.mlp.experts
        for linear, name in (("linear_fc1", f"{base}.base_layer"), ("linear_fc2", base)):
            times = 2 if linear == "linear_fc1" and names_in_stacks(self._config, self.settings) else 1
            rank, scaling = times * self.rank, self._scaling(times)
            stacks = expert_stacks(self._config, linear, name, rank, over)
            self._scalings[stacks[1].name] = scaling
            low_rank = None if experts is None else self._attached_to_experts(experts, linear, stacks, scaling)
            for key, stack in zip("ab", stacks, strict=True):
                yield Piece(stack, getattr(low_rank, key, None), self._experts)

    def _attached_to_experts(self, experts: Any, linear: str, stacks: tuple[Stack, Stack], scaling: float) -> Any:
        from trainers.backends.megatron.low_rank import ExpertsLowRank, attach_to_experts

        low_rank = ExpertsLowRank(
            experts, linear, stacks[0].shape, stacks[1].shape, scaling=scaling, group=self._within_experts
        )
        attach_to_experts(experts, linear, low_rank)
        self._low_ranks.append(low_rank)
        if self._is_grouped:
            weight = experts.weight1 if linear == "linear_fc1" else experts.weight2
            self._deltas[weight] = partial(low_rank.delta_of_all, weight.shape)
        else:
            bases = [getattr(expert, linear) for expert in experts.local_experts]
            self._deltas |= {part.weight: partial(low_rank.delta, k) for k, part in enumerate(bases)}
        return low_rank

    def _scaling(self, times: int = 1) -> float:
        """Of a pair of matrices of so many times the rank, and alpha."""
        rank = times * self.rank
        alpha: float = times * self.settings.get("lora_alpha", 8)
        return alpha / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)

    def _attached(self, source: Source, targets: list[str], layer: Any) -> Any:
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        from trainers.backends.megatron.low_rank import LowRank, attach, attach_to_router

        name = source.parameters[0].removesuffix(".weight")
        base = layer.get_submodule(name)
        dropout = self.settings.get("lora_dropout", 0.0)
        if is_router(source.key):
            return self._kept(base, attach_to_router(base, self.rank, scaling=self._scaling(), dropout=dropout))
        if not isinstance(base, ColumnParallelLinear | RowParallelLinear) or base.explicit_expert_comm:
            raise ConfigError(
                f"no adapter can be added to {name}, a {type(base).__name__}: backend: megatron adds adapters only "
                "to megatron-core's own layers. Set moe_shared_expert_overlap: false"
            )
        cut = LowRank(base, source, targets, rank=self.rank, scaling=self._scaling(), dropout=dropout)
        attach(base, cut)
        return self._kept(base, cut)

    def _kept(self, base: Any, low_rank: Any) -> Any:
        self._low_ranks.append(low_rank)
        self._deltas[base.weight] = low_rank.delta
        return low_rank

    def _found_stages(self) -> list[int]:
        """Of each block, which stage of the pipeline has it; every worker must have the table of all blocks."""
        here = [any(piece.parameter is not None for piece in block) for block in self._blocks]
        stages = torch.where(torch.tensor(here), self._pipeline.rank(), -1).to(self._device)
        dist.all_reduce(stages, dist.ReduceOp.MAX, group=self._pipeline)
        found: list[int] = stages.tolist()
        return found

    @torch.no_grad()
    def _gathered(
        self, block: Sequence[Piece], stage: int, of: Callable[[Parameter], torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole matrices of a block: broadcast over the pipeline, then gathered over those that it is cut over."""
        if not block:
            return
        group = block[0].group
        sizes = [math.prod(piece.source.shape) for piece in block]
        own = torch.zeros(sum(sizes), device=self._device)
        for piece, place in zip(block, own.split(sizes), strict=True):
            if piece.parameter is not None:
                place.view(piece.source.shape).copy_(of(piece.parameter))
        if self._pipeline.size() > 1:
            dist.broadcast(own, dist.get_global_rank(self._pipeline, stage), group=self._pipeline)
        gathered = own
        if group.size() > 1:
            gathered = own.new_empty(group.size() * len(own))
            dist.all_gather_into_tensor(gathered, own, group=group)
        shards = [one.split(sizes) for one in gathered.view(group.size(), -1)]
        for k, piece in enumerate(block):
            yield from piece.source.join([shard[k].view(piece.source.shape) for shard in shards])


def freeze(stage: Any) -> None:
    """Ends the training of all weights there are, but for a value head."""
    from trainers.backends.megatron.low_rank import begin_gradients

    stage.requires_grad_(False)
    if getattr(stage, "values", None) is not None:
        stage.values.requires_grad_(True)
    if stage.pre_process:
        begin_gradients(stage.embedding)


@torch.no_grad()
def _put(weights: Iterable[Parameter], values: Iterable[torch.Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)


def _draw(piece: Piece, seed: int) -> None:
    """Initial values: A drawn, B zero."""
    drawn = {}
    for name, shape in piece.source.tensors.items():
        if ".lora_A." not in name or piece.parameter is None:
            return
        drawn[name] = adapter_a(name, shape, seed)
    piece.fill(drawn)
