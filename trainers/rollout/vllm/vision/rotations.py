"""How heads are rotated by the three positions of a picture's tokens: time, height and width.

Each frequency belongs to one of the three. In transformers the class of a model says how they are dealt out; what the
configuration says of it, ``mrope_interleaved``, is not read, and ``mrope_section`` has a default. vLLM reads both from
the configuration, and has no defaults. So it is given the configuration with what transformers does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayhelper import ConfigError

# transformers' default of mrope_section, by type of the language model
IN_TURNS: dict[str, tuple[int, ...]] = {  # time, height, width, time, ...: mrope_interleaved
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text"), (24, 20, 20)),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), (11, 11, 10)),
}
IN_BLOCKS: dict[str, tuple[int, ...]] = {  # all of time, then all of height, then all of width
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), (16, 24, 24)),
    **dict.fromkeys(("glm4v_text", "glm4v_moe_text"), (8, 12, 12)),
}
KNOWN_TO_VLLM = ("default", "yarn")  # rope_type with which it reads mrope_section; others it rotates by one position


def rotation_overrides(configuration: Any, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """``hf_overrides`` of vLLM's EngineArgs for a model of this configuration: ``given``, and its rotations.

    Raises:
        ConfigError: vLLM cannot rotate as transformers does.
    """
    overrides = dict(given or {})
    text = configuration.get_text_config()
    kind = getattr(text, "model_type", "")
    section = IN_TURNS.get(kind) or IN_BLOCKS.get(kind)
    if section is None:
        return overrides
    rope = dict(getattr(text, "rope_parameters", None) or {})
    section = tuple(rope.get("mrope_section") or section)
    rope_type, width = rope.get("rope_type", "default"), _num_frequencies(text, rope)
    if rope_type not in KNOWN_TO_VLLM:
        raise ConfigError(
            f"vLLM rotates {kind} with rope_type: {rope_type} by one position of a picture's token and not by three "
            f"(it takes {', '.join(KNOWN_TO_VLLM)}). Write rollout_engine: hf."
        )
    if sum(section) != width:
        raise ConfigError(
            f"mrope_section of the model's configuration is {list(section)}, whose sum is {sum(section)}, and a head "
            f"of {kind} has {width} frequencies. vLLM takes only sections of that sum. Write rollout_engine: hf."
        )
    wanted = {"mrope_section": list(section), "mrope_interleaved": kind in IN_TURNS}
    if {name: rope.get(name, False) for name in wanted} != wanted:
        overrides["text_config"] = dict(overrides.get("text_config") or {}) | {"rope_parameters": rope | wanted}
    return overrides


def _num_frequencies(text: Any, rope: Mapping[str, Any]) -> int:
    """How many numbers of a head are rotated, by two."""
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(head * rope.get("partial_rotary_factor", 1.0)) // 2
