"""A vision model's own processor, and what it makes of texts with places for pictures.

    processor = load_processor("Qwen/Qwen2.5-VL-3B-Instruct")
    reader = ImageReader(tokenizer, "Qwen/Qwen2.5-VL-3B-Instruct")
    row, pictures = reader.placed(row)
    reader.tokenizer(pictures).apply_chat_template(row["messages"])        # token ids, with all tokens of the pictures

The model's processor alone decides how many tokens a picture has, and what stands around them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from importlib.util import find_spec
from typing import Any

import numpy as np

from trainers.data.images.conversations import (
    ANSWERS,
    COLUMNS,
    MARKS,
    OF_KINDS,
    TYPES,
    num_places,
    picture_mistake,
    placed,
)
from trainers.data.images.pictures import Medium, Picture
from trainers.data.images.videos import Video

VIDEOS, SOUNDS = "video_processor", "feature_extractor"
# Of models that also hear; without sounds the other makes the same of texts and pictures
IN_PLACE = {"Qwen2_5OmniProcessor": "Qwen2_5_VLProcessor", "Qwen3OmniMoeProcessor": "Qwen2_5_VLProcessor"}
DEMOTING = ("Gemma4Processor",)  # whose making takes from its tokenizer that other tokens are special
ASKING = ("MiniCPMV4_6Processor",)  # which ask their part for videos what that for images says too
SOUND_TOKENS = ("audio_token", "audio_bos_token", "boa_token", "eoa_token")  # attributes of tokenizers
MOST_KNOWN = 256  # texts with pictures whose tokens are remembered
Expanded = tuple[str, list[dict[str, Any]]]
# Arguments of which the tower needs one value; of ``size`` only height and width, which all pictures then have
OF_TOWER = ("patch_size", "merge_size", "temporal_patch_size", "max_image_size", "crop_size", "size")


def seeing_part(configuration: Any) -> Any:
    """The configuration of what sees and reads: of a model that also speaks (Qwen-Omni) its thinker, else the same."""
    return getattr(configuration, "thinker_config", configuration)


def is_vision(configuration: Any) -> bool:
    """Whether transformers has a class that reads images and text for a model of this configuration, or its part."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    configuration = seeing_part(configuration)
    kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(configuration), None)
    has_tower = getattr(configuration, "vision_config", None) is not None
    return has_tower and getattr(kind, "config_class", None) is type(configuration)


def is_speaking(configuration: Any) -> bool:
    """Whether a model of this configuration also speaks, and has a thinker that sees."""
    return seeing_part(configuration) is not configuration and is_vision(configuration)


def is_one_piece(configuration: Any) -> bool:
    """Whether transformers has no class of a vision model without its head (Llama 4)."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING

    kind = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(configuration), None)
    return kind is not None and MODEL_MAPPING.get(type(configuration), None) is kind


def load_processor(
    model: str,
    *,
    trust_remote_code: bool = False,
    tokenizer: Any = None,
    processing: Mapping[str, Any] | None = None,
    videos: Mapping[str, Any] | None = None,
) -> Any:
    """The processor of a folder or hub name, for images and text. ``tokenizer``: in place of its own.

    ``processing``: arguments of its image processor in place of its own. ``videos``: those of its video processor.

    It is what AutoProcessor builds, but with ``videos`` None without the part for videos, which needs torchvision.

    Raises:
        ValueError: the model has no processor of images, one that gives no text for a picture, or one that does not
            take ``processing`` or ``videos``.
    """
    from transformers import AutoImageProcessor, AutoTokenizer, AutoVideoProcessor

    options = {"trust_remote_code": trust_remote_code}
    kind, fields, hears = _kind_of(model, trust_remote_code)
    if kind is None or "image_processor" not in kind.get_attributes():
        raise ValueError(f"transformers has no processor of images for the model {model!r}")
    if tokenizer is not None and kind.__name__ in DEMOTING:
        tokenizer = deepcopy(tokenizer)
    parts = {
        "image_processor": lambda: AutoImageProcessor.from_pretrained(model, **options, **(processing or {})),
        "tokenizer": lambda: AutoTokenizer.from_pretrained(model, **options) if tokenizer is None else tokenizer,
        VIDEOS: lambda: None if videos is None else AutoVideoProcessor.from_pretrained(model, **options, **videos),
        SOUNDS: lambda: None,
    }
    if unknown := [name for name in kind.get_attributes() if name not in parts]:
        raise ValueError(f"the processor of {model!r} has {', '.join(unknown)}; only images and text are supported")
    try:
        made = {name: parts[name]() for name in kind.get_attributes()}  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ValueError(f"the model {model!r} has no files of an image processor: {error}") from None
    try:
        if kind.__name__ in ASKING and made[VIDEOS] is None:
            made[VIDEOS] = made["image_processor"]  # which nobody gives a video
        processor = _still(kind).from_args_and_dict([*made.values()], fields)
    except AttributeError as error:
        raise ValueError(
            f"{kind.__name__} of {model!r} cannot be loaded without its part for videos: {error}"
        ) from None
    given_to: list[tuple[str, Any, Any, Any]] = [
        ("image_processor_kwargs", processing, processor.image_processor, AutoImageProcessor),
        ("video_processor_kwargs", videos, getattr(processor, VIDEOS, None), AutoVideoProcessor),
    ]
    for key, arguments, part, of_model in given_to:
        _check_taken(key, arguments, part, model)
        if set(OF_TOWER) & set(arguments or {}):
            _check_fits(key, arguments or {}, of_model.from_pretrained(model, **options), model)
    processor.seen_token_ids = _seen_token_ids(processor)
    if hears:  # texts may hold none of the tokens of sounds either
        marks = (getattr(processor.tokenizer, name, None) for name in SOUND_TOKENS)
        processor.sound_tokens = [mark for mark in marks if mark]
    if not getattr(processor, "image_token", None):
        raise ValueError(f"{kind.__name__} has no token for a picture in a text")
    return processor


def video_refusal(model: str, *, trust_remote_code: bool = False) -> str | None:
    """Why rows of a vision model cannot have videos, and what to do; None: they can."""
    kind, _, hears = _kind_of(model, trust_remote_code)
    if kind is None or VIDEOS not in kind.get_attributes():
        named = getattr(kind, "__name__", "the processor")
        return f"{named} of {model!r} has no part for videos. Take a model with videos, such as Qwen2.5-VL"
    if kind.__name__ in ASKING:
        return f"the videos of {model!r} are not shown here. Take a model such as Qwen2.5-VL"
    if hears:
        return f"videos of {model!r} are not supported, as it is also an audio model. Use a model such as Qwen2.5-VL"
    if find_spec("torchvision") is None:
        return (
            "transformers processes videos with torchvision, which is not installed. Run pip install torchvision (the "
            "version for your torch)"
        )
    return None


def processed(processor: Any, text: str, pictures: Sequence[Medium], **options: Any) -> Any:
    """What a processor makes of a text with places for these pictures and videos."""
    images = [picture.image() for picture in pictures if isinstance(picture, Picture)]
    given: dict[str, Any] = {"images": [images]} if images else {}
    frames, told = read_videos(processor, pictures)
    return processor(text=[text], **given, **({"videos": frames} | told if frames else {}), **options)


def read_videos(processor: Any, pictures: Sequence[Medium]) -> tuple[list[Any], dict[str, Any]]:
    """The frames of each video, and how the processor is told about them; it does not choose frames again."""
    read = [one.read(processor.video_processor) for one in pictures if isinstance(one, Video)]
    told = {"video_metadata": [metadata for _, metadata in read], "do_sample_frames": False}
    return [frames for frames, _ in read], {"videos_kwargs": told} if read else {}


def token_of(processor: Any, picture: Medium) -> str:
    """The text that is the place of a picture or video."""
    return str(processor.video_token if isinstance(picture, Video) else processor.image_token)


def has_videos(pictures: Sequence[Medium]) -> bool:
    """Whether one of them is a video."""
    return any(isinstance(picture, Video) for picture in pictures)


def _seen_token_ids(processor: Any) -> list[int]:
    """The ids of all tokens that stand for parts of pictures or videos."""
    video = processor.video_token_ids if getattr(processor, "video_token", None) else []
    patch = getattr(processor, "img_patch_token", None)  # of Llama 4, whose image token stands in front of them
    patches = [] if patch is None else [processor.tokenizer.convert_tokens_to_ids(patch)]
    return sorted({int(token) for token in (*processor.image_token_ids, *video, *patches) if token is not None})


def _check_taken(key: str, given: Mapping[str, Any] | None, part: Any, model: str) -> None:
    takes = getattr(type(part), "valid_kwargs", None)
    if takes is not None and (odd := sorted(set(given or {}) - set(takes.__annotations__))):
        known = ", ".join(sorted(takes.__annotations__))
        raise ValueError(f"{key}: {', '.join(odd)} is not an argument of {model!r} (known: {known})")


def _check_fits(key: str, given: Mapping[str, Any], own: Any, model: str) -> None:
    """Raises ValueError for an argument that cuts pictures otherwise than the vision tower was built for."""
    for name in OF_TOWER:
        wanted = getattr(own, name, None)
        sizes = _sides(wanted)
        if name not in given or sizes is None or (name == "size" and "height" not in sizes):
            continue
        value = given[name]
        if isinstance(value, int) and isinstance(sizes, dict) and set(sizes) == {"height", "width"}:
            value = {"height": value, "width": value}
        if value != sizes:
            raise ValueError(f"{key}: {name} is {value}, and the vision tower of {model!r} needs {sizes}. Remove it")


def _sides(size: Any) -> Any:
    """A size as a number, or as a dictionary of the sides that it has."""
    is_number = size is None or isinstance(size, int)
    return size if is_number else {side: length for side, length in dict(size).items() if length is not None}


def _kind_of(model: str, trust_remote_code: bool) -> tuple[Any, dict[str, Any], bool]:
    """The class of the processor, what its file says, and whether it is of a model that also hears."""
    from transformers import AutoConfig
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    try:
        kind: Any = PROCESSOR_MAPPING.get(type(config), None)
        fields, _ = _fields(kind, model) if kind is not None else ({}, None)
        kind = _named(fields.get("processor_class")) or kind
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the processor of {model!r} ({config.model_type}) cannot be imported: {error} It needs torchvision. Run "
            "pip install torchvision (the version for your torch)."
        ) from error
    hears = SOUNDS in kind.get_attributes() if kind is not None else False
    return _named(IN_PLACE.get(getattr(kind, "__name__", ""))) or kind, fields, hears


def _fields(kind: Any, model: str) -> tuple[dict[str, Any], Any]:
    try:
        found: tuple[dict[str, Any], Any] = kind.get_processor_dict(model)
    except OSError:  # older models have no processor_config.json
        return {}, None
    return found


def _named(name: str | None) -> Any:
    import transformers

    return getattr(transformers, name, None) if name else None


def _still(kind: Any) -> Any:
    """The class of a processor that need not have a part for videos, nor one for sounds."""

    class Still(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name in (VIDEOS, SOUNDS) and (argument is None or kind.__name__ in ASKING):
                return type(argument)
            return super().check_argument_for_proper_class(argument_name, argument)

    Still.__name__ = kind.__name__
    return Still


class ImageReader:
    """What the driver of a vision model asks about rows with pictures; made anew from its name in other processes."""

    def __init__(
        self,
        tokenizer: Any,
        model: str,
        *,
        max_pixels: int | None = None,
        urls: bool = False,
        trust_remote_code: bool = False,
        processing: Mapping[str, Any] | None = None,
        videos: Mapping[str, Any] | None = None,
        no_videos: str | None = None,
    ) -> None:
        """``processing``, ``videos``: as of ``load_processor``. ``no_videos``: why rows cannot have videos, and what to
        do; None: as far as this process knows they can."""
        self.plain, self.model, self.trust_remote_code = tokenizer, model, trust_remote_code
        self.max_pixels, self.urls, self.processing = max_pixels, urls, dict(processing or {})
        self.videos, self.no_videos = dict(videos or {}), no_videos
        self.processors = Processors(model, trust_remote_code, self.processing, self.videos, tokenizer)
        self._known: OrderedDict[Any, Expanded] = OrderedDict()  # the prompts of a group are equal

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": OrderedDict()}

    @property
    def processor(self) -> Any:
        return self.processors.of(())

    def placed(self, row: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Medium, ...]]:
        """The row as chat templates of vision models read it, and its pictures and videos. Raises ValueError."""
        row, pictures = placed(row, max_pixels=self.max_pixels, urls=self.urls)
        if self.no_videos is not None and has_videos(pictures):
            raise ValueError(f"the row has a video: {self.no_videos}")
        return row, pictures

    def shown(self, row: Mapping[str, Any]) -> tuple[dict[str, Any], SeeingTokenizer]:
        """The row as chat templates of vision models read it, and the tokenizer for it. Raises ValueError."""
        row, pictures = self.placed(row)
        return row, self.tokenizer(pictures)

    def prompt(self, row: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Medium, ...]]:
        """As ``placed``, of what is to be completed in a row alone: its answer is left out."""
        shown, pictures = self.placed({name: value for name, value in row.items() if name not in ANSWERS})
        if shown.get("prompt") is None and shown.get("messages"):
            last = shown["messages"][-1]
            if last.get("role") == "assistant":
                kinds = [kind for kind, names in OF_KINDS.items() if any(row.get(name) for name in names)]
                pictures = pictures[: len(pictures) - num_places(last, kinds)]
        return shown, pictures

    def mistake(self, row: Mapping[str, Any]) -> tuple[str, str] | None:
        """The column and what is wrong with the pictures of a row, if anything is.

        No text may hold a token that stands for a part of a picture, other than ``<image>`` in its place.
        """
        told: dict[str, Any] = {"max_pixels": self.max_pixels, "urls": self.urls}
        places = [MARKS[kind] for kind, names in OF_KINDS.items() if any(row.get(name) for name in names)]
        tokens = [token for token in self.picture_tokens if token not in places]
        mistake = picture_mistake(row, **told, tokens=tokens, process=self._asked)
        if mistake is None and self.no_videos is not None:
            try:
                self.placed(row)
            except ValueError as error:
                return next((name for name in COLUMNS if row.get(name)), "messages"), str(error)
        return mistake

    @property
    def picture_tokens(self) -> list[str]:
        """The tokens that stand for pictures, videos and parts of them, and for sounds, as texts."""
        ids = self.processor.seen_token_ids
        places = {self.processor.image_token, getattr(self.processor, "video_token", None) or ""} - {""}
        sounds = getattr(self.processor, "sound_tokens", ())
        return sorted({*places, *self.plain.convert_ids_to_tokens(ids), *sounds})

    def _asked(self, picture: Any) -> None:
        if not isinstance(picture, Video):
            self.processor(text=[self.processor.image_token], images=[[picture]])
        elif self.no_videos is None:
            processor = self.processors.of([picture])
            processed(processor, token_of(processor, picture), [picture])

    def tokenizer(self, pictures: Sequence[Medium]) -> SeeingTokenizer:
        """The tokenizer for a row with these pictures."""
        return SeeingTokenizer(self, pictures)

    def expanded(self, text: str, pictures: Sequence[Medium]) -> Expanded:
        """The text with the tokens of the pictures, and where each of them was put.

        Raises:
            ValueError: the text has another number of places than there are pictures.
        """
        of_videos = [picture for picture in pictures if isinstance(picture, Video)]
        video_token = getattr(self.processor, "video_token", None)
        counted = {"image": (self.processor.image_token, len(pictures) - len(of_videos))}
        counted |= {"video": (video_token, len(of_videos))} if video_token else {}
        for kind, (token, count) in counted.items():
            if (places := text.count(token)) != count:
                raise ValueError(
                    f"the chat template made {places} places for {count} {kind}s. A template of a vision model writes "
                    f"one for each part of type {kind}; do texts hold its {kind} token?"
                )
        if not pictures:
            return text, []
        key = text, tuple(picture.key for picture in pictures)
        if key not in self._known:
            processor = self.processors.of(pictures)
            found = processed(processor, text, pictures, return_text_replacement_offsets=True)
            (spans,) = found["text_replacement_offsets"]
            pieces, end = [], 0
            for span in spans:
                pieces += [text[end : span["span"][0]], span["replacement"]]
                end = span["span"][1]
            self._known[key] = "".join([*pieces, text[end:]]), spans
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
        return self._known[key]

    def num_image_tokens(self, ids: Sequence[int]) -> int:
        """How many of the ids stand for parts of pictures and videos."""
        return int(self._are_seen(ids).sum())

    def unlearned(self, ids: Sequence[int], weights: Sequence[float]) -> list[float]:
        """The weights with 0 for tokens that stand for parts of pictures and videos."""
        return [0.0 if seen else weight for weight, seen in zip(weights, self._are_seen(ids), strict=True)]

    def _are_seen(self, ids: Sequence[int]) -> np.ndarray:
        return np.isin(np.asarray(ids, np.int64), self.processor.seen_token_ids)

    def check_cut(self, ids: Sequence[int], kept: Sequence[int], limit: str) -> None:
        """Raises ValueError if ``kept`` lacks tokens of pictures that ``ids`` has; ``limit`` says what cut them off."""
        if len(kept) < len(ids) and self.num_image_tokens(kept) < self.num_image_tokens(ids):
            raise ValueError(
                f"the row has {len(ids)} tokens, and {limit} would cut a picture apart. Raise it, make pictures "
                "smaller with max_pixels, or leave such rows out (truncation_mode: drop, drop_long_prompts: true)"
            )


class Processors:
    """The processor of a model, loaded when it is asked for: for rows with videos one with its part for videos.

    Arguments as of ``load_processor``. It travels without them.
    """

    def __init__(
        self,
        model: str,
        trust_remote_code: bool,
        processing: Mapping[str, Any],
        videos: Mapping[str, Any],
        tokenizer: Any = None,
    ) -> None:
        self.told: dict[str, Any] = {"trust_remote_code": trust_remote_code, "processing": processing}
        self.model, self.videos, self.tokenizer = model, videos, tokenizer
        self._loaded: dict[bool, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loaded": {}}

    def of(self, pictures: Sequence[Medium]) -> Any:
        """The processor for these pictures and videos."""
        seen = has_videos(pictures)
        if seen not in self._loaded:
            videos = self.videos if seen else None
            self._loaded[seen] = load_processor(self.model, **self.told, tokenizer=self.tokenizer, videos=videos)
        return self._loaded[seen]


def seen_too(
    mistake_of: Callable[..., Any],
    images: ImageReader | None,
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda row: row,
) -> Callable[[Mapping[str, Any]], Any]:
    """``mistake_of`` (``broken_rows.py``) for rows whose pictures the model sees: what is wrong with them too.

    ``read``: the row as it is seen.
    """
    if images is None:
        return mistake_of

    def mistake(row: Mapping[str, Any]) -> Any:
        row = read(row)
        return mistake_of(row, seen=tuple(TYPES)) or images.mistake(row)

    return mistake


class SeeingTokenizer:
    """A tokenizer of texts in which ``pictures`` have places, in order; in all else the tokenizer itself.

    Offsets are those of the text as it is given, before the processor writes a picture's tokens into it.
    """

    def __init__(self, reader: ImageReader, pictures: Sequence[Medium]) -> None:
        self._tokenizer, self._reader, self._pictures = reader.plain, reader, list(pictures)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        shown, spans = self._reader.expanded(text, self._pictures)
        encoded = self._tokenizer(shown, **options)
        if options.get("return_offsets_mapping") and spans:
            encoded["offset_mapping"] = [_before(span, spans) for span in encoded["offset_mapping"]]
        return encoded

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        """As the tokenizer's, with all tokens of the pictures."""
        if not options.pop("tokenize", True):
            return self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        as_dict = options.pop("return_dict", True)
        if options.pop("return_assistant_tokens_mask", False):
            return self._with_masks(messages, options)
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        bos = self._tokenizer.bos_token
        encoded = self(text, add_special_tokens=not (bos and text.startswith(bos)))
        return encoded if as_dict else encoded["input_ids"]

    def _with_masks(self, messages: Any, options: dict[str, Any]) -> dict[str, Any]:
        """Token ids, and the marks that ``{% generation %}`` gives."""
        from transformers import ProcessorMixin

        processor = self._reader.processors.of(self._pictures)
        frames, told = read_videos(processor, self._pictures)
        rest = {"video": iter(frames)}
        rest["image"] = iter([picture.image() for picture in self._pictures if isinstance(picture, Picture)])
        shown = [
            {
                **message,
                "content": [
                    part | {kind: next(rest[kind])} if (kind := part["type"]) in rest else part for part in parts
                ],
            }
            if isinstance(parts := message.get("content"), list)
            else message
            for message in messages
        ]
        given = options | {"chat_template": options.get("chat_template") or self._tokenizer.chat_template}
        asked: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        asked |= {"processor_kwargs": told} if told else {}
        # of the base class: SmolVLM's own asks its part for videos
        found: Any = ProcessorMixin.apply_chat_template(processor, shown, **given, **asked)
        return {"input_ids": found["input_ids"][0], "assistant_masks": found["assistant_masks"][0]}


def _before(offsets: tuple[int, int], spans: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Where a token of the expanded text stands in the text before; all of a picture's tokens stand at its place."""
    first, last = (_place(place, spans, at_end=at_end) for place, at_end in zip(offsets, (False, True), strict=True))
    return first, last


def _place(place: int, spans: Sequence[Mapping[str, Any]], *, at_end: bool) -> int:
    new_starts = [_new_start(span) for span in spans]
    number = bisect_right(new_starts, place - at_end) - 1
    if number < 0:
        return place
    span = spans[number]
    behind = place - (new_starts[number] + len(span["replacement"]))
    if behind >= (1 if at_end else 0):
        return int(span["span"][1]) + behind
    return int(span["span"][1] if at_end else span["span"][0])


def _new_start(span: Mapping[str, Any]) -> int:
    return int(span["new_span"][0])
