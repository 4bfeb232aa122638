"""What a vision model is called with beside the tokens: pixels, and where pictures stand.

    vision = Vision.of(module, "Qwen/Qwen2.5-VL-3B-Instruct", frozen=["vit"])      # None: the model sees nothing
    seen = vision.seen(micro.images)                               # pixel tensors by the names of the model's arguments

The model's own image processor makes the pixels of a row, on the worker that needs them. They are kept for the next
pass over the same row, up to ``kept.CACHE_BYTES``.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayhelper import ConfigError
from trainers.backends.fsdp.documents import backbone
from trainers.backends.fsdp.vision.distinct import see_once
from trainers.backends.fsdp.vision.parts import Part, freeze, linear_layers, part_of
from trainers.backends.scores.inputs import Dummy
from trainers.data.images.kept import Kept
from trainers.data.images.pictures import Medium, Pictures, pictures_of
from trainers.data.images.processor import Processors, has_videos, is_vision, processed, token_of

IMAGE, VIDEO = 1, 2  # kinds of tokens, as transformers marks them
PIXELS, FRAMES = "pixel_values", "pixel_values_videos"
IN_ONE_ROW = "target_sizes"  # where a model takes these, the patches of all pictures stand in one row (MiniCPM-V)
OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
DUMMY_SIZE = 28  # pixels
PROBES = (((DUMMY_SIZE, DUMMY_SIZE), "grey"), ((2 * DUMMY_SIZE, DUMMY_SIZE), "blue"))  # pictures a tower is asked for
FILES = (  # of a processor; of those that a tokenizer writes too the run's own are kept
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("chat_template.json", "chat_template.jinja"),
    "spk_dict.pt",  # voices of a model that also speaks
)

Pixels = dict[str, torch.Tensor]


class Vision:
    """How the pictures and videos of rows get into a vision model, and which of its parts learn.

    ``processing``, ``videos``: arguments of the image and of the video processor in place of their own. ``frozen``:
    parts that do not learn; ``rates``: learning rates of parts that have their own.
    """

    def __init__(
        self,
        module: Any,
        model: str | Path,
        *,
        trust_remote_code: bool = False,
        processing: Mapping[str, Any] | None = None,
        videos: Mapping[str, Any] | None = None,
        frozen: Sequence[Part] = (),
        rates: Mapping[Part, float] | None = None,
    ) -> None:
        self.module, self.model = module, str(model)
        self.processors = Processors(self.model, trust_remote_code, dict(processing or {}), dict(videos or {}))
        self.frozen, self.parts = tuple(frozen), part_of(module)
        self.rates = {name: rates[part] for name, part in self.parts.items() if part in rates} if rates else {}
        freeze(module, frozen)
        self._kept = Kept(_num_bytes)

    @classmethod
    def of(cls, module: Any, model: str | Path, **options: Any) -> Vision | None:
        """That of a vision model, whose tower then sees equal pictures once; None for others."""
        if not is_vision(module.config):
            return None
        vision = cls(module, model, **options)
        vision.sees_once(backbone(module))
        return vision

    def without_adapter(self) -> list[str]:
        """Linear layers of the parts that are frozen, which get no adapter."""
        return linear_layers(self.module, self.frozen)

    @property
    def processor(self) -> Any:
        return self.processors.of(())

    def seen(self, images: Sequence[Pictures]) -> Pixels:
        """The pixels of all rows in order, of pictures and of videos; none if no row has any.

        Raises ConfigError for videos of several numbers of frames, of a model that takes only one together.


        Some processors make fewer pixels of a picture that has others beside it, so a document is processed by itself.
        """
        found = [self._pixels(document) for row in images if row for document in documents_of(row)]
        names = dict.fromkeys(name for pixels in found for name in pixels)
        if len(shapes := {pixels[FRAMES].shape[1:] for pixels in found if FRAMES in pixels}) > 1:
            counts = ", ".join(sorted(str(shape[0]) for shape in shapes))
            raise ConfigError(
                f"the videos of a micro-batch have {counts} frames. {type(self.module).__name__} needs the same "
                "number of frames in all of them. Write per_device_train_batch_size: 1, or give all videos the same "
                "number of frames."
            )
        is_one_row = IN_ONE_ROW in names
        return {
            name: joined([pixels[name] for pixels in found if name in pixels], in_one_row=is_one_row and name == PIXELS)
            for name in names
        }

    def num_towers(self, images: Sequence[Pictures] | None) -> int:
        """How often a pass runs the tower at most: once for pictures, and once for videos."""
        media = [one for row in images or () if row for document in documents_of(row) for one in document]
        return 2 if has_videos(media) and not all(has_videos([one]) for one in media) else 1

    def dummy(self) -> Pixels:
        """The pixels of a small picture, for passes in which every weight must take part."""
        from PIL import Image

        image = Image.new("RGB", (DUMMY_SIZE, DUMMY_SIZE), (127, 127, 127))
        return self._tensors(self.processor(text=[self.processor.image_token], images=[[image]], return_tensors="pt"))

    def sees_once(self, part: Any) -> bool:
        """The tower of ``part``, which gives the features of pictures, sees equal ones once; False: it cannot.

        Before weights are sharded, and once for a model.
        """
        from PIL import Image

        tower = self.module.get_encoder(modality="image")
        if tower is self.module or not hasattr(part, "get_image_features"):
            return False
        one, other = (pictures_of(Image.new("RGB", size, colour))[0] for size, colour in PROBES)
        try:
            pixels = self.seen([(one,), (other,), (one,)])
        except (ValueError, OSError, ImportError):  # of a processor that rows without pictures do without
            return False
        device = next(tower.parameters()).device
        pixels = {name: value.to(device) for name, value in pixels.items()}
        return see_once(tower, lambda: part.get_image_features(**pixels, return_dict=True))

    def joins(self, scorer: Any, *, trains: bool, shards: bool) -> None:
        """The tower runs in every pass that asks it to: in training, and with shards, which all ranks gather together.

        A pass without pictures runs it on a small one, and multiplies what it gives by zero.
        """
        learns = trains and not {"vit", "aligner"} <= set(self.frozen)
        if shards or learns:
            device = next(self.module.parameters()).device
            scorer.dummy = Dummy({name: value.to(device) for name, value in self.dummy().items()})

    def export(self, folder: Path) -> None:
        """Writes the processor's files beside a model, as they are where the model comes from. One process calls it."""
        for name in FILES:
            found = self._file(name)
            if found is not None and not (folder / name).exists():
                shutil.copyfile(found, folder / name)

    def unread_weights(self) -> dict[str, torch.Tensor]:
        """Weights of the checkpoint that transformers leaves out as it loads the model, such as layers that predict
        several tokens (Qwen3.5). They are written as they were, so that the model is whole."""
        from safetensors import safe_open

        patterns = list(getattr(self.module, "_keys_to_ignore_on_load_unexpected", None) or [])
        index = self._file("model.safetensors.index.json")
        single = self._file("model.safetensors")
        if index is not None:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [file for name in names if (file := self._file(name)) is not None]
        else:
            files = [] if single is None else [single]
        found = {}
        for file in files if patterns else ():
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (it cannot be iterated)
                    if any(re.search(pattern, name) for pattern in patterns):
                        found[name] = opened.get_tensor(name)
        return found

    def _file(self, name: str) -> Path | None:
        """A file of the model, if it is here."""
        from huggingface_hub import try_to_load_from_cache

        found = Path(self.model) / name if Path(self.model).is_dir() else try_to_load_from_cache(self.model, name)
        return Path(found) if isinstance(found, (str, Path)) and Path(found).is_file() else None

    def words_alone(self, sampling: Any) -> Any:
        """The sampling, by which no token is drawn that stands for a part of a picture: there would be no pixels.

        Nor for a part of a sound, of a model that also hears.
        """
        own = sampling.generation_kwargs.get("suppress_tokens") or []
        processor = self.processor
        sounds = processor.tokenizer.convert_tokens_to_ids(list(getattr(processor, "sound_tokens", ())))
        tokens = sorted({*own, *processor.seen_token_ids, *sounds})
        return replace(sampling, generation_kwargs={**sampling.generation_kwargs, "suppress_tokens": tokens})

    def kinds(self, ids: np.ndarray) -> np.ndarray:
        """Of which kind each token is: 0 of text, 1 of a picture, 2 of a video; int64, of the ids' shape."""
        processor = self.processor
        of_images = np.isin(ids, processor.image_token_ids)
        of_videos = np.isin(ids, processor.seen_token_ids) & ~of_images
        found: np.ndarray = IMAGE * of_images.astype(np.int64) + VIDEO * of_videos
        return found

    def _pixels(self, row: tuple[Medium, ...]) -> Pixels:
        key = tuple(picture.key for picture in row)
        return self._kept.get(key, lambda: self._processed(row))

    def _processed(self, row: tuple[Medium, ...]) -> Pixels:
        processor = self.processors.of(row)
        text = " ".join(token_of(processor, picture) for picture in row)
        return self._tensors(processed(processor, text, row, return_tensors="pt"))

    def _tensors(self, found: Any) -> Pixels:
        tensors = {name: value for name, value in found.items() if name not in OF_TEXT and torch.is_tensor(value)}
        if self.module.dtype == torch.float32:  # Llama 4's processor gives bfloat16
            tensors = {name: _in_full(value) for name, value in tensors.items()}
        return tensors


def _in_full(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype == torch.bfloat16 else value


def documents_of(row: Pictures) -> tuple[tuple[Medium, ...], ...]:
    """The pictures and videos of each document that has some."""
    documents: Any = row if isinstance(row[0], tuple) else (row,)
    return tuple(documents)


def joined(rows: Sequence[torch.Tensor], *, in_one_row: bool = False) -> torch.Tensor:
    """The tensors of several rows along the first dimension; the others are padded with zeros to the largest.

    ``in_one_row``: along the last one.

    That is what the processors of transformers make of several rows: see ``tests/images``.
    """
    if in_one_row:
        return torch.cat(list(rows), dim=-1)
    sizes = [max(size) for size in zip(*(row.shape[1:] for row in rows), strict=True)]
    padded = []
    for row in rows:
        room = [amount for size, own in zip(sizes[::-1], row.shape[:0:-1], strict=True) for amount in (0, size - own)]
        padded.append(torch.nn.functional.pad(row, room) if any(room) else row)
    return torch.cat(padded)


def _num_bytes(pixels: Pixels) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in pixels.values())
