"""Whether an engine has the trainer's weights is found out; how they get to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from rayhelper import Channel
from tests.golden.tiny import save_tiny, tiny_tokenizer
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.configuration.completion import CompletionConfig
from trainers.parts.weights import StaleWeightsError, check, copy, exported, receive, send, way_of
from trainers.rollout.hf.engine import HfEngine

K_PROJ = "model.layers.1.self_attn.k_proj.weight"
NORM = "model.norm.weight"
Weights = Iterable[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The policy's, and one with other weights."""
    policy, other = (tmp_path_factory.mktemp(name) for name in ("policy", "other"))
    return save_tiny(policy), save_tiny(other, seed=1)


@pytest.fixture(scope="module")
def backend(models: tuple[str, str]) -> FsdpBackend:
    backend = FsdpBackend(models[0], learning_rate=1e-3, num_training_steps=1)
    with torch.no_grad():
        dict(backend.named_weights())[NORM].add_(0.3)  # all ones would not show an error
    return backend


def config_of(model: str, **keys: Any) -> CompletionConfig:
    return CompletionConfig(model=model, dataset=[{"prompt": "a"}], dtype="float32", output_dir="unused", **keys)


class CarelessEngine(HfEngine):
    """Does something to weights before it takes them."""

    def __init__(self, model: str, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__(model, tiny_tokenizer())
        self.change = change

    def load_weights(self, named_weights: Weights, *, part: bool = False, version: int | None = None) -> None:
        changed = ((name, self.change(name, weight)) for name, weight in named_weights)
        kept = ((name, weight) for name, weight in changed if weight is not None)
        super().load_weights(kept, part=True, version=version)


def drops_one(name: str, weight: torch.Tensor) -> torch.Tensor | None:
    return None if name == K_PROJ else weight


def rounds_one(name: str, weight: torch.Tensor) -> torch.Tensor:
    return weight.bfloat16().float() if name == NORM else weight


def by_copy(config: CompletionConfig, backend: FsdpBackend, engine: HfEngine) -> None:
    copy(config, backend, engine, 1)


def by_channel(config: CompletionConfig, backend: FsdpBackend, engine: HfEngine) -> None:
    with Channel() as channel:
        send(config, backend, channel, 1)
        receive(engine, channel)


WAYS = [by_copy, by_channel]
CARELESS = [(drops_one, "model.layers.1"), (rounds_one, NORM)]


@pytest.mark.parametrize("way", WAYS)
def test_weights_arrive_whole(way: Any, models: tuple[str, str], backend: FsdpBackend) -> None:
    engine = HfEngine(models[1], tiny_tokenizer())
    way(config_of(models[0]), backend, engine)
    found = dict(engine.module.named_parameters())
    for name, weight in exported(backend).items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("change", "layer"), CARELESS, ids=["dropped", "rounded"])
def test_a_weight_that_was_dropped_or_rounded_is_found(
    way: Any, change: Any, layer: str, models: tuple[str, str], backend: FsdpBackend
) -> None:
    engine = CarelessEngine(models[1], change)
    with pytest.raises(StaleWeightsError, match=rf"1 of \d+ parts .* among them \['{layer}'\]"):
        way(config_of(models[0]), backend, engine)
    way(config_of(models[0], weight_checksum=False), backend, engine)  # whoever asked not to be told is not


def test_nothing_to_compare_with_is_nothing_wrong(models: tuple[str, str]) -> None:
    engine = HfEngine(models[0], tiny_tokenizer())
    check(engine, {})
    check(engine, engine.fingerprints())
    with pytest.raises(StaleWeightsError, match=r"\['model.layers.7'\]"):
        check(engine, engine.fingerprints() | {"model.layers.7": 1})


# --- who gets weights how


def test_the_way_follows_from_who_has_what(models: tuple[str, str], backend: FsdpBackend) -> None:
    apart = HfEngine(models[0], tiny_tokenizer())
    assert way_of(apart, None) == "sent"
    assert way_of(apart, backend) == "copied"
    assert way_of(HfEngine(backend.module, tiny_tokenizer()), backend) == "shared"
