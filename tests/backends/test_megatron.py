"""The megatron backend on the CPU, in every way of cutting a model, against one process with transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests import megatron_on_cpu
from tests.backends.batches import plain_loss, samples_of, weighted_loss
from tests.backends.ranks import run_ranks
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.scores.head import ROOM

megatron_on_cpu.take_back()

Layout = dict[str, Any]
TRAINING: dict[str, Any] = {
    "learning_rate": 1e-2,
    "num_training_steps": 10,
    "weight_decay": 0.1,
    "adam_epsilon": 1e-3,  # weights without a gradient to speak of do not move by the sign of a rounding
    "max_grad_norm": 0.5,
}
STEPS, MICRO = 2, 3  # eight documents in micro-batches of 3, 3 and 2, or of 3 and 1 for each of two workers
SCORED = 4  # documents of a micro-batch that is scored
TP, PP, VPP, CP = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "context_parallel_size"),
)
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
SP, WHOLE = {"sequence_parallel": True}, {"sequence_parallel": False}
PLAIN = {"use_distributed_optimizer": False}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]}

SHAPE: dict[str, Any] = {
    "vocab_size": 261,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 48,  # which is among the samples' tokens: its embedding does not learn
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SHAPE | {"tie_word_embeddings": False},
    "qwen2": SHAPE | {"tie_word_embeddings": True},
    "qwen3": SHAPE | {"head_dim": 8, "tie_word_embeddings": False},
    "qwen3_moe": SHAPE | EXPERTS | {"num_hidden_layers": 2, "head_dim": 8, "mlp_only_layers": [1]},
    "qwen2_moe": SHAPE
    | EXPERTS
    | {"num_hidden_layers": 2, "norm_topk_prob": False, "shared_expert_intermediate_size": 40},
}
GROUPED: Layout = {"moe_grouped_gemm": True}
MOE_ACT: Layout = {"recompute_granularity": "selective", "recompute_modules": ("moe_act",)}
# By family and number of ranks, which start once for all layouts
CASES: dict[tuple[str, int], list[Layout]] = {
    ("llama", 2): [{}, {TP: 2} | WHOLE],
    ("qwen2", 1): [PLAIN],
    ("qwen2", 2): [
        {TP: 2} | SP | PLAIN,
        {PP: 2, FIRST: 3} | PLAIN,
        {PP: 2, VPP: 2} | PLAIN,
        {PP: 2, VPP: 1, FIRST: 1, LAST: 3},
        OVERLAP,
    ],
    ("qwen3", 2): [PLAIN, {TP: 2} | WHOLE | PLAIN, {TP: 2} | SP | SELECTIVE, {PP: 2, VPP: 2}, {CP: 2} | FULL | PLAIN],
    ("qwen3", 4): [
        {TP: 2, PP: 2} | SP | PLAIN,
        {TP: 2, CP: 2} | SP | PLAIN,
        {PP: 2, CP: 2} | FULL | PLAIN,
        {PP: 2, VPP: 2} | OVERLAP,
    ],
    ("qwen3_moe", 1): [PLAIN, FULL, GROUPED | MOE_ACT | PLAIN],
    ("qwen3_moe", 2): [
        {EP: 2} | PLAIN,
        {EP: 2} | GROUPED,
        {EP: 2, "moe_token_dispatcher_type": "allgather"} | PLAIN,
        {TP: 2} | SP | GROUPED | MOE_ACT | PLAIN,
    ],
    ("qwen3_moe", 4): [
        {EP: 4} | PLAIN,
        {EP: 2, ETP: 2} | GROUPED | PLAIN,
        {TP: 2, EP: 2, ETP: 1} | SP | PLAIN,
        {CP: 2, EP: 2, "moe_layer_recompute": True} | PLAIN,
        {PP: 2, EP: 2, "moe_token_dispatcher_type": "allgather"} | PLAIN,
    ],
    ("qwen2_moe", 2): [{EP: 2} | PLAIN, {TP: 2} | SP | PLAIN],
}


def told(layout: Layout) -> str:
    """The layout in a word for each size, such as TP2-SP."""
    short = {TP: "TP", PP: "PP", VPP: "VPP", CP: "CP", EP: "EP", ETP: "ETP", FIRST: "first", LAST: "last"}
    return "-".join(f"{short[key]}{value}" if key in short else f"{key}={value}" for key, value in layout.items())


def save(family: str, folder: Path, **fields: Any) -> Path:
    """A tiny model of the family, weights drawn from one seed."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES.get(family, {}) | fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))  # norms and biases tell something too
    model.save_pretrained(folder / family)
    return folder / family


def one(folder: Path, layout: Layout) -> dict[str, Any]:
    """All that a rank finds out about its model: scores, steps, the gradients of the first, weights."""
    from trainers.backends.megatron.backend import MegatronBackend
    from trainers.backends.megatron.settings import MegatronSettings

    backend = MegatronBackend(folder, settings=MegatronSettings(**layout), **TRAINING)
    if backend.head is not None:
        assert backend.head.room == (0 if layout.get("recompute_granularity") == "full" else ROOM)
    index, count, leader = backend.shard
    samples = samples_of()
    mine = samples[np.array_split(np.arange(len(samples)), count)[index]]
    logps, entropies = backend.token_scores(mine, micro_batch_size=SCORED)
    ids, top = backend.top_logps(mine, 3, micro_batch_size=SCORED, temperature=0.7)
    gradients: dict[str, torch.Tensor] = {}
    step: Callable[[], Any] = backend.optimizer.step

    def watched() -> Any:
        if not gradients and not backend.settings.use_distributed_optimizer:
            found = backend.weights.named_weights(of=lambda weight: weight.main_grad)
            gradients.update((name, value.clone()) for name, value in found)
        return step()

    backend.optimizer.step = watched
    total = float(samples.target_mask.values.sum())
    loss = partial(weighted_loss, total)
    taken = [backend.step(mine, loss, micro_batch_size=MICRO).values() for _ in range(STEPS)]
    return {
        "index": index,
        "leader": leader,
        "layers": [len(stage.decoder.layers) for stage in backend.stages],
        "logps": logps.values,
        "entropies": entropies.values,
        "top ids": ids.values,
        "top logps": top.values,
        "losses": [step["loss"] for step in taken if leader],
        "norms": [step["grad_norm"] for step in taken],
        "gradients": gradients,
        "weights": {name: weight.clone() for name, weight in backend.named_weights()},
    }


def of_layouts(rank: int, folder: Path, layouts: list[Layout]) -> list[dict[str, Any]]:
    megatron_on_cpu.install()
    found = []
    for layout in layouts:
        found.append(one(folder, layout))
        megatron_on_cpu.end_groups()
    return found


def wanted(folder: Path) -> dict[str, Any]:
    """The same from transformers in one process."""
    samples = samples_of()
    backend = FsdpBackend(folder, **TRAINING)
    logps, entropies = backend.token_scores(samples, micro_batch_size=SCORED)
    ids, top = backend.top_logps(samples, 3, micro_batch_size=SCORED, temperature=0.7)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    plain_loss(model, samples).backward()
    named = {weight: name for name, weight in model.named_parameters()}
    for weight in named:  # as a checkpoint has them: experts are stacked in memory
        weight.data = torch.zeros_like(weight) if weight.grad is None else weight.grad
    gradients = {}
    from trainers.backends.fsdp.hf_model import named_weights

    gradients = {name: value.clone() for name, value in named_weights(model)}
    loss = partial(weighted_loss, float(samples.target_mask.values.sum()))
    taken = [backend.step(samples, loss, micro_batch_size=MICRO).values() for _ in range(STEPS)]
    return {
        "logps": logps.values,
        "entropies": entropies.values,
        "top ids": ids.values,
        "top logps": top.values,
        "losses": [step["loss"] for step in taken],
        "norms": [step["grad_norm"] for step in taken],
        "gradients": gradients,
        "weights": {name: weight.clone() for name, weight in backend.named_weights()},
    }


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for family in FAMILIES:
        path = save(family, folder)
        found[family] = path, wanted(path)
    return found


@pytest.mark.parametrize(("family", "num_ranks"), CASES, ids=[f"{family}-{ranks}" for family, ranks in CASES])
def test_a_model_in_parts_is_the_model(
    family: str, num_ranks: int, oracles: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    folder, right = oracles[family]
    layouts = CASES[family, num_ranks]
    ranks = run_ranks(num_ranks, of_layouts, folder, layouts, folder=tmp_path)
    for k, layout in enumerate(layouts):
        compare([rank[k] for rank in ranks], right, told(layout))


def test_stages_have_as_many_layers_as_is_said(tmp_path: Path) -> None:
    folder = save("llama", tmp_path, num_hidden_layers=6)
    right = wanted(folder)
    layouts = [{PP: 4, FIRST: 1, LAST: 1} | PLAIN, {PP: 2, VPP: 2, FIRST: 4, LAST: 2} | PLAIN]
    ranks = run_ranks(4, of_layouts, folder, layouts, folder=tmp_path)
    for k, layout in enumerate(layouts):
        compare([rank[k] for rank in ranks], right, told(layout))
    assert [rank[0]["layers"] for rank in ranks] == [[1], [2], [2], [1]]
    assert [rank[1]["layers"] for rank in ranks] == [[2, 2], [2, 2], [1, 1], [1, 1]]


def test_a_padding_token_is_counted_from_the_end_where_it_is_negative(tmp_path: Path) -> None:
    folder = save("llama", tmp_path)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"pad_token_id": config["pad_token_id"] - config["vocab_size"]}))
    right = wanted(folder)
    assert SHAPE["pad_token_id"] in samples_of().input_ids.values
    assert not right["gradients"]["model.embed_tokens.weight"][SHAPE["pad_token_id"]].any()
    layout = {TP: 2} | PLAIN
    ranks = run_ranks(2, of_layouts, folder, [layout], folder=tmp_path)
    compare([rank[0] for rank in ranks], right, told(layout))


def test_how_a_model_adds_its_gradients_is_not_how_the_next_one_does(
    oracles: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    folder, right = oracles["qwen3"]
    layouts: list[Layout] = [{"ddp": {"reduce_scatter_with_fp32_accumulation": True}} | OVERLAP, OVERLAP]
    ranks = run_ranks(2, of_layouts, folder, layouts, folder=tmp_path)
    for k, layout in enumerate(layouts):
        compare([rank[k] for rank in ranks], right, told(layout))


IDLE: list[Layout] = [{EP: 2} | PLAIN, {EP: 2} | GROUPED | MOE_ACT | PLAIN, {TP: 2} | SP | GROUPED | PLAIN]


def with_idle_experts(folder: Path) -> Path:
    """The model in a folder, whose routers now choose the same two experts for every token: the last have none."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 4.0
        for layer in model.model.layers:
            if hasattr(layer.mlp, "experts"):
                layer.mlp.gate.weight[:2, 0] += 8
                layer.mlp.gate.weight[2:, 0] -= 8
    model.save_pretrained(folder)
    return folder


def test_experts_and_workers_may_have_no_tokens(tmp_path: Path) -> None:
    folder = with_idle_experts(save("qwen3_moe", tmp_path))
    right = wanted(folder)
    idle = [weight for name, weight in right["gradients"].items() if ".mlp.experts.3." in name]
    assert idle
    assert not any(weight.any() for weight in idle)
    ranks = run_ranks(2, of_layouts, folder, IDLE, folder=tmp_path)
    for k, layout in enumerate(IDLE):
        compare([rank[k] for rank in ranks], right, told(layout))


def compare(ranks: list[dict[str, Any]], right: dict[str, Any], case: str) -> None:
    leaders = sorted((rank for rank in ranks if rank["leader"]), key=lambda rank: rank["index"])
    for name in ("logps", "entropies", "top logps"):
        found = np.concatenate([rank[name] for rank in leaders])
        np.testing.assert_allclose(found, right[name], atol=1e-5, err_msg=f"{case}: {name}")
    np.testing.assert_array_equal(np.concatenate([rank["top ids"] for rank in leaders]), right["top ids"], case)
    for rank in ranks:  # those of one slice know the same
        leader = leaders[rank["index"]]
        np.testing.assert_array_equal(rank["logps"], leader["logps"], case)
    losses = np.sum([rank["losses"] for rank in leaders], 0)
    np.testing.assert_allclose(losses, right["losses"], atol=1e-5, err_msg=f"{case}: losses")
    for rank in ranks:
        np.testing.assert_allclose(rank["norms"], right["norms"], rtol=1e-5, err_msg=f"{case}: norms of gradients")
        for kind in ("gradients", "weights"):
            if rank[kind]:
                assert rank[kind].keys() == right[kind].keys(), f"{case}: names"
                for name, value in right[kind].items():
                    np.testing.assert_allclose(rank[kind][name], value, atol=1e-5, err_msg=f"{case}: {kind} of {name}")


# Rotary embeddings


LONGER: dict[str, Any] = {"factor": 4.0, "rope_theta": 100.0, "original_max_position_embeddings": 8}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0, "rope_theta": 100.0},
    "llama3": LONGER | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": LONGER,
    "yarn as told": LONGER | {"attention_factor": 1.4, "beta_fast": 4.0, "truncate": False},
}


def logps_of(rank: int, folders: list[Path], layout: Layout) -> list[np.ndarray]:
    from trainers.backends.megatron.backend import MegatronBackend
    from trainers.backends.megatron.settings import MegatronSettings

    megatron_on_cpu.install()
    settings = MegatronSettings(**layout)
    return [
        MegatronBackend(one, settings=settings).token_logps(samples_of(), micro_batch_size=4).values for one in folders
    ]


def test_rotary_embeddings_of_every_kind_are_those_of_transformers(tmp_path: Path) -> None:
    folders = []
    for kind, parameters in KINDS.items():
        rotation = {"rope_type": kind.split()[0], **parameters}
        folders.append(save("qwen3", tmp_path / kind, rope_parameters=rotation))
    right = [FsdpBackend(one).token_logps(samples_of(), micro_batch_size=4).values for one in folders]
    differences = [np.abs(one - other).max() for k, one in enumerate(right) for other in right[:k]]
    assert min(differences) > 1e-3, "each kind is another model"
    for found in run_ranks(2, logps_of, folders, {CP: 2}, folder=tmp_path):
        for kind, logps, wanted_logps in zip(KINDS, found, right, strict=True):
            np.testing.assert_allclose(logps, wanted_logps, atol=1e-5, err_msg=kind)


# Values


def values_of(rank: int, folder: Path, head: torch.Tensor, layouts: list[Layout]) -> list[Any]:
    """Values, and the losses of the steps that learn them, from one ``head``."""
    from trainers.backends.megatron.backend import MegatronBackend
    from trainers.backends.megatron.settings import MegatronSettings

    megatron_on_cpu.install()
    found = []
    for layout in layouts:
        backend: Any = MegatronBackend(folder, head="value", settings=MegatronSettings(**layout), **TRAINING)
        own = {name: head if name == "score.weight" else weight for name, weight in backend.named_weights()}
        backend.load_weights(own.items())
        found.append((backend.shard, *learned_values(backend, *backend.shard[:2])))
        megatron_on_cpu.end_groups()
    return found


def learned_values(backend: Any, index: int = 0, count: int = 1) -> tuple[Any, Any, Any]:
    samples = samples_of()
    mine = samples[np.array_split(np.arange(len(samples)), count)[index]]
    before = backend.token_values(mine, micro_batch_size=SCORED).values
    steps = [backend.step(mine, squares, micro_batch_size=MICRO).values() for _ in range(STEPS)]
    return (
        before,
        [step.get("loss", 0.0) for step in steps],
        {name: weight.clone() for name, weight in backend.named_weights()},
    )


def squares(values_BT: torch.Tensor, mask_BT: torch.Tensor, micro: Any, metrics: Any) -> torch.Tensor:
    return ((values_BT - 1.0)[mask_BT] ** 2).sum() / 50


def test_values_are_those_of_a_classifier(oracles: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path) -> None:
    folder = oracles["qwen3"][0]
    oracle = FsdpBackend(folder, head="value", **TRAINING)
    head = dict(oracle.named_weights())["score.weight"].clone()
    values, losses, weights = learned_values(oracle)
    layouts: list[Layout] = [{TP: 2} | SP, {PP: 2}, {CP: 2}, {}]
    ranks = run_ranks(2, values_of, folder, head, layouts, folder=tmp_path)
    for k, layout in enumerate(layouts):
        leaders = sorted(rank[k][0][0] for rank in ranks if rank[k][0][2])
        parts = {rank[k][0][0]: rank[k] for rank in ranks if rank[k][0][2]}
        found = np.concatenate([parts[index][1] for index in leaders])
        np.testing.assert_allclose(found, values, atol=1e-5, err_msg=told(layout))
        total = np.sum([parts[index][2] for index in leaders], 0)
        np.testing.assert_allclose(total, losses, rtol=1e-5, err_msg=told(layout))
        for rank in ranks:
            for name, weight in weights.items():
                np.testing.assert_allclose(rank[k][3][name], weight, atol=1e-5, err_msg=f"{told(layout)}: {name}")
