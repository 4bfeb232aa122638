"""Vision models small enough for one core, with their processors, and small pictures: nothing is downloaded."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file

from benchmarks.tiny.text import tiny_tokenizer

SHAPES = ((24, 32), (40, 20), (28, 28), (16, 48))  # width and height of pictures, in pixels
COLOURS = ("red", "green", "blue", "yellow")
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['role'] == 'assistant' -%}{%- generation -%}"
    "{%- for part in message['content'] -%}{{- part['text'] -}}{%- endfor -%}{{- '<|im_end|>' -}}{%- endgeneration -%}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{- IMAGE -}}{%- elif part['type'] == 'video' -%}{{- VIDEO -}}"
    "{%- else -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{{- '<|im_end|>' -}}{%- endif -%}"
    "{{- '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": None,
    "initializer_range": 0.1,
}
QWEN = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
QWEN_PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA: dict[str, Any] = {  # of Qwen3.5
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": MROPE | {"partial_rotary_factor": 1.0},
}


def picture(number: int) -> Image.Image:
    """A picture of its own shape, with one or more coloured rectangles."""
    width, height = SHAPES[number % len(SHAPES)]
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for k in range(1 + number % 3):
        left, top = (5 * (number + 3 * k)) % (width - 6), (7 * (number + k)) % (height - 6)
        draw.rectangle((left, top, left + 5, top + 5), fill=COLOURS[(number + k) % len(COLOURS)])
    return image


def png(number: int) -> bytes:
    """The same as the bytes of a file."""
    written = io.BytesIO()
    picture(number).save(written, "PNG")
    return written.getvalue()


def frames(number: int, count: int = 4) -> list[bytes]:
    """The pictures of a video, one file each: a rectangle that moves."""
    width, height = SHAPES[number % len(SHAPES)]
    found = []
    for k in range(count):
        image = Image.new("RGB", (width, height), "white")
        left, top = (3 * number + 4 * k) % (width - 6), (number + 2 * k) % (height - 6)
        ImageDraw.Draw(image).rectangle((left, top, left + 5, top + 5), fill=COLOURS[number % len(COLOURS)])
        written = io.BytesIO()
        image.save(written, "PNG")
        found.append(written.getvalue())
    return found


def _tokenizer(tokens: Sequence[str], place: str, video: str = "", **fields: Any) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|endoftext|>", *tokens]})
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", repr(place)).replace("VIDEO", repr(video))
    for name, token in fields.items():
        tokenizer._set_model_specific_special_tokens({name: token})
    return tokenizer


def _qwen_processor(folder: Path, tokenizer: Any, patch_size: int, kind: str) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    sizes = {"size": {"shortest_edge": 8 * 8, "longest_edge": 40 * 40}}
    Qwen2VLImageProcessorPil(patch_size=patch_size, merge_size=2, temporal_patch_size=2, **sizes).save_pretrained(
        folder
    )
    of_videos = "Qwen3VL" if kind.startswith("Qwen3VL") else "Qwen2VL"
    _video_config(folder, of_videos, patch_size=patch_size, merge_size=2, temporal_patch_size=2, **sizes)
    _processor_config(folder, kind)


def _video_config(folder: Path, kind: str, **fields: Any) -> None:
    """The file of a video processor; its class needs torchvision, the file does not."""
    fields |= {"video_processor_type": f"{kind}VideoProcessor"}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(fields))


def _processor_config(folder: Path, kind: str, **fields: Any) -> None:
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": kind, **fields}))


def _ids(tokenizer: Any, **tokens: str) -> dict[str, int]:
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}


def _qwen(folder: Path, kind: str, processor: str, text: dict[str, Any], vision: dict[str, Any]) -> tuple[Any, Any]:
    """A model of one of Qwen's families: ``kind`` is the name of its classes."""
    tokenizer = _tokenizer(QWEN, QWEN_PLACE, QWEN_VIDEO)
    _qwen_processor(folder, tokenizer, 4, f"{processor}Processor")
    text = TEXT | {"rope_parameters": MROPE, "vocab_size": len(tokenizer), "dtype": "float32"} | text
    sizes = {"depth": 2, "hidden_size": 16, "num_heads": 2, "out_hidden_size": text["hidden_size"]}
    sizes |= {"patch_size": 4, "spatial_merge_size": 2, "initializer_range": 0.1}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text,
        vision_config=sizes | vision,
        **_ids(tokenizer, image_token_id=QWEN[2], video_token_id=QWEN[3]),
        **_ids(tokenizer, vision_start_token_id=QWEN[0], vision_end_token_id=QWEN[1]),
        tie_word_embeddings=False,
    )
    return config, tokenizer


def _qwen2_vl(folder: Path, **text: Any) -> tuple[Any, Any]:
    hidden_size = text.get("hidden_size", TEXT["hidden_size"])
    vision = {"embed_dim": 16, "hidden_size": hidden_size, "mlp_ratio": 2}
    return _qwen(folder, "Qwen2VL", "Qwen2VL", text, vision)


def _qwen2_5_vl(folder: Path, **text: Any) -> tuple[Any, Any]:
    vision = {"intermediate_size": 24, "window_size": 16, "fullatt_block_indexes": [1]}
    return _qwen(folder, "Qwen2_5_VL", "Qwen2_5_VL", text, vision)


def _qwen3_vl(folder: Path, **text: Any) -> tuple[Any, Any]:
    vision = {"depth": 3, "intermediate_size": 24, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return _qwen(folder, "Qwen3VL", "Qwen3VL", {"head_dim": 8} | text, vision)


def _qwen3_vl_moe(folder: Path, **text: Any) -> tuple[Any, Any]:
    vision = {"depth": 3, "intermediate_size": 24, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    experts = EXPERTS | {"norm_topk_prob": True}  # which vLLM looks for
    return _qwen(folder, "Qwen3VLMoe", "Qwen3VL", {"head_dim": 8} | experts | text, vision)


def _qwen3_5(folder: Path, **text: Any) -> tuple[Any, Any]:
    vision = {"intermediate_size": 24, "num_position_embeddings": 16}
    return _qwen(folder, "Qwen3_5", "Qwen3VL", DELTA | text, vision)


def _qwen3_5_moe(folder: Path, **text: Any) -> tuple[Any, Any]:
    vision = {"intermediate_size": 24, "num_position_embeddings": 16}
    experts = EXPERTS | {"shared_expert_intermediate_size": 24}
    return _qwen(folder, "Qwen3_5Moe", "Qwen3VL", DELTA | experts | text, vision)


OMNI = [*QWEN, "<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"]
NAMES = {  # by which their processors ask for tokens
    **dict(zip(("vision_bos_token", "vision_eos_token", "image_token", "video_token"), QWEN, strict=True)),
    **dict(zip(("audio_bos_token", "audio_eos_token", "audio_token"), OMNI[len(QWEN) :], strict=True)),
}


def _omni(folder: Path, kind: str, text: dict[str, Any], vision: dict[str, Any]) -> tuple[Any, Any]:
    """A model that also hears, without the part that speaks."""
    tokenizer = _tokenizer(OMNI, QWEN_PLACE, **NAMES)
    _qwen_processor(folder, tokenizer, 4, f"{kind}Processor")
    text = TEXT | {"rope_parameters": MROPE, "vocab_size": len(tokenizer), "dtype": "float32"} | text
    sizes = {"depth": 2, "hidden_size": 16, "num_heads": 2, "out_hidden_size": text["hidden_size"], "patch_size": 4}
    sizes |= {"spatial_merge_size": 2, "initializer_range": 0.1, "intermediate_size": 24}
    hearing = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
    hearing |= {"num_mel_bins": 8, "output_dim": text["hidden_size"], "max_source_positions": 100}
    thinker = getattr(transformers, f"{kind}ThinkerConfig")(
        text_config=text,
        vision_config=sizes | vision,
        audio_config=hearing,
        **_ids(tokenizer, image_token_id=QWEN[2], video_token_id=QWEN[3], audio_token_id=OMNI[-1]),
        **_ids(tokenizer, vision_start_token_id=QWEN[0], vision_end_token_id=QWEN[1]),
        **_ids(tokenizer, audio_start_token_id=OMNI[-3], audio_end_token_id=OMNI[-2]),
        tie_word_embeddings=False,
    )
    return getattr(transformers, f"{kind}Config")(
        thinker_config=thinker.to_dict(), enable_audio_output=False
    ), tokenizer


def _qwen2_5_omni(folder: Path, **text: Any) -> tuple[Any, Any]:
    return _omni(folder, "Qwen2_5Omni", text, {"window_size": 16, "fullatt_block_indexes": [1]})


def _qwen3_omni_moe(folder: Path, **text: Any) -> tuple[Any, Any]:
    vision = {"depth": 3, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return _omni(folder, "Qwen3OmniMoe", {"head_dim": 8} | EXPERTS | text, vision)


def _siglip(**fields: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return sizes | fields


def _gemma3(folder: Path, **text: Any) -> tuple[Any, Any]:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokens = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
    names = {"boi_token": tokens[0], "eoi_token": tokens[1], "image_token": tokens[2]}
    tokenizer = _tokenizer(tokens, tokens[0], **names)
    tokenizer.add_tokens(["\n" * number for number in range(1, 5)])  # as Gemma's own has
    Gemma3ImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
    _processor_config(folder, "Gemma3Processor", image_seq_length=4)
    vision = {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4, "vision_use_head": False}
    text = {"head_dim": 8, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]} | text
    config = transformers.Gemma3Config(
        text_config=TEXT | {"vocab_size": len(tokenizer), "query_pre_attn_scalar": 8, "dtype": "float32"} | text,
        vision_config=_siglip(**vision),
        mm_tokens_per_image=4,
        **_ids(tokenizer, boi_token_index=tokens[0], eoi_token_index=tokens[1], image_token_index=tokens[2]),
        initializer_range=0.1,
    )
    return config, tokenizer


def _smolvlm(folder: Path, **text: Any) -> tuple[Any, Any]:
    return _idefics3(folder, "SmolVLM", **text)


def _idefics3(folder: Path, kind: str = "Idefics3", **text: Any) -> tuple[Any, Any]:
    """With the processor of Idefics 3, which makes the same pixels, as SmolVLM's needs num2words for videos."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokens = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokens += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    tokenizer = _tokenizer(tokens, "<image>")
    sizes = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    Idefics3ImageProcessorPil(**sizes).save_pretrained(folder)
    _processor_config(folder, "Idefics3Processor", image_seq_len=4)
    config = getattr(transformers, f"{kind}Config")(
        text_config=TEXT | {"model_type": "llama", "vocab_size": len(tokenizer), "dtype": "float32"} | text,
        vision_config=_siglip(image_size=16, patch_size=4),
        scale_factor=2,
        **_ids(tokenizer, image_token_id="<image>"),
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    return config, tokenizer


def _internvl(folder: Path, **text: Any) -> tuple[Any, Any]:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    tokens = ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
    names = {"start_image_token": tokens[0], "end_image_token": tokens[1], "context_image_token": tokens[2]}
    tokenizer = _tokenizer(tokens, tokens[2], tokens[3], **names, video_token=tokens[3])
    sizes = {"size": {"height": 16, "width": 16}, "crop_to_patches": True, "max_patches": 3}
    GotOcr2ImageProcessorPil(**sizes).save_pretrained(folder)
    _video_config(folder, "InternVL", size={"height": 16, "width": 16})
    _processor_config(folder, "InternVLProcessor", image_seq_length=4)
    vision = _siglip(image_size=[16, 16], patch_size=[4, 4], use_mean_pooling=False)
    vision |= {"projection_dropout": 0.0, "hidden_dropout_prob": 0.1}
    config = transformers.InternVLConfig(
        text_config=TEXT | {"model_type": "qwen2", "vocab_size": len(tokenizer), "dtype": "float32"} | text,
        vision_config=vision | {"model_type": "internvl_vision"},
        image_seq_length=4,
        downsample_ratio=0.5,
        **_ids(tokenizer, image_token_id=tokens[2]),
        tie_word_embeddings=False,
    )
    return config, tokenizer


def _llava_onevision(folder: Path, **text: Any) -> tuple[Any, Any]:
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    tokenizer = _tokenizer(["<image>", "<video>"], "<image>", "<video>")
    pinpoints = [[16, 16], [16, 32], [32, 16], [32, 32]]
    sizes = {"size": {"height": 16, "width": 16}, "image_grid_pinpoints": pinpoints}
    LlavaOnevisionImageProcessorPil(**sizes).save_pretrained(folder)
    _video_config(folder, "LlavaOnevision", size={"height": 16, "width": 16})
    fields = {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"}
    _processor_config(folder, "LlavaOnevisionProcessor", **fields)
    vision = {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4, "vision_use_head": False}
    config = transformers.LlavaOnevisionConfig(
        text_config=TEXT | {"model_type": "qwen2", "vocab_size": len(tokenizer), "dtype": "float32"} | text,
        vision_config=_siglip(**vision),
        image_grid_pinpoints=pinpoints,
        vision_feature_select_strategy="full",
        **_ids(tokenizer, image_token_index="<image>", video_token_index="<video>"),
        tie_word_embeddings=False,
    )
    return config, tokenizer


def _llava(folder: Path, **text: Any) -> tuple[Any, Any]:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = _tokenizer(["<image>"], "<image>")
    CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(folder)
    fields = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    _processor_config(folder, "LlavaProcessor", **fields)
    vision = {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 4, "num_hidden_layers": 3}
    config = transformers.LlavaConfig(
        text_config=TEXT | {"model_type": "llama", "vocab_size": len(tokenizer), "dtype": "float32"} | text,
        vision_config=_siglip(**vision),
        image_seq_length=16,
        **_ids(tokenizer, image_token_index="<image>"),
        tie_word_embeddings=False,
    )
    return config, tokenizer


def _patches(folder: Path, kind: str, processor: str, tokens: Sequence[str], **fields: Any) -> Any:
    """The tokenizer, beside an image processor that cuts pictures into patches as Qwen2-VL's does.

    ``tokens``: around and of a picture; ``kind``: of the module of transformers that has the image processor.
    """
    module = importlib.import_module(f"transformers.models.{kind}.image_processing_pil_{kind}")
    name = f"{processor}ImageProcessorPil"
    sizes = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 8 * 8, "longest_edge": 40 * 40}}
    getattr(module, name)(**sizes, **fields).save_pretrained(folder)
    _processor_config(folder, f"{processor}Processor")
    start, of_picture, end = tokens[:3]
    return _tokenizer(tokens, start + of_picture + end, image_token=of_picture, image_start_token=start)


GLM = ["<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>"]


def _glm(folder: Path, kind: str, processor: str, text: dict[str, Any]) -> tuple[Any, Any]:
    """Both of GLM-4.6V: the dense one and the mixture."""
    tokenizer = _patches(folder, processor.lower(), processor, GLM, temporal_patch_size=2)
    hidden_size = text.get("hidden_size", TEXT["hidden_size"])
    sizes = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": hidden_size}
    sizes |= {"patch_size": 4, "spatial_merge_size": 2, "image_size": 32, "initializer_range": 0.1}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}
    config = getattr(transformers, f"{kind}Config")(
        text_config=TEXT | {"vocab_size": len(tokenizer), "rope_parameters": rope, "dtype": "float32"} | text,
        vision_config=sizes,
        **_ids(tokenizer, image_token_id=GLM[1], video_token_id=GLM[3]),
        **_ids(tokenizer, image_start_token_id=GLM[0], image_end_token_id=GLM[2]),
        **_ids(tokenizer, video_start_token_id=GLM[4], video_end_token_id=GLM[5]),
        tie_word_embeddings=False,
    )
    return config, tokenizer


def _glm46v(folder: Path, **text: Any) -> tuple[Any, Any]:
    return _glm(folder, "Glm46V", "Glm46V", text)


def _glm4v_moe(folder: Path, **text: Any) -> tuple[Any, Any]:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1}
    return _glm(folder, "Glm4vMoe", "Glm4v", experts | {"first_k_dense_replace": 1, "head_dim": 8} | text)


def _paddleocr_vl(folder: Path, **text: Any) -> tuple[Any, Any]:
    tokens = ["<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>", "<|video_pad|>"]
    tokenizer = _patches(folder, "paddleocr_vl", "PaddleOCRVL", tokens)
    vision = {"patch_size": 4, "image_size": 16, "spatial_merge_size": 2}
    config = transformers.PaddleOCRVLConfig(
        text_config=TEXT
        | {"vocab_size": len(tokenizer), "rope_parameters": MROPE, "head_dim": 8, "dtype": "float32"}
        | text,
        vision_config=_siglip(**vision),
        **_ids(tokenizer, image_token_id=tokens[1], video_token_id=tokens[3]),
        **_ids(tokenizer, vision_start_token_id=tokens[0], vision_end_token_id=tokens[2]),
        tie_word_embeddings=False,
    )
    return config, tokenizer


def _gemma4(folder: Path, **text: Any) -> tuple[Any, Any]:
    """With the layers of the small ones: embeddings of each layer, keys that layers share, and an audio tower."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    tokens = ["<|image>", "<image|>", "<|image|>", "<|audio>", "<audio|>", "<|audio|>", "<|video|>"]
    names = {"boi_token": tokens[0], "eoi_token": tokens[1], "image_token": tokens[2]}
    names |= {"boa_token": tokens[3], "eoa_token": tokens[4], "audio_token": tokens[5]}
    tokenizer = _tokenizer(tokens, tokens[2], **names)
    Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70).save_pretrained(folder)
    _processor_config(folder, "Gemma4Processor", image_seq_length=70)
    layers = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    sizes = {"num_hidden_layers": 4, "layer_types": layers, "sliding_window": 256, "head_dim": 8, "global_head_dim": 16}
    sizes |= {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "use_bidirectional_attention": "vision"}
    sizes |= {"num_global_key_value_heads": 1}
    vision = {"patch_size": 4, "head_dim": 8, "position_embedding_size": 256, "num_key_value_heads": 2}
    audio = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16}
    size = {"vocab_size": len(tokenizer), "vocab_size_per_layer_input": len(tokenizer)}
    config = transformers.Gemma4Config(
        text_config=TEXT | size | {"dtype": "float32"} | sizes | text,
        vision_config=_siglip(**vision),
        audio_config=audio | {"subsampling_conv_channels": [8, 4]},
        **_ids(tokenizer, boi_token_id=tokens[0], eoi_token_id=tokens[1], image_token_id=tokens[2]),
        **_ids(tokenizer, boa_token_id=tokens[3], eoa_token_index=tokens[4], audio_token_id=tokens[5]),
        **_ids(tokenizer, video_token_id=tokens[6]),
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    return config, tokenizer


def _gemma4_moe(folder: Path, **text: Any) -> tuple[Any, Any]:
    """With the layers of the mixture: experts beside a dense MLP, and no embeddings of each layer."""
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
    config, tokenizer = _gemma4(
        folder, **experts, hidden_size_per_layer_input=0, num_kv_shared_layers=0, attention_k_eq_v=True, **text
    )
    config.audio_config = None
    return config, tokenizer


def _minicpmv4_6(folder: Path, **text: Any) -> tuple[Any, Any]:
    from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil

    names = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    for kind in ("image", "slice", "image_id"):
        names |= {f"{kind}_start_token": f"<{kind}>", f"{kind}_end_token": f"</{kind}>"}
    tokenizer = _tokenizer([*names.values()], names["image_token"], names["video_token"], **names)
    sizes = {"scale_resolution": 16, "patch_size": 2, "max_slice_nums": 4}
    MiniCPMV4_6ImageProcessorPil(**sizes).save_pretrained(folder)
    _video_config(folder, "MiniCPMV4_6", **sizes)
    _processor_config(folder, "MiniCPMV4_6Processor")
    vision = _siglip(patch_size=2, image_size=16, num_hidden_layers=3, insert_layer_id=1)
    language = TEXT | DELTA | {"model_type": "qwen3_5_text", "vocab_size": len(tokenizer), "dtype": "float32"} | text
    config = transformers.MiniCPMV4_6Config(
        text_config=language,
        vision_config=vision,
        insert_layer_id=1,
        image_size=16,
        **_ids(tokenizer, image_token_id=names["image_token"], video_token_id=names["video_token"]),
        tie_word_embeddings=False,
    )
    return config, tokenizer


def _llama4(folder: Path, **text: Any) -> tuple[Any, Any]:
    """Its image processor needs torchvision; writing its file does not."""
    tokens = ["<|image_start|>", "<|image_end|>", "<|image|>", "<|patch|>", "<|tile_x_separator|>"]
    tokenizer = _tokenizer([*tokens, "<|tile_y_separator|>"], "<|image|>")
    sizes = {"size": {"height": 16, "width": 16}, "max_patches": 4, "resize_to_max_canvas": False}
    written = {"image_processor_type": "Llama4ImageProcessor", **sizes}
    (folder / "preprocessor_config.json").write_text(json.dumps(written))
    _processor_config(folder, "Llama4Processor", patch_size=4, pixel_shuffle_ratio=0.5)
    vision = {"image_size": 16, "patch_size": 4, "intermediate_size": 64, "vision_output_dim": 24}
    vision |= {"projector_input_dim": 24, "projector_output_dim": 24, "hidden_size": 16, "num_hidden_layers": 2}
    experts = {"num_local_experts": 4, "intermediate_size_mlp": 48, "head_dim": 8, "no_rope_layer_interval": 2}
    config = transformers.Llama4Config(
        text_config=TEXT | {"vocab_size": len(tokenizer), "dtype": "float32"} | experts | text,
        vision_config=vision | {"num_attention_heads": 2, "pixel_shuffle_ratio": 0.5},
        **_ids(tokenizer, boi_token_index=tokens[0], eoi_token_index=tokens[1], image_token_index="<|patch|>"),
        tie_word_embeddings=False,
    )
    return config, tokenizer


MODELS: dict[str, Callable[..., tuple[Any, Any]]] = {  # tested with pictures
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_5": _qwen3_5,
    "gemma3": _gemma3,
    "smolvlm": _smolvlm,
    "internvl": _internvl,
    "llava_onevision": _llava_onevision,
}


FURTHER: dict[str, Callable[..., tuple[Any, Any]]] = {
    "qwen2_vl": _qwen2_vl,
    "idefics3": _idefics3,
    "llava": _llava,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen3_5_moe": _qwen3_5_moe,
    "glm46v": _glm46v,
    "glm4v_moe": _glm4v_moe,
    "paddleocr_vl": _paddleocr_vl,
    "qwen2_5_omni": _qwen2_5_omni,
    "qwen3_omni_moe": _qwen3_omni_moe,
    "gemma4": _gemma4,
    "gemma4_moe": _gemma4_moe,
    "minicpmv4_6": _minicpmv4_6,
    "llama4": _llama4,
}


def _mrope(*section: int, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {**MROPE, "mrope_section": list(section), **fields}}


# Fields by which vLLM runs a model on a CPU: heads of at least 32 numbers, of delta layers 128
IN_VLLM: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"hidden_size": 128, **_mrope(4, 6, 6)},
    "qwen2_5_vl": {"hidden_size": 128, **_mrope(4, 6, 6)},
    "qwen3_vl": {"head_dim": 32, **_mrope(6, 5, 5)},
    "qwen3_vl_moe": {"head_dim": 32, **_mrope(6, 5, 5)},
    "qwen3_5": {
        "head_dim": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        **_mrope(6, 5, 5, mrope_interleaved=True, partial_rotary_factor=1.0),
    },
    "gemma3": {"head_dim": 32},
    "smolvlm": {"hidden_size": 128},
    "idefics3": {"hidden_size": 128},
    "llava": {"hidden_size": 128},
    "internvl": {"hidden_size": 128},
    "llava_onevision": {"hidden_size": 128},
    "glm46v": {"hidden_size": 128, **_mrope(4, 6, 6, partial_rotary_factor=1.0)},
    "paddleocr_vl": {"head_dim": 32, **_mrope(4, 6, 6)},
}


def save_vision(folder: str | Path, name: str = "qwen2_5_vl", seed: int = 0, **text: Any) -> str:
    """Writes a random model of ``MODELS`` or ``FURTHER`` in float32, its tokenizer and its processor; the folder.

    ``text``: fields of the language model.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config, tokenizer = (MODELS | FURTHER)[name](folder, **text)
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
        for weight in model.parameters():  # also those that would begin as zeros or ones
            if weight.dim() < 2 or float(weight.detach().std()) == 0.0:
                weight.data += 0.1 * torch.randn_like(weight)
    model.save_pretrained(folder)
    _name_as_released(folder / "model.safetensors")
    return str(folder)


def _name_as_released(file: Path) -> None:
    """Names of SigLIP's towers as checkpoints of the hub have them; transformers 5 gives random models others."""
    weights = load_file(file)
    if "vision_tower.embeddings.patch_embedding.weight" in weights:  # otherwise the tower is no SigLIP
        released = {re.sub(r"^vision_tower\.", "vision_tower.vision_model.", name): name for name in weights}
        save_file({name: weights[own] for name, own in released.items()}, file, metadata={"format": "pt"})


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes one of the models: ``python -m benchmarks.tiny.vision qwen2_5_vl tiny/vision``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiny.vision", description=__doc__)
    parser.add_argument("kind", choices=[*MODELS, *FURTHER], help="family of the model")
    parser.add_argument("folder", help="where the model, its tokenizer and its processor are written")
    given = parser.parse_args(arguments)
    print(f"wrote {save_vision(given.folder, given.kind)}")


if __name__ == "__main__":
    main()
