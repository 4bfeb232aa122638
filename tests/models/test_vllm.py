"""vLLM beside training, of models that have something of their own there: as recorded, and equal to the policy.

All others: ``python -m tests.models.run``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import table
from tests.models.architectures import save
from tests.models.cells import VLLM_COOL, VLLM_RUN, vllm_cells

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
    found = vllm_cells(name, save(name, tmp_path / "model"), tmp_path)
    assert found == {VLLM_RUN: "ok", VLLM_COOL: "ok"} == {cell: table.read()[name][cell] for cell in found}
