"""A gated delta-rule layer as megatron-core's layers take it in the place of attention, cut over heads.

    in_proj: queries, keys, values, gates, beta and alpha of this worker's heads
      queries, keys, values -> convolution within documents -> delta rule (beta; alpha makes the decay) -> norm x gate
    out_proj: summed over the workers

Where tokens of a document are spread over workers (context parallelism), those of all are gathered before the
convolution, and each worker goes through whole documents and takes its own tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)

from trainers.backends.megatron.attention import looked_up
from trainers.backends.megatron.delta_rule.kernels import by_documents
from trainers.backends.megatron.delta_rule.mixing import convolved, decay, gated_norm
from trainers.backends.scores.sums import spread


class GatedDeltaNet(MegatronModule):  # type: ignore[misc]
    """``by_head``: rows of ``in_proj`` are sorted by key heads, as Qwen3-Next has them; else queries of all come first,
    as Qwen3.5 has them."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, *, by_head: bool, pg_collection: Any, **kwargs: Any
    ) -> None:
        super().__init__(config)
        self.layer_number, self.by_head = layer_number, by_head
        self.group, self.context = pg_collection.tp, pg_collection.cp if config.context_parallel_size > 1 else None
        size = self.group.size()
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.num_keys, self.num_values = config.linear_num_key_heads // size, config.linear_num_value_heads // size
        keys, values = self.num_keys * self.key_dim, self.num_values * self.value_dim
        self.rows = {"query": keys, "key": keys, "value": values}  # of the convolution
        common: dict[str, Any] = {"config": config, "bias": False, "is_expert": False, "tp_group": self.group}
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            2 * size * (keys + values + self.num_values),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **common,
        )
        self.out_proj = RowParallelLinear(
            size * values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **common,
        )
        device = None if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
        made: dict[str, Any] = {"dtype": config.params_dtype, "device": device}
        width = config.linear_conv_kernel_dim
        self.conv = torch.nn.Parameter(torch.empty(2 * keys + values, 1, width, **made))
        self.log_rate = torch.nn.Parameter(torch.empty(self.num_values, **made))
        self.dt_bias = torch.nn.Parameter(torch.empty(self.num_values, **made))
        for weight in (self.conv, self.log_rate, self.dt_bias):
            tensor_parallel.set_tensor_model_parallel_attributes(weight, True, 0, 1)
        self.log_rate.decays = True  # type: ignore[attr-defined]  # as in transformers: it is neither bias nor norm
        self.norm = torch.nn.Parameter(torch.empty(self.value_dim, **made))
        self.norm.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # its gradient is summed
        modules = config.recompute_modules or () if config.recompute_granularity == "selective" else ()
        self.recomputes = "core_attn" in modules

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """(S, 1, H) to (S, 1, H), where the sequence is spread (S / tensor size, 1, H)."""
        product, _ = self.in_proj(hidden_states)
        if self.recomputes and self.training:
            mixed = tensor_parallel.checkpoint(self.mixed, False, product.squeeze(1), attention_mask)
        else:
            mixed = self.mixed(product.squeeze(1), attention_mask)
        output, _ = self.out_proj(mixed.unsqueeze(1))
        return output, None

    def mixed(self, product_SX: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """(S, heads x V) of what ``in_proj`` gave; ``number`` is what documents were told by."""
        row = looked_up(number).documents.row
        all_SC, gate_SHV = self._divided(product_SX)
        if self.context is not None:
            assert row.order is not None, "the micro-batch was packed for several workers"
            gathered = tensor_parallel.gather_from_sequence_parallel_region(
                all_SC, tensor_parallel_output_grad=True, group=self.context
            )
            all_SC = gathered.index_select(0, row.order)
        qkv_SC, beta_SH, alpha_SH = all_SC.split([sum(self.rows.values()), self.num_values, self.num_values], -1)
        qkv_SC = convolved(qkv_SC, self.conv.squeeze(1), row.positions)
        query, key, value = qkv_SC.split(list(self.rows.values()), -1)
        times = self.num_values // self.num_keys
        query, key = (
            heads.unflatten(-1, (self.num_keys, -1)).repeat_interleave(times, dim=1) for heads in (query, key)
        )
        value = value.unflatten(-1, (self.num_values, -1))
        rate_SH, beta_SH = decay(alpha_SH, self.log_rate, self.dt_bias), beta_SH.sigmoid()
        output_SHV = by_documents(query, key, value, rate_SH, beta_SH, row.lengths, row.starts)
        if row.own is not None:
            output_SHV = output_SHV.index_select(0, row.own)
        weight: torch.Tensor = self.norm
        if self.group.size() > 1 and not self.config.sequence_parallel:
            weight = spread(weight, self.group)
        normed = gated_norm(output_SHV.flatten(0, 1), gate_SHV.flatten(0, 1), weight, self.config.layernorm_epsilon)
        return normed.view(len(gate_SHV), -1)

    def _divided(self, product_SX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(S, C) queries, keys, values, beta and alpha, in this order, and (S, heads, V) gates."""
        sizes = [*self.rows.values(), self.num_values * self.value_dim, self.num_values, self.num_values]
        if not self.by_head:
            *qkv, gate, beta, alpha = product_SX.split(sizes, -1)
        else:
            first, last = product_SX.split([sum(sizes[:4]), sum(sizes[4:])], -1)
            of_heads = [size // self.num_keys for size in sizes]
            parts = first.unflatten(-1, (self.num_keys, -1)).split(of_heads[:4], -1)
            parts += last.unflatten(-1, (self.num_keys, -1)).split(of_heads[4:], -1)
            *qkv, gate, beta, alpha = (part.flatten(1) for part in parts)
        return torch.cat([*qkv, beta, alpha], -1), gate.unflatten(-1, (self.num_values, -1))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Where the weights lie in the whole model: what has rows of several kinds is cut into these."""
        own = {"conv": self.conv, "log_rate": self.log_rate, "dt_bias": self.dt_bias, "norm": self.norm}
        cut = {"conv": 0, "log_rate": 0, "dt_bias": 0}
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        groups = {"tp_group": self.group, "dp_cp_group": metadata["dp_cp_group"]}
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(own, prefix, cut, sharded_offsets, **groups)
        for name in ("in_proj", "out_proj"):
            layer, place = getattr(self, name), f"{prefix}{name}."
            found |= sharded_state_dict_default(layer, place, sharded_offsets, metadata, tp_group=self.group)
        of_values = {"gate": self.rows["value"], "beta": self.num_values, "alpha": self.num_values}
        rows = self.rows | of_values
        if self.by_head:
            rows = {"qkvz": sum(self.rows.values()) + self.rows["value"], "ba": 2 * self.num_values}
        found[f"{prefix}in_proj.weight"] = in_pieces(found[f"{prefix}in_proj.weight"], rows)
        found[f"{prefix}conv"] = in_pieces(found[f"{prefix}conv"], self.rows)
        return found


def in_pieces(shard: ShardedTensor, rows: Mapping[str, int]) -> ShardedTensorFactory:
    """The shard of a weight whose rows on a worker are of several kinds: each kind is a tensor of its own."""

    def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        whole = replace(shard, key=key, data=data, dtype=data.dtype, replica_id=replica_id)
        pieces, start = [], 0
        for name, size in rows.items():
            pieces += [replace(piece, key=f"{key}.{name}") for piece in whole.narrow(0, start, size)]
            start += size
        return pieces

    return ShardedTensorFactory(shard.key, shard.data, build, torch.cat, shard.replica_id)
