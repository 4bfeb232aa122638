"""Small local models and data in the place of those that ms-swift's commands name, of the same architecture and kind.

A model of Qwen's that sees is a tiny one of its own class, with its processor. Of other models that see or hear there
is a configuration alone: its ``model_type`` decides. Beside InternVL's lies what the hub has beside it: the same for
transformers' own class. Rows have pictures, videos or sounds where the named data have; a video is a list of frames.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainers.backends.own_code import ENDINGS
from trainers.backends.own_code import KIND as OWN_CODE

MULTIMODAL = re.compile(
    r"-VL|Omni|OCR|vl2|InternVL|Keye|MiniCPM-V|MOSS-VL|Ovis|TTS|Emu3|gme-|Audio|multimodal|4\.6V|jina-reranker-m0"
    r"|clevr|image|latex_ocr|coco|video|ocr|llava|RLAIF-V|speech|tts|geometry|ok-vqa|chord|deepeyes|r1v",
    re.IGNORECASE,
)
SEEING = (  # the first that matches the model's name: of benchmarks/tiny/vision.py
    (r"Qwen2-VL", "qwen2_vl"),
    (r"Qwen2\.5-VL", "qwen2_5_vl"),
    (r"Qwen3-VL.*A\d+B", "qwen3_vl_moe"),
    (r"Qwen3-VL", "qwen3_vl"),
    (r"Qwen3\.[58].*A\d+B", "qwen3_5_moe"),
    (r"Qwen3\.[58]", "qwen3_5"),
    (r"GLM-4\.6V-Flash", "glm46v"),
    (r"GLM-4\.6V", "glm4v_moe"),
    (r"PaddleOCR-VL", "paddleocr_vl"),
    (r"Qwen2\.5-Omni", "qwen2_5_omni"),
    (r"Qwen3-Omni", "qwen3_omni_moe"),
    (r"gemma-4.*A\d+B", "gemma4_moe"),
    (r"gemma-4", "gemma4"),
    (r"MiniCPM-V-4\.6", "minicpmv4_6"),
    (r"Llama-4", "llama4"),
)
CONFIGURED = (  # the model_type in the config.json of the hub, and whether the code comes with the model
    (r"InternVL3", OWN_CODE, True),
    (r"Qwen2-Audio", "qwen2_audio", False),
    (r"Qwen3-TTS", "qwen3_tts", True),
    (r"Ovis2\.5", "ovis2_5", True),
    (r"Emu3-Gen", "Emu3", True),
    (r"Keye-VL", "KeyeVL1_5", True),
    (r"jina-reranker-m0", "qwen2_vl", True),
    (r"Phi-4-multimodal", "phi4mm", True),
    (r"MOSS-VL", "moss_vl", True),
    (r"DeepSeek-OCR|deepseek-vl2", "deepseek_vl_v2", True),
    (r"gemma-4-12B", "gemma4_unified", False),
    (r"diffusiongemma", "diffusion_gemma", False),
    (r"HunyuanOCR", "hunyuan_vl", False),
)
ROWS = (  # columns of rows, by the names of data
    ("videos", re.compile(r"VideoChatGPT|video", re.IGNORECASE)),
    ("audios", re.compile(r"speech|audio|tts_data", re.IGNORECASE)),
    (
        "images",
        re.compile(
            r"latex_ocr|clevr|coco|RLAIF-V|garbage265|TextCaps|chartqa|multimodal|MAmmoTH-VL|image|geometry|ok-vqa"
            r"|visual_toolbox|deepeyes|llava|voc2007",
            re.IGNORECASE,
        ),
    ),
)
ARCHITECTURES = (  # the first that matches the model's name
    (r"Qwen3-?Next", "qwen3_next"),
    (r"Qwen3.*A\d+B", "qwen3_moe"),
    (r"Qwen1\.5-MoE", "qwen2_moe"),
    (r"gpt-oss|GPT-OSS", "gpt_oss"),
    (r"Qwen3", "qwen3"),
    (r"GLM-4\.[56]", "glm4_moe"),
    (r"GLM-4", "glm4"),
    (r"[Ll]lama", "llama"),
    (r"Moonlight|deepseek", "deepseek_v3"),
    (r"[Nn]emotron.*A\d+B", "nemotron_h"),
    (r"gemma", "gemma3_text"),
    (r"Phi", "phi3"),
    (r"modernbert", "modernbert"),
    (r"", "qwen2"),
)
DEPTHS = (  # layers, as many as the real model has, where a command says how many of them a pipeline stage has
    (r"Qwen1\.5-MoE-A2\.7B", 24),
    (r"Moonlight-16B", 27),
    (r"30B-A3B", 48),
)
MODEL_KEYS = ("model", "teacher_model", "reward_model", "prm_model", "ref_model", "mcore_model", "model_id_or_path")
JUDGE_KEYS = ("reward_model", "prm_model")  # of MODEL_KEYS: those that score a text
DATA_KEYS = ("dataset", "val_dataset", "eval_dataset", "cached_dataset", "cached_val_dataset", "chord_sft_dataset")


DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # three of four layers keep a state
MEGATRON = ("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", *DELTA)  # which backend: megatron builds


def architecture_of(name: str) -> str:
    """transformers' model_type of the text model of that name."""
    return next(made for pattern, made in ARCHITECTURES if re.search(pattern, name))


def model_for(name: str, folder: Path, program: str, seed: int = 0) -> str:
    """A folder with a tiny model of the architecture that the name says; made once.

    For ``megatron`` one that our backend builds: mixtures are Qwen3's, others Qwen3.
    """
    from benchmarks.tiny.architectures import save

    if (found := _first(CONFIGURED, name)) is not None:
        return _with_twin(found, name, folder, program) if found[1] == OWN_CODE else _configured(found, folder)
    if (found := _first(SEEING, name)) is not None:
        return _seeing(found[1], name, folder, program, seed)
    architecture = architecture_of(name)
    if program == "megatron" and architecture not in MEGATRON:
        is_mixture = "moe" in architecture or architecture in ("gpt_oss", "qwen3_next", "deepseek_v3", "nemotron_h")
        architecture = "qwen3_moe" if is_mixture or "A" in re.findall(r"-(A)\d+B", name) else "qwen3"
    if architecture == "modernbert":
        return _encoder(folder)
    layers = next((depth for pattern, depth in DEPTHS if re.search(pattern, name)), 8)
    target = folder / (architecture if layers == 8 else f"{architecture}_{layers}")
    target = target.with_name(f"{target.name}_{seed}") if seed else target
    if not (target / "config.json").is_file():
        fields: dict[str, Any] = {"max_position_embeddings": 131072}
        if program == "megatron" or architecture in MEGATRON:  # sizes that parallel layouts divide
            fields |= {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": layers, "head_dim": 32}
            fields |= {"vocab_size": 320, "hidden_size": 256}
            fields |= {"num_experts": 16} if "moe" in architecture or architecture == "qwen3_next" else {}
            if architecture in DELTA:
                kinds = ["full_attention" if (layer + 1) % 4 == 0 else "linear_attention" for layer in range(layers)]
                fields |= {"layer_types": kinds, "linear_num_key_heads": 8, "linear_num_value_heads": 8}
        save(architecture, target, seed, **fields)
    return str(target)


def _first(table: Sequence[tuple[Any, ...]], name: str) -> tuple[Any, ...] | None:
    return next((row for row in table if re.search(row[0], name)), None)


def _seeing(kind: str, name: str, folder: Path, program: str, seed: int) -> str:
    """A model of benchmarks/tiny/vision.py, with sizes that parallel layouts divide where its backend is megatron."""
    from benchmarks.tiny.vision import save_vision

    layers = next((depth for pattern, depth in DEPTHS if re.search(pattern, name)), 8)
    target = folder / f"{kind}_{program}_{layers}_{seed}"
    if not target.is_dir():
        fields: dict[str, Any] = {"max_position_embeddings": 131072}
        if program == "megatron" and kind.startswith("qwen"):
            rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 8]}
            fields |= {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": layers, "head_dim": 32}
            fields |= {"vocab_size": 320, "hidden_size": 256, "rope_parameters": rotary}
            fields |= {"num_experts": 16} if kind.endswith("_moe") else {}
        if program == "megatron" and kind in DELTA:
            fields |= {"linear_num_key_heads": 8, "linear_num_value_heads": 8}
            fields |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}  # as vLLM has them on a CPU
            kinds = ["full_attention" if (layer + 1) % 4 == 0 else "linear_attention" for layer in range(layers)]
            fields |= {
                "layer_types": kinds,
                "rope_parameters": rotary | {"partial_rotary_factor": 1.0, "mrope_interleaved": True},
            }
        save_vision(target, kind, seed, **fields)
    return str(target)


def _with_twin(found: tuple[Any, ...], name: str, folder: Path, program: str) -> str:
    """A folder of InternVL's own code; beside it, under the name with its ending, a tiny model where the hub has it."""
    target = folder / name.rpartition("/")[2]
    if target.is_dir():
        return str(target)
    shutil.copytree(_configured(found, folder), target)
    ending = next((ending for pattern, ending in ENDINGS if re.fullmatch(pattern, target.name)), None)
    if ending is not None:
        from benchmarks.tiny.vision import save_vision

        kind = "qwen3_moe" if re.search(r"A\d+B", name) else "qwen3" if "3_5" in name else "qwen2"
        layers = next((depth for pattern, depth in DEPTHS if re.search(pattern, name)), 8)
        fields: dict[str, Any] = {"model_type": kind, "max_position_embeddings": 131072, "num_hidden_layers": layers}
        if program == "megatron":
            fields |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32, "hidden_size": 256}
        if kind == "qwen3_moe":
            fields |= {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        save_vision(f"{target}{ending}", "internvl", **fields)
    return str(target)


def _encoder(folder: Path) -> str:
    """A tiny ModernBERT with a classifier of one label, as gte-reranker-modernbert-base has."""
    from transformers import ModernBertConfig, ModernBertForSequenceClassification

    from benchmarks.tiny.text import tiny_tokenizer

    target = folder / "modernbert"
    if not target.is_dir():
        sizes = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        tokens = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
        config = ModernBertConfig(**sizes, **tokens, num_attention_heads=2, num_labels=1, max_position_embeddings=8192)
        ModernBertForSequenceClassification(config).save_pretrained(target)
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = None
        tokenizer.save_pretrained(target)
    return str(target)


def _configured(found: tuple[Any, ...], folder: Path) -> str:
    """A folder with the configuration alone, and a tokenizer."""
    from transformers import AutoConfig

    from benchmarks.tiny.text import tiny_tokenizer

    _, kind, has_own_code = found
    target = folder / kind
    if not target.is_dir():
        tiny_tokenizer().save_pretrained(target)
        if has_own_code:
            names = {"AutoConfig": "configuration.Configuration", "AutoModelForCausalLM": "modeling.Model"}
            (target / "config.json").write_text(json.dumps({"model_type": kind, "auto_map": names}))
        else:
            AutoConfig.for_model(kind).save_pretrained(target)
    return str(target)


def judge_for(name: str, folder: Path) -> str:
    """A folder with a tiny reward model of the architecture that the name says, or of Qwen2's."""
    from transformers import AutoModelForSequenceClassification

    target = folder / "judge"
    if not target.is_dir():
        shutil.copytree(model_for(name, folder, "swift"), target)
        model = AutoModelForSequenceClassification.from_pretrained(target, num_labels=1)
        model.save_pretrained(target)
    return str(target)


def data_for(command: str, keys: dict[str, Any], folder: Path, rows: int = 12) -> str:
    """A file of some rows of the kind that the command learns from, in ms-swift's own format."""
    kind = str(keys.get("rlhf_type", command))
    task = str(keys.get("task_type", ""))
    if "cls" in task:
        kind = "cls"
    elif task == "embedding" or task.endswith("reranker"):
        kind = task.removeprefix("generative_")
    elif kind in ("dpo", "rm", "orpo", "cpo", "simpo"):
        kind = "pairs"
    said = " ".join(str(keys.get(name, "")) for name in DATA_KEYS)
    media = [column for column, names in ROWS if names.search(said)]
    columns = keys.get("columns") or {}
    columns = json.loads(columns) if isinstance(columns, str) else columns
    theirs = {ours: name for name, ours in columns.items()}
    target = folder / f"{'_'.join([kind, *media, *theirs])}.jsonl"
    if not target.is_file():
        made = [_with_media(_row(kind, number), media, number, folder) for number in range(rows)]
        lines = [json.dumps({theirs.get(name, name): value for name, value in row.items()}) for row in made]
        target.write_text("".join(f"{line}\n" for line in lines))
    return str(target)


def _with_media(row: dict[str, Any], media: list[str], number: int, folder: Path) -> dict[str, Any]:
    """The row with a file of one of ``media`` in turn, and each column of them."""
    for place, column in enumerate(media):
        row = row | {column: [_file(column, number, folder)] if number % len(media) == place else []}
    return row


def _file(column: str, number: int, folder: Path) -> str | list[str]:
    """A picture or a sound, or the frames of a video."""
    from benchmarks.tiny.vision import frames, png

    named = {f"{number}_{k}.png": frame for k, frame in enumerate(frames(number))} if column == "videos" else {}
    named = named or {f"{number}.png" if column == "images" else f"{number}.{column}": png(number)}
    for name, content in named.items():
        if name.endswith(".png"):
            (folder / name).write_bytes(content)
    files = [str(folder / name) for name in named]
    return files if column == "videos" else files[0]


def _row(kind: str, number: int) -> dict[str, Any]:
    question = {"role": "user", "content": f"What is {number} and {number}?"}
    answer = {"role": "assistant", "content": f"It is {2 * number}."}
    if kind == "pt":
        return {"messages": [answer]}
    row: dict[str, Any] = {"messages": [question, answer]}
    if kind == "pairs":
        return row | {"rejected_response": "I do not know."}
    if kind == "kto":
        return row | {"label": number % 2 == 0}
    if kind == "cls":
        return {"messages": [question], "label": number % 2}
    if kind in ("embedding", "reranker"):
        speaker = "user" if kind == "embedding" else "assistant"
        others = [[{"role": speaker, "content": f"It is {2 * number + k}."}] for k in range(3)]
        return {"messages": [question], "positive_messages": others[:1], "negative_messages": others[1:]}
    if kind in ("grpo", "sample", "ppo"):
        return {"messages": [question], "solution": f"{2 * number}"}
    return row | ({"solution": f"{2 * number}"} if kind == "gkd" else {})


def senses(keys: dict[str, Any]) -> bool:
    """Whether the command is one for images, videos or sounds."""
    names = (*MODEL_KEYS, *DATA_KEYS, "external_plugins", "reward_funcs")
    return MULTIMODAL.search(" ".join(str(keys.get(name, "")) for name in names)) is not None


def has_stand_in_on_megatron(keys: dict[str, Any]) -> bool:
    """Whether a text model of another architecture stands in for the command's, which no Megatron builds here."""
    name = str(keys.get("model") or "")
    if not name or any(_first(table, name) for table in (SEEING, CONFIGURED)):
        return False
    return architecture_of(name) not in MEGATRON
