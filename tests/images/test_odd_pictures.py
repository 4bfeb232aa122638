"""Pictures of odd shapes and kinds: what transformers makes of them, or a broken row. Texts that look like pictures."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoConfig, AutoTokenizer, MiniCPMV4_6Config
from transformers.image_utils import load_image

from benchmarks.tiny.vision import MODELS, picture, png, save_vision
from rayhelper import ConfigError
from tests.conftest import without_runtime
from tests.e2e.runs import grpo_config, sft_config
from tests.golden.tiny import tiny_tokenizer
from tests.images.test_sft import turns
from trainers.backends.fsdp.hf_model import build_model
from trainers.backends.fsdp.vision.pixels import Vision
from trainers.data.images import processor as processors
from trainers.data.images.conversations import encoded, picture_mistake, placed
from trainers.data.images.processor import ImageReader, load_processor
from trainers.data.rows import load_rows, tokenize_prompts, tokenize_sft
from trainers.data.sources import read_files, read_source
from trainers.grpo.trainer import GRPOTrainer
from trainers.sft.trainer import SFTTrainer


def odd_pictures(folder: Path) -> dict[str, Path]:
    """Files of each kind."""
    whole = picture(3)  # 16 x 48
    alpha = whole.convert("RGBA")
    alpha.putalpha(Image.linear_gradient("L").resize(whole.size))
    palette = alpha.quantize(16)
    palette.info["transparency"] = 3
    deep = Image.frombytes("I;16", (24, 24), bytes(range(256)) * 4 + bytes(range(128)))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    made: dict[str, tuple[Image.Image, dict[str, Any]]] = {
        "one_high.png": (whole.resize((40, 1)), {}),
        "one_wide.png": (whole.resize((1, 40)), {}),
        "one.png": (whole.resize((1, 1)), {}),
        "wide.png": (whole.resize((400, 8)), {}),
        "thread.png": (whole.resize((900, 3)), {}),
        "alpha.png": (alpha, {}),
        "palette.png": (palette, {}),
        "grey.png": (whole.convert("L"), {}),
        "grey_alpha.png": (alpha.convert("LA"), {}),
        "bits.png": (whole.convert("1"), {}),
        "deep.png": (deep, {}),
        "cmyk.jpg": (whole.convert("CMYK"), {}),
        "turned.jpg": (whole, {"exif": exif}),
        "still.gif": (palette, {}),
    }
    for name, (image, options) in made.items():
        image.save(folder / name, **options)
    return {name: folder / name for name in made}


@pytest.mark.parametrize("name", MODELS)
def test_an_odd_picture_is_what_transformers_makes_of_it_or_a_broken_row(name: str, tmp_path: Path) -> None:
    model = save_vision(tmp_path / "model", name)
    tokenizer, processor = AutoTokenizer.from_pretrained(model), load_processor(model)
    reader = ImageReader(tokenizer, model)
    vision = Vision(build_model(model, dtype=torch.float32, device=torch.device("cpu")), model)
    num_taken = 0
    for file in odd_pictures(tmp_path).values():
        row = {"prompt": [{"role": "user", "content": "<image>How many?"}], "images": [str(file)]}
        parts = [{"type": "image"}, {"type": "text", "text": "How many?"}]
        shown = tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        wanted, why = None, ""
        try:
            wanted = processor(text=[shown], images=[[load_image(str(file))]], return_tensors="pt")
        except (ValueError, ArithmeticError, RuntimeError, LookupError) as error:
            why = f"pixels) cannot be read: {error}"
        mistake = reader.mistake(row)
        if wanted is None:
            assert mistake is not None
            assert why in mistake[1]
            continue
        num_taken += 1
        assert mistake is None
        (ids,) = tokenize_prompts([row], tokenizer, images=reader)
        assert ids == wanted["input_ids"][0].tolist(), file.name
        for key, pixels in vision.seen([reader.prompt(row)[1]]).items():
            assert torch.equal(pixels, wanted[key]), f"{file.name}: {key}"
    assert num_taken >= 9


def test_pictures_in_memory_of_any_kind_are_read_like_their_files(tmp_path: Path) -> None:
    model = save_vision(tmp_path / "model")
    reader = ImageReader(AutoTokenizer.from_pretrained(model), model)
    for file in odd_pictures(tmp_path).values():
        for kind in (file.read_bytes(), Image.open(file)):
            (found,) = reader.prompt({"prompt": [{"role": "user", "content": "?"}], "images": [kind]})[1]
            assert found.image().tobytes() == load_image(str(file)).tobytes(), file.name


def test_a_thin_picture_is_told_before_the_first_step_or_left_out(tmp_path: Path) -> None:
    model, thread = save_vision(tmp_path / "model"), str(odd_pictures(tmp_path)["thread.png"])
    prompt = [{"role": "user", "content": "<image>?"}]
    rows = [{"prompt": prompt, "images": [png(0)]}, {"prompt": prompt, "images": [thread]}]
    with without_runtime():
        with pytest.raises(ConfigError, match=r"1 of 2 rows are broken: row 1 \(images: image 0 .*900 x 3 pixels"):
            GRPOTrainer(grpo_config(model, tmp_path, dataset=rows, eval_dataset=None))
        kept = GRPOTrainer(grpo_config(model, tmp_path, dataset=rows, eval_dataset=None, skip_broken_rows=True))
        assert len(kept.rows) == 1


PAD = "<|image_pad|>"
KINDS: dict[str, Any] = {
    "path": "0.png",
    "Path": Path("0.png"),
    "bytes": png(0),
    "PIL": picture(0),
    "base64": base64.b64encode(png(0)).decode(),
    "lines of base64": base64.encodebytes(png(0)).decode(),
    "mapping of bytes": {"bytes": png(0), "path": None},
    "mapping of a path": {"path": "0.png"},
    "mapping of a PIL.Image": {"image": picture(0)},
}


@pytest.mark.parametrize("first", KINDS)
def test_rows_in_memory_may_hold_pictures_of_any_kinds(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first kind in one row and another in the next, in the column and in parts of messages."""
    monkeypatch.chdir(tmp_path)
    Path("0.png").write_bytes(png(0))
    for other in KINDS.values():
        values = [KINDS[first], other]
        in_parts = [[{"type": "image", "image": one}, {"type": "text", "text": "?"}] for one in values]
        for rows in (
            [{"messages": turns("<image>?", "a"), "images": [one]} for one in values],
            [{"messages": turns("<image>?", "a"), "images": one} for one in (values[0], values[1:])],
            [{"messages": [{"role": "user", "content": parts}, turns("", "a")[1]]} for parts in in_parts],
        ):
            found = [placed(row)[1] for row in read_source(rows)]
            assert [one.image().tobytes() for pictures in found for one in pictures] == [picture(0).tobytes()] * 2
        frames = [{"messages": turns("<video>?", "a"), "videos": [[one, one]]} for one in values]
        for row in read_source([*frames, {"messages": turns("<video>?", "a"), "videos": "0.mp4"}]).select([0, 1]):
            ((video,),) = [placed(row)[1]]
            assert [one.image().tobytes() for one in video.source] == [picture(0).tobytes()] * 2


def test_files_whose_pictures_have_other_types_are_joined(tmp_path: Path) -> None:
    messages, decoded = turns("<image>?", "a"), picture(0).tobytes()
    (tmp_path / "0.png").write_bytes(png(0))
    paths, single, blind, tables = (tmp_path / f"{name}" for name in ("a.jsonl", "b.jsonl", "c.jsonl", "d.parquet"))
    for file, images in ((paths, ["0.png"]), (single, "0.png"), (blind, [])):
        file.write_text(json.dumps({"messages": messages if images else turns("?", "a"), "images": images}) + "\n")
    Dataset.from_list([{"messages": messages, "images": [picture(0)]}]).to_parquet(tables)
    for files in ([paths, tables], [tables, paths], [blind, single, tables, paths]):
        found = [placed(row)[1] for row in encoded(read_source(files))]
        assert [one.image().tobytes() for pictures in found for one in pictures] == [decoded] * (
            len(files) - (blind in files)
        )
    renamed = read_source(tables).rename_column("images", "pictures")
    with pytest.raises(ValueError, match="1 of 1 rows have images, which this run cannot read"):
        load_rows(renamed, columns={"pictures": "images"})


def test_what_is_no_picture_is_told_with_its_row_or_left_out() -> None:
    rows = [{"messages": turns("<image>?", "a"), "images": [one]} for one in (png(0), np.zeros((4, 4, 3)))]
    with pytest.raises(ValueError, match="1 of 2 rows are broken: row 1 has a picture of type ndarray: a picture is a"):
        read_source(rows)
    assert len(read_source(rows, skip_broken=True)) == 1
    for value, told in (
        ("s3://a/b.png", "is an address of s3://, which"),
        (" ", "path of a picture is an empty"),
        (b"", "it is not a picture"),
    ):
        assert told in str(picture_mistake({"messages": turns("<image>?", "a"), "images": [value]}))


@pytest.mark.parametrize("content", ["<image> seen", [{"type": "image"}, {"type": "text", "text": " seen"}]])
def test_what_a_tool_answers_may_have_pictures(content: Any, tmp_path: Path) -> None:
    """It was text, and the picture of the row was lost."""
    model = save_vision(tmp_path / "model")
    asked = {"role": "user", "content": "look"}
    rows = [{"messages": [asked, {"role": role, "content": content}, turns("", "a")[1]]} for role in ("tool", "user")]
    keys: dict[str, Any] = {"eval_dataset": None, "max_length": None}
    with without_runtime():
        tool, user = (
            SFTTrainer(sft_config(model, tmp_path, dataset=[row | {"images": [png(0)]}], **keys)).sequences
            for row in rows
        )
    assert tool.images == user.images
    assert (tool.input_ids.values > 260).sum() == (user.input_ids.values > 260).sum() >= 12


def test_a_completion_with_a_picture_is_a_broken_row_and_those_in_answers_are_not_learned(tmp_path: Path) -> None:
    model = save_vision(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = tokenizer.chat_template.replace("part['text']", "part['text'] or '<|image_pad|>'", 1)
    reader = ImageReader(tokenizer, model)
    row = {"prompt": turns("?", "")[:1], "completion": turns("", "an <image>")[1:], "images": [png(0)]}
    told = reader.mistake(row)
    assert told is not None
    assert "completion has an image: only the prompt may have images. Write messages, of which" in told[1]
    rows = read_source([{"messages": turns("?", "an <image>!"), "images": [png(0)]}])
    for keys, learns in (({}, True), ({"assistant_only_loss": True}, False)):
        found = tokenize_sft(rows, tokenizer, max_length=None, images=reader, **keys)
        learned = found.input_ids.values[found.target_mask.values]
        assert (reader.num_image_tokens(learned) == 12) == learns
        assert (
            tokenizer.decode(learned).replace("<|image_pad|>", "").endswith("an !<|im_end|>\n"[: -1 if keys else None])
        )


LIKE: dict[str, tuple[str, dict[str, Any], str]] = {
    "question": ("qwen2_5_vl", {"messages": turns(f"What is {PAD}?", "a"), "images": []}, PAD),
    "beside a picture": ("qwen2_5_vl", {"messages": turns(f"<image> or {PAD}?", "a"), "images": [png(1)]}, PAD),
    "in its place": ("qwen2_5_vl", {"messages": turns(f"{PAD}?", "a"), "images": [png(1)]}, PAD),
    "answer": ("qwen2_5_vl", {"messages": turns("What?", f"{PAD}"), "images": []}, PAD),
    "part": (
        "qwen2_5_vl",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": PAD}]}, turns("", "a")[1]]},
        PAD,
    ),
    "mark": ("llava_onevision", {"messages": turns("What does <image> mean?", "a"), "images": []}, "<image>"),
}


@pytest.mark.parametrize("name", LIKE)
def test_a_text_that_holds_a_token_of_pictures_is_a_broken_row(name: str, tmp_path: Path) -> None:
    kind, broken, told = LIKE[name]
    model = save_vision(tmp_path / "model", kind)
    good = {"messages": turns("<image>What?", "one"), "images": [png(0)]}
    rows = [good, {"images": None} | broken, good]
    keys: dict[str, Any] = {"eval_dataset": None, "max_length": None, "dataset": rows}
    with without_runtime():
        with pytest.raises(ConfigError, match="1 of 3 rows are broken: row 1") as error:
            SFTTrainer(sft_config(model, tmp_path, **keys))
        assert f"a text holds {told!r}, which is reserved for a part of a picture" in str(error.value)
        kept = SFTTrainer(sft_config(model, tmp_path, **keys, skip_broken_rows=True))
        assert len(kept.sequences) == 2
        assert kept.sequences.images is not None
    assert AutoConfig.from_pretrained(model).model_type == kind


def test_a_processor_that_asks_its_part_for_videos_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other than MiniCPM-V's, of which it is known what it asks for."""
    monkeypatch.setattr(processors, "ASKING", ())
    from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil

    MiniCPMV4_6Config().save_pretrained(tmp_path)
    MiniCPMV4_6ImageProcessorPil().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"MiniCPMV4_6Processor of .* cannot be loaded without its part for videos"):
        load_processor(str(tmp_path))


def test_a_relative_path_starts_in_the_folder_of_the_data_then_in_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("data/both.png", "both.png", "here.png"):
        (tmp_path / name).write_bytes(png(0))
    names = ["both.png", "here.png", "nowhere.png"]
    row = {"messages": turns("<image>What?", "one"), "images": names[2:], "videos": [names]}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = read_files([folder / "rows.jsonl"], False)
    assert found["videos"] == [[str(folder / "both.png"), "here.png", str(folder / "nowhere.png")]]
    (folder / "renamed.jsonl").write_text(json.dumps({"said": row["messages"], "pictures": names[:1]}) + "\n")
    (renamed,) = load_rows(
        str(folder / "renamed.jsonl"), columns={"pictures": "images", "said": "messages"}, images=True
    )
    assert renamed["images"] == [str(folder / "both.png")]
    told = picture_mistake({"messages": row["messages"], "images": found["images"]})
    assert told == ("images", f"image 0 {str(folder / 'nowhere.png')!r} does not exist")
