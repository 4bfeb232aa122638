"""Routers whose experts are to be used alike: what a step adds to its loss for that, and how much it was.

Of a token, in each layer of E experts of which it goes to K, with the router's logits x and p = softmax(x):

    moe_aux_loss = E sum_i f_i p_i         f_i: the share of its group's choices, K a token, that fell on expert i; a
                                           constant to the gradient (Switch Transformer, arXiv 2101.03961, equation 4)
    moe_z_loss   = (log sum_i exp(x_i))^2  (ST-MoE, arXiv 2202.08906, equation 5)

A group is a micro-batch (``aux_loss``) or a document (``seq_aux_loss``). To the loss of a step is added the sum over
layers of the coefficients times the means over all tokens of the optimizer step, as every loss is divided by counts of
the whole step; padding is no token. So nothing depends on how the model is cut, and with documents nothing on how the
batch is.

megatron-core's own router gives the same losses, but counts padding, weighs micro-batches by the tokens of one worker
and divides later, and takes a row of documents for one sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from trainers.backends.megatron.packing import Packed
from trainers.batch import on_device


class Balance:
    """What the routers of this worker's stages know of a step, and what their losses are.

    A router is told of a micro-batch by the length of what megatron-core hands on as a mask of padding (``told``):
    micro-batches take turns in a pipeline, and what is recomputed in the backward pass may get tensors alone.
    """

    def __init__(self, config: TransformerConfig) -> None:
        self.by_document = config.moe_router_load_balancing_type == "seq_aux_loss"
        self.aux_coeff: float = config.moe_aux_loss_coeff
        self.z_coeff: float = config.moe_z_loss_coeff or 0.0
        self.num_layers = sum(config.moe_layer_freq)
        self.num_tokens = 0
        self._micros: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sums = torch.zeros(2)

    @classmethod
    def of(cls, config: TransformerConfig) -> Balance | None:
        """None where no loss is asked for, or there are no experts."""
        is_asked = config.moe_aux_loss_coeff or config.moe_z_loss_coeff
        return cls(config) if is_asked and config.num_moe_experts is not None else None

    def begin(self, num_tokens: int, device: torch.device) -> None:
        """A step in which this worker's slice of the batch has so many tokens. Every rank calls it."""
        total = torch.tensor(num_tokens, device=device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        self.num_tokens = max(1, int(total))
        self._micros.clear()
        self._sums = torch.zeros(2, device=device)

    def told(self, packed: Packed, *, divided_over: Any) -> torch.Tensor:
        """What stands for a micro-batch. ``divided_over``: the workers over which its tokens are spread further."""
        device = packed.input_ids_S.device
        group_S, sizes_G = on_device(packed.document_S, device), on_device(packed.lengths_D, device)
        if not self.by_document:
            group_S, sizes_G = group_S.clamp(max=0), sizes_G.sum(0, keepdim=True)
        if divided_over is not None:
            group_S = group_S.chunk(divided_over.size())[divided_over.rank()]
        self._micros.append((group_S, sizes_G.clamp(min=1)))
        return torch.zeros(1, len(self._micros), dtype=torch.bool, device=device)

    def micro(self, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(S,) the group of each token, -1 of padding, and (G,) the tokens of each on all workers."""
        return self._micros[len(mask) - 1]

    def add(self, aux_loss: torch.Tensor, z_loss: torch.Tensor) -> None:
        """This worker's part of a layer's losses of one micro-batch."""
        self._sums += torch.stack([aux_loss, z_loss]).detach()

    def end(self) -> dict[str, float]:
        """The means over layers, of this slice of the batch: slices add up. Every rank calls it, behind the step."""
        dist.all_reduce(self._sums, group=parallel_state.get_tensor_and_context_parallel_group())
        dist.all_reduce(self._sums, group=parallel_state.get_pipeline_model_parallel_group())
        aux_loss, z_loss = (self._sums / self.num_layers).tolist()
        return ({"moe_aux_loss": aux_loss} if self.aux_coeff else {}) | ({"moe_z_loss": z_loss} if self.z_coeff else {})


class BalancedRouter(TopKRouter):  # type: ignore[misc]
    """megatron-core's router, which in training sends the gradient of the losses of ``balance`` along."""

    balance: Balance  # whoever builds the model says it

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        probs, routing_map = super().routing(logits)
        if padding_mask is None or not torch.is_grad_enabled():  # of what is recomputed the second pass counts
            return probs, routing_map
        aux_loss, z_loss = self._losses(logits.flatten(0, 1), *self.balance.micro(padding_mask))
        self.balance.add(aux_loss, z_loss)
        added = self.balance.aux_coeff * aux_loss + self.balance.z_coeff * z_loss
        return MoEAuxLossAutoScaler.apply(probs, added), routing_map

    def is_aux_loss_enabled(self) -> bool:
        """Never: megatron-core's own are not wanted beside."""
        return False

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Nothing, likewise."""
        return logits

    def _losses(
        self, logits_SE: torch.Tensor, group_S: torch.Tensor, sizes_G: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_token_S, place_S = group_S >= 0, group_S.clamp(min=0)
        chosen_SE, scores_SE = compute_routing_scores_for_aux_loss(logits_SE, self.topk, self.score_function)
        counts_GE = scores_SE.new_zeros(len(sizes_G), scores_SE.shape[1])
        counts_GE.index_add_(0, place_S, (chosen_SE & is_token_S[:, None]).to(counts_GE.dtype))
        dist.all_reduce(counts_GE, group=self.tp_cp_group)
        shares_GE = counts_GE / (self.topk * sizes_G[:, None])
        aux_S = scores_SE.shape[1] * (shares_GE[place_S] * scores_SE).sum(-1)
        z_S = logits_SE.float().logsumexp(-1).square()
        of_tokens = [torch.where(is_token_S, loss_S, 0.0).sum() / self.balance.num_tokens for loss_S in (aux_S, z_S)]
        return of_tokens[0], of_tokens[1]
