"""Imported last by the process that ranks are forked from."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from tests.frozen import freeze_heap

get_checkpoint_conversion_mapping("qwen3")  # compiles 650 patterns, of all models: half of a rank's first step
freeze_heap()
