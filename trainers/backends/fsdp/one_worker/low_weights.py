"""The weights of a single worker in a lower dtype, beside those in float32 that its optimizer changes.

FSDP2 keeps the same two on every worker, and hooks around each layer make the copies. On a small model they took the
host longer than the layer took the GPU. Here copies are made at once, and stay where they lie: CUDA graphs read them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

LARGE = 2**20  # numbers of a weight, from which on starting a kernel of our own takes less time than it saves


class LowWeights:
    """Copies of a module's float32 weights in ``dtype``. The module holds them inside ``held``, and else its own.

    Its own weights get their gradients by ``take_gradients``. A weight that no gradient reached has None, so that the
    optimizer leaves it alone. ``in_one``: gradients of a step are parts of one buffer (``add_parts``).
    """

    in_one = False

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.places = [
            (part, name, weight)
            for part in module.modules()
            for name, weight in part.named_parameters(recurse=False, remove_duplicate=False)
            if weight.dtype == torch.float32
        ]
        self.weights = list(dict.fromkeys(weight for _, _, weight in self.places))  # tied ones once
        self.learning = [weight for weight in self.weights if weight.requires_grad]
        self.copies: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self.parts: dict[torch.nn.Parameter, torch.Tensor] = {}  # of the step's buffer of gradients
        self.total: torch.Tensor | None = None  # that buffer
        self.is_held = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside, the module holds the copies, which are those of its weights as they are now."""
        if self.is_held:
            yield
            return
        if not self.copies:
            self.copies = {weight: self._copy(weight) for weight in self.weights}
        with torch.no_grad():
            for weight, copy in self.copies.items():
                copy.copy_(weight)
        self._hold(self.copies)
        self.is_held = True
        try:
            yield
        finally:
            self.is_held = False
            self._hold({weight: weight for weight in self.weights})

    @contextlib.contextmanager
    def aliased(self) -> Iterator[list[torch.nn.Parameter]]:
        """Inside ``held``: copies that lie where the copies lie, and are new to autograd; those that learn.

        Autograd remembers on which stream a weight was first used, and a capture has a stream of its own.
        """
        aliases = {
            weight: torch.nn.Parameter(copy.detach(), requires_grad=copy.requires_grad)
            for weight, copy in self.copies.items()
        }
        self._hold(aliases)
        try:
            yield [aliases[weight] for weight in self.learning]
        finally:
            self._hold(self.copies)

    def drop(self) -> None:
        """Frees the copies; the next ``held`` makes new ones, which lie elsewhere."""
        assert not self.is_held, "the module runs with them"
        self.copies = {}

    def take_gradients(self) -> None:
        """Those of the copies are added to those of the weights, and gone."""
        for weight in self.learning:
            copy = self.copies[weight]
            if copy.grad is None:
                continue
            if weight.grad is None and not self.in_one:
                weight.grad = copy.grad.float()
            else:
                add(self._gradient(weight), copy.grad)
            copy.grad = None

    def add_parts(self, buffer: torch.Tensor, reached: Iterable[torch.nn.Parameter]) -> None:
        """Gradients of all that learns, as ``parts_of`` lays them out, are added; ``reached``: by which is more."""
        for weight in reached:
            self._gradient(weight)
        assert self.total is not None
        add(self.total, buffer)

    def _gradient(self, weight: torch.nn.Parameter) -> torch.Tensor:
        """The float32 gradient of a weight in this step; zero before anything was added."""
        if weight.grad is None:
            if self.total is None:
                self.total = torch.zeros(sum(one.numel() for one in self.learning), device=weight.device)
                self.parts = dict(zip(self.learning, parts_of(self.total, self.learning), strict=True))
            weight.grad = self.parts[weight]
        return weight.grad

    def forget_gradients(self) -> None:
        """Nothing of this step's is left; the optimizer has forgotten its own."""
        for copy in self.copies.values():
            copy.grad = None
        self.total, self.parts = None, {}

    def _copy(self, weight: torch.nn.Parameter) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.empty_like(weight, dtype=self.dtype), requires_grad=weight.requires_grad)

    def _hold(self, chosen: dict[torch.nn.Parameter, torch.nn.Parameter]) -> None:
        for part, name, weight in self.places:
            setattr(part, name, chosen[weight])


def parts_of(buffer: torch.Tensor, weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Parts of a flat buffer, one behind the other, each of the shape of its weight."""
    weights = list(weights)
    pieces = buffer.split([weight.numel() for weight in weights])
    return [piece.view(weight.shape) for piece, weight in zip(pieces, weights, strict=True)]


def add(total: torch.Tensor, part: torch.Tensor) -> None:
    """A float32 total += its part, of a lower dtype."""
    if total.is_cuda and total.numel() >= LARGE:
        from trainers.backends.fsdp.one_worker import gradient_kernels

        gradient_kernels.add(total, part)
    else:
        total += part
