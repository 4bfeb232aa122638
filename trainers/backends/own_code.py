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
    told = f"model: {model!r} ({KIND}) has its own code, which RayHelper does not run"
    last = model.rstrip("/").rpartition("/")[2]
    ending = next((ending for pattern, ending in ENDINGS if re.fullmatch(pattern, last)), None)
    if ending is None:
        return f"{told}. Use the version for the class of transformers: its config.json has model_type: internvl."
    other = f"{model.rstrip('/')}{ending}"
    return f"{told}. The hub also has its weights for the class of transformers. Write model: {other}"
