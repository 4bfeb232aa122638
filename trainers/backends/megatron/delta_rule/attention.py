"""megatron-core's attention whose output is gated, with the rows of its first product as the checkpoint has them."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention


class GatedAttention(SelfAttention):  # type: ignore[misc]
    """Of each query head the product has its query, then its gate; megatron-core wants all queries of a group first.

    So nothing is permuted on the way from and to a checkpoint, neither weights nor adapters.
    """

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, key_value_states: Any = None, output_gate: bool = True, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(S, 1, heads, D) queries, (S, 1, groups, D) keys and values, (S, 1, heads, D) gates of this worker."""
        assert output_gate, "the layer was built with attention_output_gate"
        product, _ = self.linear_qkv(hidden_states)
        groups, width = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        parts = product.unflatten(-1, (groups, -1, width))
        both, key, value = parts.split([parts.shape[-2] - 2, 1, 1], dim=-2)
        query, gate = both.unflatten(-2, (-1, 2)).flatten(-4, -3).unbind(-2)
        query = self.q_layernorm(query.contiguous())  # a norm is compiled anew for parts of a larger tensor
        key = self.k_layernorm(key.squeeze(-2).contiguous())
        return query, key, value.squeeze(-2), gate
