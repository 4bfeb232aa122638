"""A model that answers with numbers of target tokens alone: what DDP and FSDP wrap."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from trainers.backends.base import TokenFunction
from trainers.backends.fsdp.documents import Way, backbone, model_arguments
from trainers.backends.fsdp.packed_attention import single_documents
from trainers.backends.scores.head import Head, Scores
from trainers.backends.scores.inputs import Dummy, Inputs

if TYPE_CHECKING:
    from trainers.backends.fsdp.one_worker.passes import Passes
    from trainers.backends.fsdp.router import Balance
    from trainers.backends.fsdp.sequence_attention import SequenceRanks


class Scorer(torch.nn.Module):
    """A language model that answers with the scores of target tokens. ``room``: see ``head.LinearHead``.

    ``way``: by which it keeps documents of one row apart, if it does. ``ranks``: those that share rows.
    """

    def __init__(
        self, model: Any, *, way: Way | None = None, room: int = 0, ranks: SequenceRanks | None = None
    ) -> None:
        super().__init__()
        self.model, self.way, self.ranks = model, way, ranks
        self.head = Head(model, room=room)
        self.balance: Balance | None = None  # for ``is_token_BT``
        self.dummy: Dummy | None = None  # where a vision tower takes part in every pass
        self.passes: Passes | None = None  # that run as CUDA graphs

    def hidden(self, inputs: Inputs) -> torch.Tensor:
        """(B, T, H) what the head takes, of a head that is known."""
        hidden_BTH: torch.Tensor = self._outputs(inputs).last_hidden_state
        return hidden_BTH

    def forward(
        self,
        inputs: Inputs,
        temperature: float,
        entropy_gradient: bool = False,
        token_function: TokenFunction | None = None,
        token_inputs: tuple[torch.Tensor, ...] = (),
        features_only: bool = False,
        is_token_BT: torch.Tensor | None = None,
    ) -> Scores | tuple[torch.Tensor]:
        """``head.Scores`` of each target and what ``token_function`` gives; or the features that the head takes.

        ``is_token_BT``: asks for the loss of routers, over what is True.
        """
        outputs = None
        if self.passes is not None and self.passes.take(inputs):
            features_NX = self.passes(inputs).flatten(0, 1).index_select(0, inputs.places_N)
        else:
            outputs = self._outputs(inputs, **({} if is_token_BT is None else {"output_router_logits": True}))
            features_NX = self.head.features(outputs, inputs.places_N)
        if features_only:
            return (of_all(features_NX, inputs, self.ranks),)
        if inputs.part is not None:
            places = inputs.part.targets_M
            token_inputs = tuple(column.index_select(0, places.to(column.device)) for column in token_inputs)
        scores = self.head.scores(
            features_NX,
            inputs.target_ids_N,
            temperature,
            entropy_gradient=entropy_gradient,
            token_function=token_function,
            token_inputs=token_inputs,
        )
        if inputs.part is not None:
            found = (scores.logps_N, scores.entropy_N, scores.is_top1_N, *scores.further)
            logps_N, entropy_N, is_top1_N, *further = (of_all(one, inputs, self.ranks) for one in found)
            scores = Scores(logps_N, entropy_N, is_top1_N, tuple(further))
        if is_token_BT is None or self.balance is None or outputs is None:
            return scores
        return scores._replace(router_loss=self.balance.loss(outputs.router_logits, is_token_BT))

    def _outputs(self, inputs: Inputs, **routes: Any) -> Any:
        with single_documents(inputs), joining(self.model, inputs, self.dummy):
            given = arguments_of(self.model, inputs, self.way, self.ranks)
            return self.head.outputs(self.model, **given, **routes)


PIXELS = ("pixel_values", "pixel_values_videos")  # arguments of models, for each of which they run their tower
TAKEN = ("pooler_output", "deepstack_features")  # of a tower's outputs: what language models take


@contextlib.contextmanager
def joining(model: Any, inputs: Inputs, dummy: Dummy | None) -> Iterator[None]:
    """Inside, a pass without pictures runs the tower too, where it has a ``dummy``, and adds nothing to embeddings.

    So it gathers shards and reduces gradients in the order of a pass with pictures, which other ranks may make.
    """
    num_own = 0 if inputs.seen is None else sum(name in PIXELS for name in inputs.seen.pixels)
    num_missing = 0 if dummy is None else dummy.num_towers - num_own
    if dummy is None or num_missing <= 0:
        yield
        return
    nothing = torch.stack([nothing_of(model, dummy.pixels) for _ in range(num_missing)]).sum()
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, given, embeddings: embeddings + nothing.to(embeddings.dtype)
    )
    try:
        yield
    finally:
        hook.remove()


def nothing_of(model: Any, pixels: dict[str, torch.Tensor]) -> torch.Tensor:
    """Zero, computed by the vision tower of a model: every rank of a group runs it, and the same weights get gradients
    as where there are pictures."""
    outputs = backbone(model).get_image_features(**pixels, return_dict=True)
    tensors = [tensor for name in TAKEN for tensor in _tensors_in(getattr(outputs, name, None))]
    return torch.stack([tensor.float().sum() * 0.0 for tensor in tensors]).sum()


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in _tensors_in(one)]
    return [value] if torch.is_tensor(value) else []


class ValueScorer(torch.nn.Module):
    """A sequence classifier that answers with the numbers of its labels at every target.

    Raises:
        ValueError: the model has no linear ``score`` on top of its backbone.
    """

    def __init__(self, model: Any, *, way: Way | None = None, ranks: SequenceRanks | None = None) -> None:
        super().__init__()
        if not callable(getattr(model, "score", None)) or backbone(model) is model:
            raise ValueError(
                f"{type(model).__name__} has no backbone with a linear layer named score on top of it. A value model "
                "is a model of AutoModelForSequenceClassification for a decoder, such as Qwen3 or Llama."
            )
        self.model, self.way, self.ranks = model, way, ranks
        self.dummy: Dummy | None = None  # as of ``Scorer``
        self.passes: Passes | None = None

    def hidden(self, inputs: Inputs) -> torch.Tensor:
        """(B, T, H) what values are read off."""
        with single_documents(inputs), joining(self.model, inputs, self.dummy):
            given = arguments_of(self.model, inputs, self.way, self.ranks)
            hidden_BTH: torch.Tensor = backbone(self.model)(**given, use_cache=False).last_hidden_state
        return hidden_BTH

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor]:
        """(N,) float32 values; (N, K) of a model with K labels, if they are several."""
        is_captured = self.passes is not None and self.passes.take(inputs)
        hidden_BTH = self.passes(inputs) if is_captured else self.hidden(inputs)  # type: ignore[misc]
        hidden_NH = hidden_BTH.flatten(0, 1).index_select(0, inputs.places_N)
        return (of_all(self.model.score(hidden_NH).float().squeeze(-1), inputs, self.ranks),)


def arguments_of(model: Any, inputs: Inputs, way: Way | None, ranks: SequenceRanks | None) -> dict[str, Any]:
    """What the model is called with, where ``ranks`` share rows for this rank's part of them."""
    return model_arguments(model, inputs, way) if ranks is None else ranks.arguments(inputs)


def of_all(values: torch.Tensor, inputs: Inputs, ranks: SequenceRanks | None) -> torch.Tensor:
    """The values of all targets, in order, where ``ranks`` have found those of their parts."""
    return values if ranks is None or inputs.part is None else ranks.of_all(values, inputs.part)
