"""LoRA on megatron-core's parallel layers: which have an adapter, and its matrices under peft's names.

megatron-core fuses what Hugging Face keeps apart, so a layer may have several pairs of matrices, one for each target:

    q_proj, k_proj, v_proj -> linear_qkv      gate_proj, up_proj -> linear_fc1
    o_proj                 -> linear_proj     down_proj          -> linear_fc2

Function, number of weights and initial values are as with peft on the model in one process, but for one thing: of
targets in one fused layer, dropout takes the same inputs. Experts, routers, gates of shared experts, embedding and head
get no adapter: "all-linear" is attention, dense MLPs and shared experts, and of qwen3_moe, where names of an MLP mean
experts to peft, attention alone.
"""

from __future__ import annotations

import contextlib
import copy
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

from rayhelper import ConfigError
from trainers.backends.megatron.weights import MegatronWeights, Source, block_sources

FIELDS = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora")
MLP_IS_EXPERTS = ("qwen3_moe",)  # where peft takes the names of an MLP of any kind for those of the experts
PREFIX, FILE = "base_model.model.", "adapter_model.safetensors"


@dataclass(frozen=True)
class Piece:
    """Matrices that lie above each other in one parameter: whole under their names, and what this worker has."""

    source: Source
    parameter: Parameter | None  # None: on another stage of the pipeline

    def fill(self, weights: Mapping[str, torch.Tensor], rank: int) -> None:
        if self.parameter is not None:
            for name in self.source.tensors:
                part = weights[name][self.source.part(name, rank)]
                self.source.fill(self.parameter.detach(), name, part)


class MegatronAdapter:
    """The adapter of the ``stages`` of this worker, whose other weights it freezes; a value head stays trained, whole.

    ``settings`` are fields of peft's LoraConfig. Every rank makes one, before gradients and optimizer. Weights are
    float32. A is drawn from ``seed``, the same however the model is cut.

    Raises:
        ConfigError: settings that are not supported here.
    """

    def __init__(
        self, config: Any, stages: Sequence[Any], settings: Mapping[str, Any], *, value_head: bool, seed: int
    ) -> None:
        from megatron.core import parallel_state

        self.settings, self.value_head = dict(settings), value_head
        self.rank: int = self.settings.get("r", 8)
        root = math.sqrt(self.rank) if self.settings.get("use_rslora") else self.rank
        self.scaling: float = self.settings.get("lora_alpha", 8) / root
        self._tensor = parallel_state.get_tensor_model_parallel_group()
        self._pipeline = parallel_state.get_pipeline_model_parallel_group()
        self._device = next(stages[0].parameters()).device
        self._config = config
        self.targets = chosen_targets(config, self.settings, num_stages=self._pipeline.size())
        self._low_ranks: dict[Parameter, Any] = {}  # by the weight beside which they are
        for stage in stages:
            freeze(stage)
        own = {layer.layer_number: layer for stage in stages for layer in stage.decoder.layers}
        self._blocks: list[list[Piece]] = [
            [piece for source in sources for piece in self._added(source, own.get(number))]
            for number, sources in enumerate(_linear_layers(config, self._tensor.size()), start=1)
        ]
        if value_head:
            shape = {f"{PREFIX}score.weight": (1, config.hidden_size)}
            values = getattr(stages[-1], "values", None)
            self._blocks.append([Piece(Source((), shape), None if values is None else values.weight)])
        self._stages = self._found_stages()
        for piece in self._pieces():
            _draw(piece, self._tensor.rank(), seed)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The matrices A and B, whole, one layer's at a time, the scaling in B; every rank, to the end."""
        for name, weight in self.state():
            if ".lora_" in name:
                yield name, weight * self.scaling if ".lora_B." in name else weight

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
        for name in piece.source.tensors:
            piece.source.fill(own, name, wholes[name][piece.source.part(name, self._tensor.rank())])
        return own

    @property
    def changed(self) -> set[str]:
        """Names, in a checkpoint, of the weights that training makes others of."""
        return self.targets | ({"score.weight"} if self.value_head else set())

    def merged(self, parameter: Parameter) -> torch.Tensor:
        """This worker's part of a weight with the adapter added, which leaves the weight as it is."""
        weight = parameter.detach()
        if parameter not in self._low_ranks:
            return weight
        delta: torch.Tensor = self._low_ranks[parameter].delta()
        return (weight.float() + delta).to(weight.dtype)

    def merging(self, weights: MegatronWeights) -> MegatronWeights:
        """Reads and writes the model as ``weights`` does, but with the adapter merged."""
        merged = copy.copy(weights)
        merged.named_weights = partial(weights.named_weights, self.merged)  # type: ignore[method-assign]
        return merged

    @contextlib.contextmanager
    def off(self, is_off: bool = True) -> Iterator[None]:
        """Inside, the model is what it was before the adapter was added."""
        for low_rank in self._low_ranks.values():
            low_rank.is_on = not is_off
        try:
            yield
        finally:
            for low_rank in self._low_ranks.values():
                low_rank.is_on = True

    def save(self, folder: Path) -> None:
        """Writes the adapter as peft does. Every rank calls it; rank 0 writes."""
        from peft import LoraConfig
        from safetensors.torch import save_file

        weights = {name: weight.cpu() for name, weight in self.state()}
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            LoraConfig(
                **self.settings | {"target_modules": self._shortest_targets()},
                task_type="SEQ_CLS" if self.value_head else "CAUSAL_LM",
                modules_to_save=["score"] if self.value_head else None,
                base_model_name_or_path=self._config.name_or_path,
                inference_mode=True,
            ).save_pretrained(str(folder))
            save_file(weights, folder / FILE, metadata={"format": "pt"})
        dist.barrier()

    def load(self, folder: Path) -> None:
        """Puts back, in place, what ``save`` or peft wrote. Every rank.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it has other weights than this model's adapter.
        """
        from safetensors.torch import load_file

        if not (folder / FILE).is_file():
            raise FileNotFoundError(f"{folder} holds no {FILE}, so it is no checkpoint of a LoRA run")
        given = load_file(folder / FILE)
        own = {name: shape for piece in self._pieces() for name, shape in piece.source.tensors.items()}
        found = {name: tuple(weight.shape) for name, weight in given.items()}
        if odd := sorted(name for name in own.keys() | found.keys() if own.get(name) != found.get(name)):
            raise ValueError(f"the adapter in {folder} has other weights than this model's, among them {odd[:3]}")
        for piece in self._pieces():
            piece.fill(given, self._tensor.rank())

    def _pieces(self) -> Iterator[Piece]:
        for block in self._blocks:
            yield from block

    def _added(self, source: Source, layer: Any) -> Iterator[Piece]:
        """What the adapter has beside the part ``source`` of a ``layer`` (None: one of another stage)."""
        targets = [name for name in source.tensors if name in self.targets]
        if not targets:
            return
        low_rank = None if layer is None else self._attached(source, targets, layer)
        names = [PREFIX + name.removesuffix(".weight") for name in targets]
        rows, columns = zip(*(source.tensors[name] for name in targets), strict=True)
        a = {f"{name}.lora_A.weight": (self.rank, width) for name, width in zip(names, columns, strict=True)}
        b = {f"{name}.lora_B.weight": (height, self.rank) for name, height in zip(names, rows, strict=True)}
        for key, tensors, dim in (("a", a, 1), ("b", b, 0)):
            cut = dim if dim == source.dim else None
            yield Piece(Source((), tensors, cut, source.num_ranks), getattr(low_rank, key, None))

    def _attached(self, source: Source, targets: list[str], layer: Any) -> Any:
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        from trainers.backends.megatron.low_rank import LowRank, attach

        name = source.parameters[0].removesuffix(".weight")
        base = layer.get_submodule(name)
        if not isinstance(base, ColumnParallelLinear | RowParallelLinear) or base.explicit_expert_comm:
            raise ConfigError(
                f"no adapter can be added to {name}, a {type(base).__name__}: backend: megatron adds them to "
                "megatron-core's own layers, and needs moe_shared_expert_overlap: false"
            )
        dropout = self.settings.get("lora_dropout", 0.0)
        low_rank = LowRank(base, source, targets, rank=self.rank, scaling=self.scaling, dropout=dropout)
        attach(base, low_rank)
        self._low_ranks[base.weight] = low_rank
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
        """The whole matrices of a block: broadcast over the pipeline, then gathered over tensor-parallel workers."""
        if not block:
            return
        sizes = [math.prod(piece.source.shape) for piece in block]
        own = torch.zeros(sum(sizes), device=self._device)
        for piece, place in zip(block, own.split(sizes), strict=True):
            if piece.parameter is not None:
                place.view(piece.source.shape).copy_(of(piece.parameter))
        if self._pipeline.size() > 1:
            dist.broadcast(own, dist.get_global_rank(self._pipeline, stage), group=self._pipeline)
        gathered = own
        if self._tensor.size() > 1:
            gathered = own.new_empty(self._tensor.size() * len(own))
            dist.all_gather_into_tensor(gathered, own, group=self._tensor)
        shards = [one.split(sizes) for one in gathered.view(self._tensor.size(), -1)]
        for k, piece in enumerate(block):
            yield from piece.source.join([shard[k].view(piece.source.shape) for shard in shards])

    def _shortest_targets(self) -> list[str]:
        """As peft writes them: last parts of names where these mean no other layer."""
        others = (_adaptable(self._config) | _in_experts(self._config)) - self.targets
        shared = {_last(name) for name in others}
        found = {name.removesuffix(".weight") if _last(name) in shared else _last(name) for name in self.targets}
        return sorted(found)


def chosen_targets(config: Any, settings: Mapping[str, Any], *, num_stages: int = 1) -> set[str]:
    """Names, in a checkpoint, of the weights that get an adapter by ``settings``, fields of peft's LoraConfig.

    Needs neither weights nor megatron-core. ``num_stages``: of the pipeline, each of which must have some.

    Raises:
        ConfigError: a field, or a layer, that can have no adapter here.
    """
    if unknown := sorted(settings.keys() - set(FIELDS)):
        raise ConfigError(f"lora: backend: megatron does not know {unknown}; of peft's fields it has {list(FIELDS)}")
    known, in_experts = _adaptable(config), _in_experts(config)
    wanted = settings.get("target_modules", "all-linear")
    if wanted in ("all-linear", ["all-linear"]):
        return known
    if isinstance(wanted, str):
        raise ConfigError(f"lora: target_modules is {wanted!r}; write all-linear or a list of names, not a pattern")
    lasts = sorted({_last(name) for name in known})
    chosen: set[str] = set()
    for target in wanted:
        meant = {name for name in known if _means(target, name)}
        if any(_means(target, name) for name in in_experts):
            longer = sorted({".".join(name.split(".")[-3:-1]) for name in meant})
            raise ConfigError(
                f"lora: target_modules has {target!r}, which experts have too, and they get no adapter with backend: "
                f"megatron. Write {longer or 'all-linear, or names of the attention'}, which are not in experts."
            )
        if not meant:
            raise ConfigError(
                f"lora: target_modules has {target!r}, but with backend: megatron only these layers of a "
                f"{config.model_type} model can have an adapter: {', '.join(lasts)}"
            )
        chosen |= meant
    layers = [{name for source in layer for name in source.tensors} for layer in _linear_layers(config, 1)]
    if bare := [k for k, names in enumerate(layers) if num_stages > 1 and not names & chosen]:
        raise ConfigError(
            f"lora: target_modules {list(wanted)} leave layers {bare[:3]} without an adapter, but with "
            "pipeline_model_parallel_size every layer must have one: add a layer of the attention"
        )
    return chosen


def freeze(stage: Any) -> None:
    """Ends the training of all weights there are, but for a value head."""
    from trainers.backends.megatron.low_rank import begin_gradients

    stage.requires_grad_(False)
    if getattr(stage, "values", None) is not None:
        stage.values.requires_grad_(True)
    if stage.pre_process:
        begin_gradients(stage.embedding)


def _block(config: Any, block: int, num_ranks: int) -> Any:
    return block_sources(config, block, num_ranks=num_ranks, num_expert_ranks=1, num_padded=0)


def _linear_layers(config: Any, num_ranks: int) -> list[list[Source]]:
    """Of each layer of the model, those of its parts that can have an adapter."""
    blocks = [_block(config, block, num_ranks) for block in range(1, config.num_hidden_layers + 1)]
    attention_only = config.model_type in MLP_IS_EXPERTS
    return [
        [
            source
            for source in block.plain
            if all(name.endswith("_proj.weight") for name in source.tensors)
            and not (attention_only and ".mlp." in source.key)
        ]
        for block in blocks
    ]


def _adaptable(config: Any) -> set[str]:
    """Names of the weights that can have an adapter."""
    return {name for layer in _linear_layers(config, 1) for source in layer for name in source.tensors}


def _in_experts(config: Any) -> set[str]:
    blocks = [_block(config, block, 1) for block in range(1, config.num_hidden_layers + 1)]
    return {name for block in blocks for sources in block.experts for source in sources for name in source.tensors}


def _last(name: str) -> str:
    """q_proj of model.layers.0.self_attn.q_proj.weight."""
    return name.split(".")[-2]


def _means(target: str, name: str) -> bool:
    """Whether peft takes the layer of the weight ``name`` for the target."""
    return f".{name}".endswith(f".{target}.weight")


def _draw(piece: Piece, rank: int, seed: int) -> None:
    """Initial values as peft draws them: A as those of a linear layer, B zero."""
    drawn = {}
    for name, shape in piece.source.tensors.items():
        if ".lora_A." not in name or piece.parameter is None:
            return
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        drawn[name] = torch.nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=generator)
    piece.fill(drawn, rank)
