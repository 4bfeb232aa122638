"""megatron-core, imported and nothing else: ranks are forked from a process that has it, and ``install`` the CPU.

It is imported after ``megatron_on_cpu``: what megatron-core decorates by torch.compile as it is imported stays as it is
written. Compiled in every rank, that was more than half of what the tests of the backend cost.
"""

import importlib
import sys

if "megatron.core" in sys.modules:
    raise RuntimeError("megatron is imported before this module: its functions would be compiled in each fork")

from tests import megatron_on_cpu

for name in (
    "dist_checkpointing",
    "distributed",
    "models.gpt.gpt_layer_specs",
    "models.gpt.gpt_model",
    "optimizer",
    "pipeline_parallel",
):
    importlib.import_module(f"megatron.core.{name}")
megatron_on_cpu.take_back()
