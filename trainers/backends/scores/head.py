"""From hidden states to log-probabilities of single tokens, without the logits of a whole batch.

The output head of a language model is its largest intermediate: tokens x vocabulary. Here only target tokens reach it,
a chunk at a time, and a chunk's logits are computed again in the backward pass instead of being kept: by
``linear_scores.py`` where the head is a plain product, else by autograd.

    LinearHead   a plain product with a weight, all of whose rows or a shard of them are here
    Head         whatever a Hugging Face model has
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from trainers.backends.base import TokenFunction
from trainers.backends.fsdp.documents import backbone
from trainers.backends.fsdp.hf_model import evaluating
from trainers.backends.scores.linear_scores import LinearScores
from trainers.losses.tokens import token_entropy, token_logps
from trainers.losses.vocabulary import WHOLE, Vocabulary

CHUNK_BYTES = 256 * 1024 * 1024  # of float32 logits, of which autograd keeps several tensors
ROOM = 3 * 2**30  # bytes that a head may keep for the backward pass unless told, where activations are kept too

logger = logging.getLogger(__name__)


class Scores(NamedTuple):
    """One entry a target token, float32."""

    logps_N: torch.Tensor
    entropy_N: torch.Tensor
    is_top1_N: torch.Tensor  # 1.0 where the target is the most probable token
    further: tuple[torch.Tensor, ...] = ()  # what a token function gave
    router_loss: torch.Tensor | None = None  # of the whole micro-batch (fsdp/router.py), where it is asked for


def room_of(given_gib: float | None, *, recomputes: bool) -> int:
    """Bytes that a head may keep: those that are given, else ``ROOM``, or nothing where layers keep nothing either."""
    if given_gib is not None:
        return int(given_gib * 2**30)
    return 0 if recomputes else ROOM


class LinearHead:
    """logits = scale x features weight^T, of the columns of ``vocabulary`` that are here.

    ``weight()``: (V, H) their rows, without padding, asked for at each use; gradients reach it by autograd. Features
    are alike on all ranks that share the vocabulary, which call every method together; so is their gradient. ``room``:
    bytes that a pass with gradients may keep, so that less is computed again.
    """

    def __init__(
        self, weight: Callable[[], torch.Tensor], vocabulary: Vocabulary = WHOLE, *, scale: float = 1.0, room: int = 0
    ) -> None:
        self.weight, self.vocabulary, self.scale, self.room = weight, vocabulary, scale, room

    def scores(
        self,
        features_NX: torch.Tensor,
        ids_N: torch.Tensor,
        temperature: float,
        *,
        entropy_gradient: bool = False,
        token_function: TokenFunction | None = None,
        token_inputs: tuple[torch.Tensor, ...] = (),
    ) -> Scores:
        """The ``Scores`` of ``ids_N`` under softmax(logits / temperature), and what ``token_function`` gives."""
        features_NX = self.vocabulary.spread(features_NX)
        if token_function is None:
            scale = self.scale / temperature
            rows = 2 * self.chunk_rows()  # it keeps fewer tensors, and adding up the weight's gradient wants many rows
            room = self.room if torch.is_grad_enabled() else 0
            found = LinearScores.apply(  # type: ignore[no-untyped-call]
                features_NX, self.weight(), ids_N, scale, rows, entropy_gradient, self.vocabulary, room
            )
            return Scores(*found)
        return scores_in_chunks(
            self._logits,
            self.chunk_rows(),
            self.vocabulary,
            features_NX,
            ids_N,
            temperature,
            entropy_gradient=entropy_gradient,
            token_function=token_function,
            token_inputs=token_inputs,
        )

    def chunk_rows(self) -> int:
        """How many tokens' logits autograd holds at once; alike on all ranks."""
        return max(1, CHUNK_BYTES // (4 * self.vocabulary.widest(self.weight().shape[0])))

    def logits(self, features_NX: torch.Tensor) -> torch.Tensor:
        """(N, V) float32."""
        return self._logits(self.vocabulary.spread(features_NX))

    def _logits(self, features_NX: torch.Tensor) -> torch.Tensor:
        logits_NV = torch.nn.functional.linear(features_NX, self.weight()).float()
        return logits_NV if self.scale == 1.0 else logits_NV * self.scale


def scores_in_chunks(
    logits: Callable[[torch.Tensor], torch.Tensor],
    rows: int,
    vocabulary: Vocabulary,
    features_NX: torch.Tensor,
    ids_N: torch.Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
    token_function: TokenFunction | None = None,
    token_inputs: tuple[torch.Tensor, ...] = (),
) -> Scores:
    """The ``Scores`` of ``ids_N`` by autograd, from the logits of ``rows`` tokens at a time."""

    def score(features: torch.Tensor, ids: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits_NV = logits(features)
        # The recomputation of the backward pass ends with the last tensor that a gradient needs, so what has no
        # gradient stands last and is computed once.
        further = () if token_function is None else token_function(logits_NV, *inputs, vocabulary=vocabulary)
        logps_N = token_logps(logits_NV, ids, temperature, vocabulary=vocabulary)
        of_entropy_NV = logits_NV if entropy_gradient else logits_NV.detach()
        entropy_N = token_entropy(of_entropy_NV, temperature, vocabulary=vocabulary)
        is_top1_N = (vocabulary.argmax(logits_NV.detach()) == ids).float()
        return logps_N, entropy_N, is_top1_N, *further

    columns = (features_NX, ids_N, *token_inputs)
    parts = []
    for start in range(0, max(1, len(ids_N)), rows):
        chunk = [column[start : start + rows] for column in columns]
        with_gradient = torch.is_grad_enabled()
        parts.append(checkpoint(score, *chunk, use_reentrant=False) if with_gradient else score(*chunk))
    logps_N, entropy_N, is_top1_N, *further = (torch.cat(column) for column in zip(*parts, strict=True))
    return Scores(logps_N, entropy_N, is_top1_N, tuple(further))


class Head:
    """The output embedding of a Hugging Face model, with what its architecture does to the logits afterwards.

    Architectures differ in that last part, and the same configuration key multiplies in one and divides in another. So
    the head is compared with the model itself once; where the two disagree the model's own logits are used, correct but
    with the memory of all of them (``features``). ``room``: see ``LinearHead``.

    Raises:
        ValueError: the model has no output embedding that can be called on its own.
    """

    def __init__(self, model: Any, *, room: int = 0) -> None:
        self.room = room
        linear = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        if linear is None or backbone(model) is None:
            raise ValueError(
                f"{type(model).__name__} has no backbone and output embedding that can be called one after the other. "
                "The fsdp backend trains causal language models (AutoModelForCausalLM)."
            )
        self.linear: Any = linear
        config = model.config.get_text_config()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)  # Gemma 2
        self.scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
        self.scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
        self.scale *= getattr(config, "lm_head_multiplier", None) or 1.0  # Falcon-H1
        self.known = self._agrees_with(model)
        if not self.known:
            logger.warning(
                "%s changes its logits in an unknown way. Its own forward pass is used, which holds the logits of "
                "a whole micro-batch. Choose small micro-batches.",
                type(model).__name__,
            )

    def outputs(self, model: Any, **inputs: Any) -> Any:
        """What the model answers with: its backbone, or the whole of it if the head is not known."""
        return (backbone(model) if self.known else model)(**inputs, use_cache=False)

    def features(self, outputs: Any, predicting_N: torch.Tensor) -> torch.Tensor:
        """(N, H) hidden states at ``predicting_N``, places of the flattened (B, T); logits if the head is not known."""
        outputs_BTX = outputs.last_hidden_state if self.known else outputs.logits
        features_NX: torch.Tensor = outputs_BTX.flatten(0, 1).index_select(0, predicting_N)
        return features_NX

    def scores(
        self,
        features_NX: torch.Tensor,
        ids_N: torch.Tensor,
        temperature: float,
        *,
        entropy_gradient: bool = False,
        token_function: TokenFunction | None = None,
        token_inputs: tuple[torch.Tensor, ...] = (),
    ) -> Scores:
        """The ``Scores`` of ``ids_N`` under softmax(logits / temperature), and what ``token_function`` gives."""
        settings: dict[str, Any] = {
            "entropy_gradient": entropy_gradient,
            "token_function": token_function,
            "token_inputs": token_inputs,
        }
        if token_function is None and self.is_linear():
            head = LinearHead(lambda: self.linear.weight, scale=self.scale, room=self.room)
            return head.scores(features_NX, ids_N, temperature, **settings)
        return scores_in_chunks(self.logits, self.chunk_rows(), WHOLE, features_NX, ids_N, temperature, **settings)

    def is_linear(self) -> bool:
        """Whether logits are a plain product with the head's weight, but for a factor."""
        return self.known and type(self.linear) is torch.nn.Linear and self.linear.bias is None and not self.softcap

    def chunk_rows(self) -> int:
        """How many tokens' logits are held at once."""
        rows: int = max(1, CHUNK_BYTES // (4 * self.linear.weight.shape[0]))
        return rows

    def logits(self, features_NX: torch.Tensor) -> torch.Tensor:
        """(N, V) float32."""
        if not self.known:
            return features_NX.float()
        logits_NV: torch.Tensor = self.linear(features_NX).float()
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        if self.softcap:
            logits_NV = torch.tanh(logits_NV / self.softcap) * self.softcap
        return logits_NV

    @torch.no_grad()
    def _agrees_with(self, model: Any) -> bool:
        self.known = True
        ids_BT = torch.arange(4, device=self.linear.weight.device)[None] % self.linear.weight.shape[0]
        with evaluating(model):
            wanted = model(input_ids=ids_BT, use_cache=False).logits.float()
            found = self.logits(backbone(model)(input_ids=ids_BT, use_cache=False).last_hidden_state)
        tolerance = 1e-4 if self.linear.weight.dtype == torch.float32 else 2e-2
        return found.shape == wanted.shape and bool((found - wanted).abs().max() <= tolerance * wanted.abs().max())
