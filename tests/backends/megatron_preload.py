"""megatron-core, imported and nothing else: ranks are forked from a process that has it, and ``install`` the CPU."""

import megatron.core.dist_checkpointing
import megatron.core.distributed
import megatron.core.models.gpt.gpt_layer_specs
import megatron.core.models.gpt.gpt_model
import megatron.core.optimizer
import megatron.core.pipeline_parallel  # noqa: F401

from tests import megatron_on_cpu

megatron_on_cpu.take_back()
