"""Forward and backward passes of a backbone as CUDA graphs: the host starts a pass at once, not kernel by kernel.

A pass over 8,192 tokens of a model of 135 M parameters takes an H100 30 ms, and took the host 150 to 230 ms to start.
A graph has one shape, so documents are laid one behind the other into a row of fixed length, and what is left of the
row is documents that nobody looks at. The head and the loss, which differ from trainer to trainer, are not captured.

    first pass of a shape    as ever, from the buffers of the shape
    second one               captured, then as all that follow:
    others                   buffers are filled; forward graph; head, loss and their gradient; backward graph

A shape takes seconds to compile and capture. So a row that fits into a shape that is there runs in it, as long as rows
like it are few or nearly as long: the last batch of an epoch does not wait for a shape of its own.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from trainers.backends.capture import captured
from trainers.backends.fsdp import packed_attention
from trainers.backends.fsdp.one_worker.low_weights import LowWeights, parts_of
from trainers.backends.scores.inputs import Inputs
from trainers.backends.scores.scorer import Scorer, ValueScorer

MOST = 8  # shapes that are kept; with another one the oldest goes
SHORTEST = 128  # tokens of the longest document, rounded up to a power of two: how far kernels look
FEWEST = 16  # documents of a row, rounded up likewise
OFTEN = 64  # passes that run in a longer shape before they get one of their own
NEARLY = 1.25  # times as long: they never get one

logger = logging.getLogger(__name__)


class Replayed(Protocol):
    """What a capture gives: ``torch.cuda.CUDAGraph``."""

    def replay(self) -> None: ...

    def pool(self) -> Any: ...


class Shape(NamedTuple):
    length: int  # of the row
    num_documents: int
    longest: int

    def holds(self, inputs: Inputs) -> bool:
        """Whether a row of this shape has room for these documents and the padding behind them."""
        assert inputs.document_starts is not None
        return (
            inputs.input_ids_BT.shape[1] <= self.length
            and inputs.longest_document <= self.longest
            and _num_documents(inputs, self.length, self.longest) <= self.num_documents
        )


@dataclass
class Pass:
    """One shape: what its graphs read and write."""

    inputs: Inputs
    ends_D: torch.Tensor  # (D,) int32: where documents of padding end, if they began at 0
    hidden: Any = None  # (1, T, H)
    gradient: Any = None  # of ``hidden``
    reached: list[torch.nn.Parameter] = field(default_factory=list)
    forward: Any = None  # graphs; None: not captured yet
    backward: Any = None


class Passes:
    """Runs ``hidden_of`` over rows of documents that have a gradient. What cannot be captured runs as ever, for good.

    ``weights``: whose copies it runs with. ``capture``: in place of CUDA's (tests).
    """

    def __init__(
        self,
        hidden_of: Callable[[Inputs], torch.Tensor],
        weights: LowWeights,
        *,
        capture: Callable[..., Replayed] = captured,
    ) -> None:
        self.hidden_of, self.weights, self.capture = hidden_of, weights, capture
        weights.in_one = True
        self.is_on = True
        self.length = 0  # of the rows of this step
        self.passes: dict[Shape, Pass] = {}
        self.lent: Counter[Shape] = Counter()  # passes of a shape that ran in another one
        self.buffer: torch.Tensor | None = None  # of gradients, all shapes' own
        self.pool: Any = None
        self.stream: Any = None
        self.anchor: torch.Tensor | None = None

    def begin(self, most_tokens: int) -> None:
        """A step whose largest micro-batch has so many tokens: all are brought to one length."""
        self.length = rounded(most_tokens)

    def take(self, inputs: Inputs) -> bool:
        """Whether these inputs are run here."""
        return (
            self.is_on
            and torch.is_grad_enabled()
            and inputs.document_starts is not None
            and inputs.input_ids_BT.shape[0] == 1
            and inputs.input_ids_BT.shape[1] <= self.length
            and inputs.seen is None
            and inputs.part is None
        )

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        """(1, T, H) hidden states of the row; T of ``begin``, of which the first ones are the row's."""
        shape = self._shape(inputs)
        known = self.passes.get(shape)
        if known is None:
            while len(self.passes) >= MOST:
                self.passes.pop(next(iter(self.passes)))
            known = self.passes[shape] = _pass_of(shape, inputs.input_ids_BT.device)
            _fill(known, inputs, shape)
            return self.hidden_of(known.inputs)
        _fill(known, inputs, shape)
        if known.forward is None and not self._captured(known):
            return self.hidden_of(known.inputs)
        hidden_1TH: torch.Tensor = _Replay.apply(self.anchor, self, known)  # type: ignore[no-untyped-call]
        return hidden_1TH

    def clear(self) -> None:
        """Forgets all graphs: weights lie elsewhere from now on."""
        self.passes.clear()
        self.lent.clear()
        self.buffer = self.pool = None

    def _shape(self, inputs: Inputs) -> Shape:
        longest = max(SHORTEST, power_of_two(inputs.longest_document))
        num_documents = max(FEWEST, power_of_two(_num_documents(inputs, self.length, longest)))
        own = Shape(self.length, num_documents, min(longest, self.length))
        if own in self.passes:
            return own
        nearest = min((shape for shape in self.passes if shape.holds(inputs)), default=None)
        if nearest is None:
            return own
        self.lent[own] += 1
        return nearest if nearest.length <= NEARLY * own.length or self.lent[own] <= OFTEN else own

    def _captured(self, known: Pass) -> bool:
        weights, device = self.weights, known.inputs.input_ids_BT.device
        if self.buffer is None:
            size = sum(weight.numel() for weight in weights.learning)
            self.buffer = torch.zeros(size, dtype=weights.dtype, device=device)
            self.anchor = torch.zeros((), device=device, requires_grad=True)
        if self.stream is None and device.type == "cuda":
            self.stream = torch.cuda.Stream()  # the backward pass runs on the stream of the forward pass
        parts = parts_of(self.buffer, weights.learning)
        leaves: list[torch.nn.Parameter] = []

        def forward() -> None:
            with weights.aliased() as leaves[:], torch.enable_grad():
                known.hidden = self.hidden_of(known.inputs)

        def backward() -> None:
            found = torch.autograd.grad(known.hidden, leaves, known.gradient, allow_unused=True)
            known.reached = [weight for weight, one in zip(weights.learning, found, strict=True) if one is not None]
            for part, one in zip(parts, found, strict=True):
                part.zero_() if one is None else part.copy_(one)

        if device.type == "cuda":
            torch.cuda.empty_cache()  # what the first pass took and graphs, whose memory is their own, cannot have
        try:
            graph = self.capture(forward, pool=self.pool, stream=self.stream)
            known.gradient = torch.zeros_like(known.hidden)
            known.backward = self.capture(backward, pool=graph.pool(), stream=self.stream)
        except RuntimeError as error:
            self.is_on, known.hidden = False, None
            self.clear()
            if device.type == "cuda":
                torch.cuda.synchronize()
            reason = str(error).splitlines()[0]
            logger.warning("cuda_graphs: passes that learn run without them: they cannot be captured (%s)", reason)
            return False
        known.forward, self.pool = graph, graph.pool()
        return True


def passes_of(scorer: Any, weights: LowWeights | None) -> Passes | None:
    """The passes of a scorer's backbone, by which it runs from now on; None where graphs are of no use or go wrong.

    Documents must be kept apart by where they begin (``varlen``): masks have as many shapes as there are documents.
    What draws at random as it learns would draw the same again in a graph.
    """
    if weights is None or not isinstance(scorer, (Scorer, ValueScorer)) or scorer.way != "positions":
        return None
    if isinstance(scorer, Scorer) and not (scorer.head.known and scorer.balance is None):
        return None
    config = scorer.model.config.get_text_config()
    is_on_gpu = next(scorer.parameters()).device.type == "cuda"
    if not is_on_gpu or config._attn_implementation != packed_attention.NAME:
        return None
    rates = [part.p for part in scorer.model.modules() if isinstance(part, torch.nn.Dropout)]
    if any([*rates, getattr(config, "attention_dropout", None)]):
        return None
    scorer.passes = Passes(scorer.hidden, weights)
    return scorer.passes


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, passes: Passes, known: Pass) -> torch.Tensor:
        known.forward.replay()
        ctx.passes, ctx.known = passes, known
        hidden_1TH: torch.Tensor = known.hidden.detach()
        return hidden_1TH

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        known: Pass = ctx.known
        known.gradient.copy_(gradients[0])
        known.backward.replay()
        ctx.passes.weights.add_parts(ctx.passes.buffer, known.reached)
        return None, None, None


def rounded(num_tokens: int) -> int:
    """Up to one of eight lengths between a power of two and the next."""
    unit = max(64, power_of_two(num_tokens) // 16)
    return -(-num_tokens // unit) * unit


def power_of_two(number: int) -> int:
    """The next, or the number itself."""
    return 1 << max(0, number - 1).bit_length()


def _num_documents(inputs: Inputs, length: int, longest: int) -> int:
    """Of a row of this length, those of padding included."""
    assert inputs.document_starts is not None
    return len(inputs.document_starts) - 1 - (inputs.input_ids_BT.shape[1] - length) // longest


def _pass_of(shape: Shape, device: torch.device) -> Pass:
    zeros_1T = torch.zeros(1, shape.length, dtype=torch.long, device=device)
    nothing = torch.zeros(0, dtype=torch.long, device=device)
    starts = torch.zeros(shape.num_documents + 1, dtype=torch.int32, device=device)
    ends_D = torch.arange(shape.num_documents + 1, dtype=torch.int32, device=device) * shape.longest
    inputs = Inputs(zeros_1T, zeros_1T.clone(), nothing, nothing, starts, shape.longest)
    return Pass(inputs, ends_D)


def _fill(known: Pass, inputs: Inputs, shape: Shape) -> None:
    """The row, and behind it documents of padding, none of them longer than the longest may be."""
    ids_T, places_T = known.inputs.input_ids_BT[0], known.inputs.position_ids_BT[0]  # type: ignore[index]
    starts, given = known.inputs.document_starts, inputs.document_starts
    assert starts is not None
    assert given is not None
    assert inputs.position_ids_BT is not None
    num_tokens, num_starts = inputs.input_ids_BT.shape[1], len(given)
    ids_T[:num_tokens].copy_(inputs.input_ids_BT[0])
    ids_T[num_tokens:].zero_()
    places_T[:num_tokens].copy_(inputs.position_ids_BT[0])
    rest = torch.arange(shape.length - num_tokens, device=ids_T.device)
    places_T[num_tokens:].copy_(rest % shape.longest)
    starts[:num_starts].copy_(given)
    starts[num_starts:].copy_((known.ends_D[1 : len(starts) - num_starts + 1] + num_tokens).clamp(max=shape.length))
