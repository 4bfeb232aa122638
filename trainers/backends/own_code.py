"""Models with code of their own, of which the hub has the same weights for transformers' own class.

    InternVL3-8B      InternVL3-8B-hf
    InternVL3_5-8B    InternVL3_5-8B-HF

Source: ms-swift's ``swift/model/models/internlm.py``, which knows both by these names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

KIND = "internvl_chat"  # the model_type in config.json
ENDINGS = ((r"InternVL3-\d+B", "-hf"), (r"InternVL3_5-\d+B(-A\d+B)?", "-HF"))  # of a name, where there is such a form


def own_code_mistake(model: str, config: Mapping[str, Any]) -> str | None:
    """What is wrong with a folder or hub name whose ``config.json`` is of InternVL's own code; None: it is of none."""
    if config.get("model_type") != KIND:
        return None
    told = f"model: {model!r} ({KIND}) brings its own code, which is not run here"
    last = model.rstrip("/").rpartition("/")[2]
    ending = next((ending for pattern, ending in ENDINGS if re.fullmatch(pattern, last)), None)
    if ending is None:
        return f"{told}. Take a form of it for transformers' own class: its config.json says model_type: internvl."
    return f"{told}. The hub has its weights for transformers' own class too. Write model: {model.rstrip('/')}{ending}"
