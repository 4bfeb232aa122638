"""The loss that keeps a mixture of experts in even use: transformers' own, over the tokens of an optimizer step.

    moe_aux_loss = E sum_i f_i p_i    f_i: the choices of expert i by tokens; they add up to K, the experts of a token,
                                      and are a constant to the gradient. p_i: the mean probability of expert i

(Switch Transformer, arXiv 2101.03961, equation 4.) f and p are means over the tokens and the layers of a micro-batch of
one worker, as ``load_balancing_loss_func`` of the model's file takes them. To the loss of a step is added the
coefficient times the mean over micro-batches and workers, weighted by tokens. Prompts count, padding does not. TRL
weights micro-batches alike. An even use of experts gives K; ``megatron/router.py`` divides by K, and takes each layer
by itself.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rayhelper import ConfigError
from trainers.backends.fsdp.documents import backbone
from trainers.backends.scores.head import Scores
from trainers.batch import Sequences, on_device
from trainers.metrics import Metrics

FUNCTION = "load_balancing_loss_func"
PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]
NUM_TOKENS = 8  # that a model is asked for


def class_of(config: Any) -> Any:
    """transformers' class of language models for a configuration; None: there is none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def lacks_loss(kind: type, config: Any) -> bool:
    """Whether transformers' class is of a mixture of experts, and adds no loss of its routers to any other."""
    return hasattr(config.get_text_config(), "output_router_logits") and not _gives_loss(kind)


def mistake(kind: type, config: Any) -> str | None:
    """Why no model of a class and configuration has the loss, and what to do; None: nothing speaks against it."""
    text = config.get_text_config()
    counts = [getattr(text, name, None) for name in ("num_experts", "num_local_experts")]
    if not hasattr(text, "output_router_logits") or 0 in counts:
        return f"{kind.__name__} has no experts. Remove it."
    function = getattr(sys.modules[kind.__module__], FUNCTION, None)
    if _gives_loss(kind) and function is not None and list(inspect.signature(function).parameters) == PARAMETERS:
        return None
    return (
        f"{kind.__name__} of transformers has no loss that balances its experts, or its loss differs from Mixtral's. "
        f"Remove "
        "it, or write backend: megatron and megatron: {moe_aux_loss_coeff: ...} if megatron-core supports the model."
    )


def _gives_loss(kind: Any) -> bool:
    return "output_router_logits" in inspect.signature(kind.forward).parameters


class Balance:
    """The loss of a model, and what each micro-batch adds of it to a step.

    The model is asked once, with its adapter: its own ``aux_loss`` is the loss here.

    Raises:
        ConfigError: the model has no such loss, or another one.
    """

    def __init__(self, model: Any, coef: float, *, has_backbone: bool) -> None:
        self.coef = coef
        self.num_tokens = torch.ones(())  # of the step, on all workers
        if told := mistake(type(model), model.config):
            raise ConfigError(f"router_aux_loss_coef is {coef}, but {told}")
        if not has_backbone:
            raise ConfigError(
                f"router_aux_loss_coef is {coef}, but {type(model).__name__} changes its logits in an unknown "
                "way. It is called as a whole, without the logits of its routers. Remove it."
            )
        self._function: Callable[..., torch.Tensor] = getattr(sys.modules[type(model).__module__], FUNCTION)
        self.top_k: int = getattr(model, "num_experts_per_tok", 0)
        _check_adapter(model)
        self._check_model(model)

    def loss(self, router_logits: tuple[torch.Tensor, ...], is_token_BT: torch.Tensor) -> torch.Tensor:
        """The loss of a micro-batch with a token at least, from the (B x T, E) logits of each router."""
        if len(router_logits) != self.num_routers:
            raise RuntimeError(f"{len(router_logits)} of {self.num_routers} routers gave their logits")
        return self._function(router_logits, router_logits[0].shape[-1], self.top_k, is_token_BT)

    def begin(self, sequences: Sequences, device: torch.device) -> None:
        """A step in which this worker has these sequences. Every rank."""
        self.num_tokens = torch.tensor(max(1, len(sequences.input_ids.values)), device=device)
        if dist.is_initialized():
            dist.all_reduce(self.num_tokens)

    def tokens(self, micro: Sequences, *, padding_free: bool) -> torch.Tensor | None:
        """(B, T) True of tokens, False of padding, as ``model_inputs`` lays a micro-batch out; None if it has none."""
        lengths = micro.input_ids.lengths
        if not lengths.sum():
            return None
        if padding_free:
            lengths = lengths.sum(keepdims=True)
        is_token_BT = torch.from_numpy(np.arange(lengths.max())[None] < lengths[:, None])
        return on_device(is_token_BT, self.num_tokens.device)

    def share(self, scores: Scores, micro: Sequences, metrics: Metrics) -> torch.Tensor | float:
        """What the micro-batch adds to the loss of the step."""
        if scores.router_loss is None:
            return 0.0
        num_tokens = len(micro.input_ids.values)
        metrics.mean("moe_aux_loss", scores.router_loss * num_tokens, num_tokens)
        return scores.router_loss * (self.coef * num_tokens / self.num_tokens)

    @torch.no_grad()
    def _check_model(self, model: Any) -> None:
        ids_BT = torch.arange(NUM_TOKENS, device=next(model.parameters()).device)[None] % model.config.vocab_size
        asked = {"input_ids": ids_BT, "use_cache": False, "output_router_logits": True}
        wanted, outputs = model(**asked).aux_loss, backbone(model)(**asked)
        if not outputs.router_logits:
            raise ConfigError(f"router_aux_loss_coef is {self.coef}, but {type(model).__name__} here has no experts.")
        self.num_routers = len(outputs.router_logits)
        found = self.loss(outputs.router_logits, torch.ones_like(ids_BT, dtype=torch.bool))
        if not torch.allclose(found, wanted, rtol=1e-3):
            raise ConfigError(
                f"router_aux_loss_coef is {self.coef}, but {type(model).__name__} balances its experts by a loss "
                f"that RayHelper does not support ({float(wanted):.6g}; by load_balancing_loss_func "
                f"{float(found):.6g}). Remove it."
            )


def _check_adapter(model: Any) -> None:
    """Raises ConfigError for an adapter of a router: transformers would hand out what is before it (Jamba)."""
    for name, part in model.named_modules():
        if name.endswith(".router") and isinstance(getattr(part, "base_layer", None), torch.nn.Linear):
            raise ConfigError(
                f"router_aux_loss_coef: the adapter also changes {name}, and transformers gives the router's "
                "logits without the adapter. Write lora_kwargs: {exclude_modules: [router]}."
            )
