"""The losses that balance experts, in every way of cutting a model, against their formulas on transformers' model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import megatron_on_cpu
from tests.backends.batches import plain_loss, samples_of, weighted_loss
from tests.backends.ranks import run_ranks
from tests.backends.test_megatron import CP, EP, ETP, FULL, PLAIN, PP, SP, TP, TRAINING, VPP, Layout, save, told
from trainers.backends.fsdp.hf_model import named_weights

megatron_on_cpu.take_back()

MICRO = 4  # two micro-batches of the eight documents, or one on each of two workers; they differ in tokens
BATCH: dict[str, Any] = {"moe_aux_loss_coeff": 0.05, "moe_z_loss_coeff": 0.02}  # by micro-batch
DOCUMENT: dict[str, Any] = {"moe_aux_loss_coeff": 0.05, "moe_router_load_balancing_type": "seq_aux_loss"}
Z: dict[str, Any] = {"moe_z_loss_coeff": 0.02, "moe_router_load_balancing_type": "none"}
RECOMPUTED = {"moe_layer_recompute": True}
GATHERED = {"moe_token_dispatcher_type": "allgather"}  # all rows are padded to one length
# By number of ranks, which start once for all; with rows in a micro-batch
CASES: dict[int, list[tuple[Layout, dict[str, Any], int]]] = {
    1: [(PLAIN, BATCH, MICRO), (PLAIN | FULL, DOCUMENT, 3), (PLAIN, Z, 5)],
    2: [
        (PLAIN, BATCH, MICRO),
        (PLAIN, DOCUMENT, 3),
        ({TP: 2} | SP | PLAIN, BATCH, MICRO),
        ({EP: 2} | GATHERED | PLAIN, BATCH, MICRO),
        ({PP: 2} | PLAIN, BATCH, MICRO),
        ({CP: 2} | PLAIN, DOCUMENT, 3),
    ],
    4: [
        ({TP: 2, CP: 2} | SP | FULL | PLAIN, BATCH | DOCUMENT, MICRO),
        ({CP: 2, EP: 2} | RECOMPUTED | PLAIN, BATCH, MICRO),
        ({TP: 2, EP: 2, ETP: 1} | SP | PLAIN, BATCH, MICRO),
        ({PP: 2, VPP: 2, EP: 2} | FULL | PLAIN, DOCUMENT, 1),
        ({PP: 2, EP: 2}, BATCH, MICRO),
    ],
}


def one(folder: Path, layout: Layout, fields: dict[str, Any], micro_batch_size: int) -> dict[str, Any]:
    """What a rank tells of one step, and the gradients of it."""
    from trainers.backends.megatron.backend import MegatronBackend
    from trainers.backends.megatron.settings import MegatronSettings

    backend = MegatronBackend(folder, settings=MegatronSettings(**layout, transformer=fields), **TRAINING)
    index, count, leader = backend.shard
    samples = samples_of()
    mine = samples[np.array_split(np.arange(len(samples)), count)[index]]
    logps = backend.token_logps(mine, micro_batch_size=3).values
    gradients: dict[str, torch.Tensor] = {}
    step = backend.optimizer.step

    def watched() -> Any:
        if not backend.settings.use_distributed_optimizer:
            found = backend.weights.named_weights(of=lambda weight: weight.main_grad)
            gradients.update((name, value.clone()) for name, value in found)
        return step()

    backend.optimizer.step = watched
    loss = partial(weighted_loss, float(samples.target_mask.values.sum()))
    values = backend.step(mine, loss, micro_batch_size=micro_batch_size).values()
    return {"leader": leader, "logps": logps, "values": values, "gradients": gradients}


def of_cases(rank: int, folder: Path, cases: list[Any]) -> list[dict[str, Any]]:
    megatron_on_cpu.install()
    found = []
    for case in cases:
        found.append(one(folder, *case))
        megatron_on_cpu.end_groups()
    return found


def wanted(folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """The same by the formulas, from the logits of the routers of transformers' model, with autograd."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    gates = [part for name, part in model.named_modules() if name.endswith(".gate")]
    logits: dict[Any, list[torch.Tensor]] = {gate: [] for gate in gates}
    for gate in gates:
        gate.register_forward_hook(
            lambda gate, inputs, _: logits[gate].append(inputs[0].reshape(-1, gate.weight.shape[1]) @ gate.weight.T)
        )
    samples = samples_of()
    loss = plain_loss(model, samples)  # one document after the other
    by_document = fields.get("moe_router_load_balancing_type") == "seq_aux_loss"
    groups = [[k] for k in range(len(samples))] if by_document else [range(0, MICRO), range(MICRO, len(samples))]
    aux_losses, z_losses = [], []
    for of_documents in logits.values():
        of_groups = [torch.cat([of_documents[k] for k in group]) for group in groups]
        aux_losses.append(sum(len(logits_TE) * balance(logits_TE) for logits_TE in of_groups))
        z_losses.append(sum((logits_TE.exp().sum(1).log() ** 2).sum() for logits_TE in of_groups))
    num_tokens = len(samples.input_ids.values)
    aux_coeff, z_coeff = (fields.get(f"moe_{name}_loss_coeff", 0.0) for name in ("aux", "z"))
    (loss + (aux_coeff * sum(aux_losses) + z_coeff * sum(z_losses)) / num_tokens).backward()
    for weight in model.parameters():
        weight.data = torch.zeros_like(weight) if weight.grad is None else weight.grad
    values = {"loss": float(loss)}
    if aux_coeff:
        values["moe_aux_loss"] = float(sum(aux_losses)) / num_tokens / len(gates)
    if z_coeff:
        values["moe_z_loss"] = float(sum(z_losses)) / num_tokens / len(gates)
    return {"values": values, "gradients": {name: value.clone() for name, value in named_weights(model)}}


def balance(logits_TE: torch.Tensor) -> torch.Tensor:
    """E sum_i f_i P_i: 1 where all experts are used alike."""
    num_chosen = 2
    chosen = torch.bincount(logits_TE.topk(num_chosen).indices.flatten(), minlength=logits_TE.shape[1])
    means = logits_TE.softmax(1).mean(0)
    return logits_TE.shape[1] * (chosen / chosen.sum() * means).sum()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers = {"num_hidden_layers": 4, "mlp_only_layers": [2]}
    return save("qwen3_moe", tmp_path_factory.mktemp("model"), **layers)


@pytest.mark.parametrize("num_ranks", CASES)
def test_experts_are_balanced_alike_however_the_model_is_cut(num_ranks: int, folder: Path, tmp_path: Path) -> None:
    cases = CASES[num_ranks]
    ranks = run_ranks(num_ranks, of_cases, folder, [*cases, (PLAIN, {}, MICRO)], folder=tmp_path)
    plain = [rank[-1] for rank in ranks]
    assert not plain[0]["values"].keys() & {"moe_aux_loss", "moe_z_loss"}, "nobody asked for any"
    for k, (layout, fields, _) in enumerate(cases):
        right, case = wanted(folder, fields), f"{told(layout)} {fields}"
        leaders = [rank[k] for rank in ranks if rank[k]["leader"]]
        for name, value in right["values"].items():
            found = sum(leader["values"][name] for leader in leaders)
            assert found == pytest.approx(value, abs=1e-5), f"{case}: {name}"
        assert leaders[0]["values"].keys() - plain[0]["values"].keys() == right["values"].keys() - {"loss"}, case
        for rank in ranks:
            if rank[k]["gradients"]:
                assert rank[k]["gradients"].keys() == right["gradients"].keys(), f"{case}: names"
                for name, value in right["gradients"].items():
                    found = rank[k]["gradients"][name]
                    np.testing.assert_allclose(found, value, atol=1e-5, err_msg=f"{case}: gradient of {name}")
            else:
                norm = sum(float((value**2).sum()) for value in right["gradients"].values()) ** 0.5
                assert rank[k]["values"]["grad_norm"] == pytest.approx(norm, rel=1e-5), case
    if num_ranks == 1:
        np.testing.assert_array_equal(ranks[0][0]["logps"], plain[0]["logps"], "scores know nothing of it")
        differences = [plain[0]["gradients"][name] - value for name, value in ranks[0][0]["gradients"].items()]
        assert max(float(one.abs().max()) for one in differences) > 1e-3, "the losses pull at something"
