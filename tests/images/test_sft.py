"""SFT of vision models: loss, gradients and tokens are transformers' own, however the rows are put together."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from benchmarks.tiny.vision import MODELS, picture, png, save_vision
from tests.backends.batches import mean_loss
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.batch import Sequences
from trainers.data.images.processor import ImageReader, load_processor, seeing_part, video_refusal
from trainers.data.rows import pack, tokenize_sft

MARGIN = 1e-5
PACKS = [name for name in MODELS if name != "qwen3_5"]  # whose recurrent layers need kernels for that


def turns(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


ROWS: list[dict[str, Any]] = [
    {"messages": turns("<image>How many?", "one"), "images": [png(0)]},
    {"messages": turns("No picture here", "none at all"), "images": []},
    {"messages": turns("A <image> and <image>, and <image>?", "three"), "images": [png(1), png(2), png(3)]},
    {"messages": turns("What is it? <image>", "a"), "images": [png(4)]},
    {"messages": turns("again <image>", "two words"), "images": [png(1)]},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: save_vision(tmp_path_factory.mktemp(name), name) for name in MODELS}


def sequences_of(model: str, rows: list[dict[str, Any]] = ROWS, **options: Any) -> Sequences:
    tokenizer = AutoTokenizer.from_pretrained(model)
    reader = ImageReader(tokenizer, model)
    return tokenize_sft(Dataset.from_list(rows), tokenizer, max_length=None, images=reader, **options)


def transformers_gradients(model: str, rows: list[dict[str, Any]] = ROWS) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean loss of all tokens but the first, and its gradients: the processor's batch, through the model itself."""
    module = whole_of(model)
    loss = -torch.cat(transformers_logps(module, model, rows)).mean()
    loss.backward()
    return loss.item(), {name: w.grad for name, w in module.named_parameters() if w.grad is not None}


def whole_of(model: str) -> Any:
    """The model as transformers has it; of one that also speaks the part that sees and reads."""
    config = AutoConfig.from_pretrained(model)
    thinker = seeing_part(config)
    if thinker is config:
        return AutoModelForImageTextToText.from_pretrained(model)
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(thinker)].from_pretrained(model, config=thinker)


def transformers_logps(module: Any, model: str, rows: list[dict[str, Any]] = ROWS) -> list[torch.Tensor]:
    """(T - 1,) of each row, of all tokens but the first."""
    processor = load_processor(model)
    found = []
    for row in rows:  # alone, so that nothing of how a batch is put together plays a part
        number = len(row["images"])
        parts = [{**turn, "content": parts_of(turn["content"])} for turn in row["messages"]]
        text = processor.tokenizer.apply_chat_template(parts, tokenize=False)
        images = [[image_of(value) for value in row["images"]]] if number else None
        batch = dict(processor(text=[text], images=images, return_tensors="pt"))
        found.append(logps_of(module, batch))
    return found


def logps_of(module: Any, batch: dict[str, Any]) -> torch.Tensor:
    """(T - 1,) log-probabilities that the module gives a processor's batch of one row."""
    ids_T = batch["input_ids"][0]
    logps_TV = module(**taken_by(module, batch)).logits[0].float().log_softmax(-1)
    return logps_TV[:-1].gather(1, ids_T[1:, None])[:, 0]


def taken_by(module: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """What the module takes of a processor's batch: some marks of pictures are of other models."""
    taken = inspect.signature(module.forward).parameters
    full = {name: value.float() if value.dtype == torch.bfloat16 else value for name, value in batch.items()}
    return {name: value for name, value in full.items() if name != "mm_token_type_ids" or name in taken}


def parts_of(content: str) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split("<image>")):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def image_of(value: bytes) -> Any:
    return next(picture(number) for number in range(8) if png(number) == value)


def our_gradients(model: str, batch: Sequences, **settings: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The same by one step of the backend, whose gradients are not clipped."""
    size = settings.pop("micro_batch_size", 8)
    backend = FsdpBackend(model, learning_rate=0.0, max_grad_norm=0.0, num_training_steps=2, **settings)
    names = [name for name, weight in backend.module.named_parameters()]
    found: dict[str, torch.Tensor] = {}

    def step(*_: Any, **__: Any) -> None:
        found.update({n: w.grad.clone() for n, w in backend.module.named_parameters() if w.grad is not None})

    assert backend.optimizer is not None
    backend.optimizer.register_step_pre_hook(step)
    normaliser = float(batch.target_mask.values.sum())
    metrics = backend.step(batch, lambda *args, **extra: mean_loss(normaliser, *args), micro_batch_size=size)
    assert names
    return metrics.values()["loss"], found


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Equal gradients to 1e-5 of the largest; where transformers has none ours are zero, and the other way round."""
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    for name in {**ours, **theirs}:
        one, other = (found.get(name) for found in (ours, theirs))
        one = torch.zeros_like(other) if one is None else one
        other = torch.zeros_like(one) if other is None else other
        assert float((one - other).abs().max()) <= MARGIN * max(1.0, largest), name


def transpose_experts(folder: str) -> None:
    """Writes experts as Qwen's own files of Qwen3-VL have them."""
    file = Path(folder) / "model.safetensors"
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


def test_experts_of_qwen3_vl_are_read_and_written_as_its_own_files_have_them(tmp_path: Path) -> None:
    folder = save_vision(tmp_path / "model", "qwen3_vl_moe")
    transpose_experts(folder)
    backend = FsdpBackend(folder)
    backend.export(tmp_path / "out")
    backend.save(tmp_path / "checkpoint")
    before = load_file(Path(folder) / "model.safetensors")
    assert before["model.language_model.layers.0.mlp.experts.down_proj"].shape == (4, 24, 32)
    for name in ("out", "checkpoint"):
        after = load_file(tmp_path / name / "model.safetensors")
        assert before.keys() == after.keys()
        assert all(torch.equal(after[key], value) for key, value in before.items()), name
    weights = dict(backend.named_weights())
    backend.load(tmp_path / "checkpoint")
    assert all(torch.equal(weights[key], value) for key, value in backend.named_weights())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [8, 1])
def test_loss_and_gradients_of_rows_with_no_one_and_several_pictures_are_those_of_transformers(
    name: str, size: int, folders: dict[str, str]
) -> None:
    loss, theirs = transformers_gradients(folders[name])
    assert any("vis" in weight for weight in theirs), "the tower learns"
    our_loss, ours = our_gradients(folders[name], sequences_of(folders[name]), micro_batch_size=size)
    assert our_loss == pytest.approx(loss, abs=MARGIN)
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", ["glm46v", "glm4v_moe", "paddleocr_vl"])
def test_so_are_those_of_models_that_runs_are_not_tested_with(name: str, tmp_path: Path) -> None:
    model = save_vision(tmp_path, name)
    loss, theirs = transformers_gradients(model)
    our_loss, ours = our_gradients(model, sequences_of(model), padding_free=True)
    assert our_loss == pytest.approx(loss, abs=MARGIN)
    assert_same(ours, theirs)


def test_so_are_those_of_minicpm_v_whose_patches_stand_in_one_row(tmp_path: Path) -> None:
    model = save_vision(tmp_path, "minicpmv4_6")
    loss, theirs = transformers_gradients(model)
    our_loss, ours = our_gradients(model, sequences_of(model))
    assert our_loss == pytest.approx(loss, abs=MARGIN)
    assert_same(ours, theirs)
    blind = our_gradients(model, sequences_of(model, [{"messages": turns("?", "some"), "images": []}]))[1]
    assert blind.keys() == ours.keys()
    assert "not shown here" in str(video_refusal(model))


@pytest.mark.parametrize("name", PACKS)
@pytest.mark.parametrize("way", ["padding_free", "packed"])
def test_pictures_in_rows_of_several_documents_have_the_positions_that_they_have_alone(
    name: str, way: str, folders: dict[str, str]
) -> None:
    loss, theirs = transformers_gradients(folders[name])
    batch = sequences_of(folders[name])
    if way == "packed":
        longest = int(batch.input_ids.lengths.max())
        batch = pack(batch, max_length=2 * longest)
        assert len(batch) < len(ROWS)
        assert batch.images is not None
        assert sum(len(pictures) for row in batch.images for pictures in row) == sum(len(row["images"]) for row in ROWS)
    our_loss, ours = our_gradients(folders[name], batch, padding_free=way == "padding_free")
    assert our_loss == pytest.approx(loss, abs=MARGIN)
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_without_pictures_gives_gradients_to_the_weights_of_a_step_with_some(
    name: str, folders: dict[str, str]
) -> None:
    seen, blind = (
        our_gradients(
            folders[name], sequences_of(folders[name], [{"messages": turns(text, "some"), "images": images}])
        )[1]
        for text, images in (("<image>?", [png(1)]), ("?", []))
    )
    assert seen.keys() == blind.keys()
    tower = [gradient for weight, gradient in blind.items() if "vis" in weight]
    assert tower
    assert not any(bool(gradient.any()) for gradient in tower)
