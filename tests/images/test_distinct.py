"""A vision tower sees equal pictures of a pass once, and the numbers are those of transformers on all of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from benchmarks.tiny.vision import MODELS, png, save_vision
from tests.backends.batches import mean_loss
from tests.backends.ranks import run_ranks
from tests.images.test_sft import MARGIN, assert_same, our_gradients, sequences_of, transformers_gradients, turns
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.fsdp.vision.distinct import see_once
from trainers.backends.fsdp.vision.parts import freeze
from trainers.backends.megatron.vision.tower import Tower

A, B, C = (png(number) for number in (0, 1, 2))
FROZEN: dict[str, Any] = {"frozen": ["vit", "aligner"]}


def rows_of(*pictures: list[bytes]) -> list[dict[str, Any]]:
    """A row of so many pictures each, and an answer of its own."""
    texts = ["one", "two words", "three", "a", "none at all", "it is four"]
    return [
        {"messages": turns(f"{'<image>' * len(shown)}What?", texts[k]), "images": shown}
        for k, shown in enumerate(pictures)
    ]


ROWS = rows_of([A], [A], [], [B, A], [A], [C, B])  # A 4 times, B twice


def first_layer(tower: Any) -> Any:
    """What makes numbers of patches."""
    return next(part for part in tower.modules() if isinstance(part, (torch.nn.Conv2d, torch.nn.Conv3d)))


def num_seen(module: Any) -> list[int]:
    """Where the numbers of pixels of each pass of the tower will stand."""
    found: list[int] = []
    first_layer(module.get_encoder(modality="image")).register_forward_pre_hook(
        lambda _, given: found.append(given[0].numel())
    )
    return found


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return save_vision(tmp_path, request.param)


def test_numbers_are_those_of_transformers_whatever_learns(model: str) -> None:
    loss, theirs = transformers_gradients(model, ROWS)
    module = AutoModelForImageTextToText.from_pretrained(model)
    for frozen in ([], ["vit"], ["vit", "aligner"]):
        our_loss, ours = our_gradients(model, sequences_of(model, ROWS), vision={"frozen": frozen})
        assert our_loss == pytest.approx(loss, abs=MARGIN)
        freeze(module, frozen)
        learned = {name for name, weight in module.named_parameters() if weight.requires_grad}
        assert_same(ours, {name: gradient for name, gradient in theirs.items() if name in learned})


def test_the_tower_sees_each_picture_once_and_gives_the_numbers_of_all(model: str) -> None:
    backend = FsdpBackend(model, vision=FROZEN)
    batch, once = sequences_of(model, ROWS), sequences_of(model, rows_of([A], [B, A, C]))
    found = num_seen(backend.module)
    logps = backend.token_logps(batch, micro_batch_size=8).values
    backend.token_logps(once, micro_batch_size=8)
    assert found[0] == found[1]
    each = backend.token_logps(batch, micro_batch_size=1).values
    assert abs(logps - each).max() <= MARGIN


def test_a_tower_that_drops_at_random_sees_all_pictures_in_training(tmp_path: Path) -> None:
    model = save_vision(tmp_path, "internvl")  # with dropout of 0.1 in its tower
    settings: dict[str, Any] = {"learning_rate": 0.0, "num_training_steps": 2, "disable_dropout": False}
    backend = FsdpBackend(model, vision=FROZEN, **settings)
    found, batch = num_seen(backend.module), sequences_of(model, rows_of([A], [A]))
    backend.step(batch, partial(mean_loss, 1.0), micro_batch_size=8)
    backend.token_logps(batch, micro_batch_size=8)
    assert found[0] == 2 * found[1]


class Mixing(torch.nn.Module):
    """A tower whose features of a picture have something of the others."""

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"last_hidden_state": pixel_values.flatten(1) + pixel_values.mean()}


class Flat(torch.nn.Module):
    """One whose features have no rows of each picture."""

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"last_hidden_state": pixel_values.flatten()[None]}


@pytest.mark.parametrize("kind", [Mixing, Flat])
def test_a_tower_whose_pictures_are_not_apart_is_left_as_it_is(kind: type[torch.nn.Module]) -> None:
    tower, pixels = kind(), torch.arange(12.0).view(2, 1, 2, 3)[[0, 1, 0]]
    wanted = tower(pixels)
    assert not see_once(tower, lambda: tower(pixels))
    assert torch.equal(tower(pixels)["last_hidden_state"], wanted["last_hidden_state"])


def test_pictures_of_other_shapes_with_the_same_pixels_are_apart(tmp_path: Path) -> None:
    """White strips, wide and tall: their patches are equal, and where these lie is not."""
    import io

    from PIL import Image

    def white(*size: int) -> bytes:
        written = io.BytesIO()
        Image.new("RGB", size, "white").save(written, "PNG")
        return written.getvalue()

    model = save_vision(tmp_path, "qwen2_5_vl")
    backend = FsdpBackend(model, vision=FROZEN)
    batch = sequences_of(model, rows_of([white(32, 16)], [white(16, 32)], [white(32, 16)]))
    found = num_seen(backend.module)
    together, each = (backend.token_logps(batch, micro_batch_size=size).values for size in (8, 1))
    assert found[0] == sum(found[1:3])
    assert abs(together - each).max() <= MARGIN


def step_of(rank: int, model: str, batches: list[Any]) -> dict[str, torch.Tensor]:
    settings: dict[str, Any] = {"learning_rate": 0.01, "num_training_steps": 2, "sharding": "full_shard"}
    backend = FsdpBackend(model, vision=FROZEN, **settings)
    normaliser = float(sum(batch.target_mask.values.sum() for batch in batches))
    backend.token_logps(batches[rank], micro_batch_size=8)
    backend.step(batches[rank], partial(mean_loss, normaliser), micro_batch_size=8)
    return {name: weight.clone() for name, weight in backend.named_weights()}


def test_ranks_of_shards_stay_in_step_where_one_has_equal_pictures_and_one_has_none(tmp_path: Path) -> None:
    model = save_vision(tmp_path / "model", "qwen3_vl")
    both = [sequences_of(model, rows) for rows in (rows_of([A], [A], [A]), rows_of([], [A, B], []))]
    found = run_ranks(2, step_of, model, both, folder=tmp_path)
    whole = [sequences_of(model, [*rows_of([A], [A], [A]), *rows_of([], [A, B], [])])]
    for name, weight in step_of(0, model, whole).items():
        for rank in found:
            assert float((rank[name] - weight).abs().max()) <= MARGIN, name


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_so_does_the_tower_of_megatrons_first_stage(name: str, tmp_path: Path) -> None:
    model = save_vision(tmp_path, name)
    tower = Tower.of(AutoConfig.from_pretrained(model), model, dtype=torch.float32, **FROZEN)
    assert tower is not None
    tower.build()
    found = num_seen(tower.vision.module)
    equal, once = (sequences_of(model, rows_of(*shown)).images or [] for shown in ([[A], [A], [A, B]], [[A], [B]]))
    given, wanted = (tower.part.get_image_features(**tower.vision.seen(rows)).pooler_output for rows in (equal, once))
    assert found[0] == found[1]
    assert torch.equal(torch.cat([wanted[k] for k in (0, 0, 0, 1)]), torch.cat(given))
