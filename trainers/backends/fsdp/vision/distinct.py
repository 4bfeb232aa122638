"""A vision tower that sees equal pictures once: it runs on the distinct ones, and its features are repeated.

    completions of a prompt   [a a a a b b]  --distinct-->  [a b]  --tower-->  [A B]  --repeated-->  [A A A A B B]

    see_once(tower, ask)

A prompt's picture stands in the rows of all its completions, so that most pictures of a pass of GRPO are equal. The
numbers are those of the tower on all pictures, and gradients add up over equal ones. Pictures are equal where every
number is. The tower runs once in each pass, as before, so that ranks which gather its shards stay in step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from trainers.backends.random_state import dropouts

GRID = "grid_thw"  # the argument of towers that take the patches of all pictures in one row
NUM_SAMPLED = 16  # numbers of each picture that are compared first
TOLERANCE = 5e-2  # of the largest number, in any dtype


class UnfitError(ValueError):
    """A tower gives something that is not of one picture each."""


class Repeats(NamedTuple):
    """Where each of N pictures is among the distinct ones, and how many rows of the input each of those has."""

    which_N: list[int]
    lengths: list[int]


def see_once(tower: torch.nn.Module, ask: Callable[[], Any]) -> bool:
    """From now on the tower sees equal pictures once; False: it is left as it is.

    ``ask`` runs the tower on three pictures, of which two are equal, and gives its features. The tower is asked with
    and without, so that one whose pictures are not independent of each other is found. Before weights are sharded.
    """
    distinct = Distinct()
    before = tower.register_forward_pre_hook(distinct.before, with_kwargs=True)
    after = tower.register_forward_hook(distinct.after)
    distinct.is_on = False
    training = tower.training
    tower.eval()
    try:
        with torch.no_grad():
            wanted = list(tensors_in(ask()))
            distinct.is_on = True
            found = list(tensors_in(ask()))
            if distinct.num_repeated and _are_close(found, wanted):
                return True
    except (UnfitError, TypeError, ValueError, AttributeError, KeyError, RuntimeError, IndexError):
        pass  # it cannot be called like that
    finally:
        tower.train(training)
    before.remove()
    after.remove()
    return False


class Distinct:
    """The two hooks of a tower."""

    def __init__(self) -> None:
        self.is_on = True
        self.num_repeated = 0  # pictures that the tower was spared
        self.repeats: Repeats | None = None  # of the pass that is running
        self.is_random: bool | None = None  # whether equal pictures have other features in training

    def before(self, tower: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """The distinct pictures among the tower's arguments."""
        self.repeats = None
        columns = self._columns(args, kwargs) if self.is_on and not self._draws(tower) else []
        if not columns:
            return None
        which_N, firsts = _numbered(list(zip(*columns, strict=True)))
        if len(firsts) == len(which_N):
            return None
        self.num_repeated += len(which_N) - len(firsts)
        self.repeats = Repeats(which_N, [len(columns[0][first]) for first in firsts])
        parts = iter([torch.cat([column[first] for first in firsts]) for column in columns])
        args = tuple(next(parts) if torch.is_tensor(value) else value for value in args)
        return args, {name: next(parts) if torch.is_tensor(value) else value for name, value in kwargs.items()}

    def after(self, tower: torch.nn.Module, args: Any, output: Any) -> Any:
        """The tower's features of all pictures."""
        repeats, self.repeats = self.repeats, None
        return output if repeats is None else _repeated(output, repeats)

    def _columns(self, args: Any, kwargs: Mapping[str, Any]) -> list[tuple[torch.Tensor, ...]]:
        """Of each tensor among the arguments, the part of each picture; none if they cannot be told apart."""
        tensors = [value for value in (*args, *kwargs.values()) if torch.is_tensor(value)]
        if not tensors or any(not tensor.dim() for tensor in tensors):
            return []
        grid = kwargs.get(GRID)
        if torch.is_tensor(grid):
            if len(tensors) != 2 or len(grid) < 2:
                return []
            lengths = grid.prod(-1).tolist()
            is_whole = sum(lengths) == len(tensors[0])
            return [tensor.split(1 if tensor is grid else lengths) for tensor in tensors] if is_whole else []
        number = len(tensors[0])
        if number < 2 or tensors[0].dim() < 3 or any(len(tensor) != number for tensor in tensors):
            return []
        return [tensor.split(1) for tensor in tensors]

    def _draws(self, tower: torch.nn.Module) -> bool:
        """Whether the tower draws what it drops, or looks at all pictures of a pass, in training."""
        if not tower.training:
            return False
        if self.is_random is None:
            norms = any(isinstance(part, torch.nn.modules.batchnorm._BatchNorm) for part in tower.modules())
            self.is_random = norms or any(getattr(holder, name) for holder, name in dropouts(tower))
        return self.is_random


def _numbered(pictures: list[tuple[torch.Tensor, ...]]) -> tuple[list[int], list[int]]:
    """Which of the distinct pictures each one is, and where each distinct one stands first."""
    sampled = []
    for picture in pictures:
        values = picture[0].flatten()
        places = torch.arange(NUM_SAMPLED, device=values.device) * (len(values) // NUM_SAMPLED)
        sampled.append(values[places].double())
    told = torch.stack(sampled).tolist()
    which_N: list[int] = []
    firsts: list[int] = []
    alike: dict[Any, list[int]] = {}
    for number, picture in enumerate(pictures):
        key = (*(tuple(part.shape) for part in picture), *told[number])
        among = alike.setdefault(key, [])
        found = next((k for k in among if _are_equal(pictures[firsts[k]], picture)), len(firsts))
        if found == len(firsts):
            among.append(found)
            firsts.append(number)
        which_N.append(found)
    return which_N, firsts


def _are_equal(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def _repeated(value: Any, repeats: Repeats) -> Any:
    """The same with the features of each picture wherever it is.

    Raises UnfitError for a tensor that does not have as many rows for each picture as its share.
    """
    if torch.is_tensor(value):
        rows, total = len(value) if value.dim() else 0, sum(repeats.lengths)
        if not rows or total % rows or any(length % (total // rows) for length in repeats.lengths):
            raise UnfitError(f"{tuple(value.shape)} of pictures of {repeats.lengths}")
        parts = value.split([length // (total // rows) for length in repeats.lengths])
        return torch.cat([parts[k] for k in repeats.which_N])
    if isinstance(value, Mapping):
        return type(value)(**{name: _repeated(one, repeats) for name, one in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(_repeated(one, repeats) for one in value)
    if value is not None:
        raise UnfitError(f"a value of {type(value).__name__}")
    return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of a tower's outputs, in order."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(one)


def _are_close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """Whether features are equal within rounding; those of weights that are yet to be read may be no numbers."""
    if [one.shape for one in found] != [one.shape for one in wanted]:
        return False
    pairs = [(one.float().nan_to_num(), other.float().nan_to_num()) for one, other in zip(found, wanted, strict=True)]
    return all(bool((one - other).abs().max() <= TOLERANCE * other.abs().max()) for one, other in pairs)
