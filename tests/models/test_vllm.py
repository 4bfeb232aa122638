"""vLLM beside training, of models that have something of their own there: as recorded, and equal to the policy.

All others: ``python -m tests.models.run``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tiny.architectures import save
from rayhelper import ConfigError
from tests.e2e.test_vllm_runs import VLLM, greedy_config
from tests.models import table
from tests.models.cells import ADAPTER, BESIDE, beside_cells
from trainers.grpo.trainer import GRPOTrainer

pytestmark = pytest.mark.xdist_group("vllm")


@pytest.mark.parametrize(
    "name",
    [
        "granite",  # divides its logits itself, also at another temperature
        "deepseek_v3",  # whose latent attention vLLM rotates wrongly on a CPU
        "olmo3",  # vLLM runs transformers' class, which is the policy's
        "qwen3_moe",  # whose experts vLLM packs on a CPU
    ],
)
def test_vllm_draws_what_the_policy_would(name: str, tmp_path: Path) -> None:
    found = beside_cells(name, save(name, tmp_path / "model"), tmp_path)
    assert found == {cell: table.read()[name][cell] for cell in found}
    assert {cell for cell in BESIDE if found[cell] != "ok"} <= {ADAPTER}


@pytest.mark.parametrize(("name", "told"), [("qwen3_next", "take only bfloat16"), ("minimax_m2", "only by a softmax")])
def test_a_model_that_vllm_cannot_run_on_a_cpu_is_refused_before_anything_starts(
    name: str, told: str, tmp_path: Path
) -> None:
    config = greedy_config(save(name, tmp_path / "model"), tmp_path / "run", **VLLM)
    with pytest.raises(ConfigError, match=f"vllm cannot run {name} on a CPU: .*{told}.*Use rollout_engine: hf"):
        GRPOTrainer.check(config, None)
