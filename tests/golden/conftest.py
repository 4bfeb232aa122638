"""TRL without vLLM, which it imports wherever it is installed, for seconds: nothing here has TRL generate."""

from __future__ import annotations

from unittest.mock import patch

from trl import import_utils

with patch.object(import_utils, "is_vllm_available", lambda *_, **__: False):
    import trl.generation.vllm_generation  # noqa: F401
