"""Small local models and data in the place of those that ms-swift's commands name, of the same architecture and kind.

A model that sees images is replaced by the text model inside it, and data with images by texts: what is left is whether
the keys of the command are taken. Which commands would need images is ``needs_images``.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

MULTIMODAL = re.compile(
    r"-VL|Omni|OCR|vl2|InternVL|Keye|MiniCPM-V|MOSS-VL|Ovis|TTS|Emu3|gme-|Audio|multimodal|4\.6V|jina-reranker-m0"
    r"|clevr|image|latex_ocr|coco|video|ocr|llava|RLAIF-V|speech|tts|geometry|ok-vqa|chord|deepeyes|r1v",
    re.IGNORECASE,
)
ARCHITECTURES = (  # the first that matches the model's name; of a model with images the text model
    (r"Qwen3-?Next", "qwen3_next"),
    (r"Qwen3\.[58].*A\d+B", "qwen3_5_moe_text"),
    (r"Qwen3\.[58]", "qwen3_5_text"),
    (r"Qwen3.*A\d+B|InternVL3_5-30B|Qwen3-Omni", "qwen3_moe"),
    (r"Qwen1\.5-MoE", "qwen2_moe"),
    (r"gpt-oss|GPT-OSS", "gpt_oss"),
    (r"Qwen3|TTS|MOSS|Ovis2\.5|Keye", "qwen3"),
    (r"GLM-4\.[56]", "glm4_moe"),
    (r"GLM-4", "glm4"),
    (r"Llama-4", "llama4_text"),
    (r"[Ll]lama", "llama"),
    (r"Moonlight|deepseek", "deepseek_v3"),
    (r"[Nn]emotron.*A\d+B", "nemotron_h"),
    (r"gemma", "gemma3_text"),
    (r"Phi", "phi3"),
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


DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # three of four layers keep a state
MEGATRON = ("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", *DELTA)  # which backend: megatron builds


def architecture_of(name: str) -> str:
    """transformers' model_type of the text model of that name."""
    return next(made for pattern, made in ARCHITECTURES if re.search(pattern, name))


def model_for(name: str, folder: Path, program: str, seed: int = 0) -> str:
    """A folder with a tiny model of the architecture that the name says; made once.

    For ``megatron`` one that our backend builds: mixtures are Qwen3's, others Qwen3. See ``missing``.
    """
    from tests.models.architectures import save

    architecture = architecture_of(name)
    if program == "megatron" and architecture not in MEGATRON:
        is_mixture = "moe" in architecture or architecture in ("gpt_oss", "qwen3_next", "deepseek_v3", "nemotron_h")
        architecture = "qwen3_moe" if is_mixture or "A" in re.findall(r"-(A)\d+B", name) else "qwen3"
    layers = next((depth for pattern, depth in DEPTHS if re.search(pattern, name)), 8)
    target = folder / (architecture if layers == 8 else f"{architecture}_{layers}")
    target = target.with_name(f"{target.name}_{seed}") if seed else target
    if not (target / "config.json").is_file():
        fields: dict[str, Any] = {"max_position_embeddings": 131072}
        if program == "megatron" or architecture in MEGATRON:  # sizes that parallel layouts divide
            fields |= {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": layers, "head_dim": 32}
            fields |= {"vocab_size": 320, "hidden_size": 256}
            fields |= {"num_experts": 8} if "moe" in architecture or architecture == "qwen3_next" else {}
            if architecture in DELTA:
                kinds = ["full_attention" if (layer + 1) % 4 == 0 else "linear_attention" for layer in range(layers)]
                fields |= {"layer_types": kinds, "linear_num_key_heads": 8, "linear_num_value_heads": 8}
        save(architecture, target, seed, **fields)
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
    if "cls" in str(keys.get("task_type", "")):
        kind = "cls"
    elif kind in ("dpo", "rm", "orpo", "cpo", "simpo"):
        kind = "pairs"
    target = folder / f"{kind}.jsonl"
    if not target.is_file():
        target.write_text("".join(f"{json.dumps(_row(kind, number))}\n" for number in range(rows)))
    return str(target)


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
    if kind in ("grpo", "sample", "ppo"):
        return {"messages": [question], "solution": f"{2 * number}"}
    return row | ({"solution": f"{2 * number}"} if kind == "gkd" else {})


def missing(program: str, keys: dict[str, Any]) -> str | None:
    """What the real model or the real data need that is not here, and that the stand-ins leave out."""
    said = [str(keys.get(name, "")) for name in (*MODEL_KEYS, *DATA_KEYS, "external_plugins", "reward_funcs")]
    if MULTIMODAL.search(" ".join(said)):
        return "images, videos or audio"
    architecture = architecture_of(str(keys.get("model", "")))
    if program == "megatron" and keys.get("model") and architecture not in MEGATRON:
        return f"{architecture} on Megatron"
    return None
