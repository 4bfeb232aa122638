"""Parameters against transformers' own models, activations against what autograd keeps, the rest by eye."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from rayhelper.errors import ConfigError
from rayhelper.planning.adapter import adapter_parameters
from rayhelper.planning.memory import (
    GIB,
    LOGITS_ROOM,
    RoleMemory,
    Term,
    Work,
    activation_bytes,
    cache_bytes_per_token,
    hf_engine,
    megatron_parameters,
    peak_bytes,
    scoring,
    training,
    vllm_engine,
)
from rayhelper.planning.model_shape import ModelShape
from rayhelper.planning.parallel_sizes import ParallelSizes

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 101,
}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama with every bias": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**{**SIZES, "head_dim": 8}),
    "qwen3 tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3 untied": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "qwen3 with biases": Qwen3Config(**SIZES, attention_bias=True),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=80),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS),
    "qwen3_moe with dense layers": Qwen3MoeConfig(**SIZES, **EXPERTS, decoder_sparse_step=2, mlp_only_layers=[3]),
    "qwen3_next": Qwen3NextConfig(**SIZES, **DELTA, **EXPERTS, mlp_only_layers=[1], linear_conv_kernel_dim=3),
    "qwen3_5": Qwen3_5TextConfig(**SIZES, **DELTA, tie_word_embeddings=True),
    "qwen3_5 with large states": Qwen3_5TextConfig(**SIZES, **DELTA | {"linear_value_head_dim": 60}),
    "qwen3_5 by default": Qwen3_5TextConfig(**SIZES),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(
        **{key: value for key, value in SIZES.items() if key != "intermediate_size"},
        **DELTA,
        **EXPERTS,
        shared_expert_intermediate_size=80,
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}
DENSE = ModelShape.of({**SIZES, "model_type": "qwen3"})
MOE = ModelShape.of({**SIZES, **EXPERTS, "model_type": "qwen3_moe"})
assert DENSE is not None
assert MOE is not None
ONE = ParallelSizes()


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_configuration_counts_exactly_the_parameters_of_its_model(name: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MODELS[name])
    MODELS[name].save_pretrained(tmp_path)
    shape = ModelShape.of(tmp_path)
    assert shape is not None
    assert shape == ModelShape.of(tmp_path / "config.json") == ModelShape.of(str(tmp_path))
    assert shape.is_exact
    assert shape.num_parameters == sum(weight.numel() for weight in model.parameters())


def test_a_known_model_has_its_published_size() -> None:
    sizes = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    sizes |= {"head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936}
    shape = ModelShape.of({**sizes, "tie_word_embeddings": True, "model_type": "qwen3"})
    assert shape is not None
    assert shape.num_parameters == 596_049_920


def test_an_unknown_architecture_is_counted_as_a_llama_and_says_so() -> None:
    shape = ModelShape.of({**SIZES, "model_type": "something_new"})
    llama = ModelShape.of({**SIZES, "model_type": "llama"})
    assert shape is not None
    assert llama is not None
    assert not shape.is_exact
    assert shape.num_parameters == llama.num_parameters


@pytest.mark.parametrize("said", [0, 48])
def test_a_qwen3_mixture_has_no_shared_expert_whatever_it_says(said: int) -> None:
    keys = {**SIZES, **EXPERTS, "model_type": "qwen3_moe"}
    assert ModelShape.of({**keys, "shared_expert_intermediate_size": said}) == ModelShape.of(keys)


def test_the_text_part_of_a_model_that_sees_is_its_shape() -> None:
    assert ModelShape.of({"model_type": "seeing", "text_config": {**SIZES, "model_type": "qwen3"}}) == DENSE


def test_a_name_of_a_hub_is_no_shape() -> None:
    assert ModelShape.of("Somebody/Some-Model") is None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"hidden_size": 64, "vocab_size": 9}, "has no num_hidden_layers, num_attention_heads, intermediate_size"),
        ({**SIZES, "hidden_size": "64"}, "hidden_size of model must be a positive whole number, got '64'"),
        ({**SIZES, "num_experts": -1}, "num_experts of model must be a positive whole number, got -1"),
        ({**SIZES, "decoder_sparse_step": "x"}, "decoder_sparse_step of model must be a positive whole number"),
    ],
)
def test_a_shape_with_a_mistake_is_refused_with_the_keys_it_needs(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelShape.of(config)
    assert named in str(caught.value)
    assert "Give a folder with a config.json" in str(caught.value)


def test_layers_without_experts_are_a_list() -> None:
    with pytest.raises(ConfigError, match="mlp_only_layers of model must be a list of layers, got 3"):
        ModelShape.of({**SIZES, **EXPERTS, "mlp_only_layers": 3})


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_file_that_holds_no_shape_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelShape.of(tmp_path)


def kept_bytes(config: PreTrainedConfig, num_tokens: int, dtype: torch.dtype, *, autocast: bool) -> int:
    """Bytes of activations that autograd keeps of a forward pass of the backbone, shared storage once."""
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is used twice
        return tensor

    tokens = torch.zeros(2, num_tokens // 2, dtype=torch.long)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        model.base_model(input_ids=tokens, use_cache=False)
    return sum(num_bytes for num_bytes, _ in kept.values())


@pytest.mark.parametrize(
    ("kind", "arithmetic"),
    [
        *(
            (kind, arithmetic)
            for kind in (LlamaConfig, Qwen3Config)
            for arithmetic in ("float32", "bfloat16", "autocast")
        ),
        (Qwen3MoeConfig, "float32"),
        (Qwen3MoeConfig, "bfloat16"),
    ],
)
def test_activations_are_what_autograd_keeps_of_a_layer(kind: type[PreTrainedConfig], arithmetic: str) -> None:
    """Between 2 and 4 layers and 64 and 128 tokens, so that neither the ends nor copies of weights count."""
    dtype = torch.bfloat16 if arithmetic == "bfloat16" else torch.float32
    kept = {}
    for layers in (2, 4):
        config = kind(**{**SIZES, **(EXPERTS if kind is Qwen3MoeConfig else {}), "num_hidden_layers": layers})
        for num_tokens in (64, 128):
            kept[layers, num_tokens] = kept_bytes(config, num_tokens, dtype, autocast=arithmetic == "autocast")
    measured = (kept[4, 128] - kept[2, 128]) - (kept[4, 64] - kept[2, 64])  # of two layers and 64 tokens
    shape = ModelShape.of(config.to_dict())
    assert shape is not None
    backend: Any = "fsdp" if arithmetic == "autocast" else "megatron"
    work = Work(micro_batch=1, length=32, backend=backend, compute_bytes=4 if arithmetic == "float32" else 2)
    assert activation_bytes(shape, ONE, work) == pytest.approx(measured, rel=0.03)  # four layers and 32 tokens


def test_checkpointing_keeps_the_input_of_every_layer_and_one_layer() -> None:
    work = Work(micro_batch=2, length=8, backend="megatron", checkpointing=True)
    whole = activation_bytes(DENSE, ONE, Work(micro_batch=2, length=8, backend="megatron"))
    assert activation_bytes(DENSE, ONE, work) == 16 * 2 * 64 * 4 + whole // 4


def test_compiled_layers_keep_their_share_and_compute_one_layer_again() -> None:
    def kept(**settings: Any) -> int:
        return activation_bytes(DENSE, ONE, Work(**settings))

    assert kept(kept_share=0.0) == kept(checkpointing=True), "the inputs of all layers, and one layer"
    between = kept() + kept() // 4  # all, and one of four layers
    assert kept(kept_share=0.5) == (kept(checkpointing=True) + between) // 2


def test_activations_of_a_pipeline_are_those_of_all_layers_while_micro_batches_last() -> None:
    def kept(num_micro_batches: int | None, virtual: int = 1) -> int:
        sizes = ParallelSizes(pipeline=4, virtual_pipeline=virtual)
        return activation_bytes(DENSE, sizes, Work(backend="megatron", num_micro_batches=num_micro_batches))

    whole = activation_bytes(DENSE, ONE, Work(backend="megatron"))
    assert kept(None) == kept(8) == whole
    assert kept(1) == whole // 4
    assert kept(None, virtual=3) == pytest.approx(whole * (1 + 3 / 12))


def test_tensor_parallelism_divides_all_but_norms_and_sequence_parallelism_those_too() -> None:
    def kept(**sizes: Any) -> int:
        return activation_bytes(DENSE, ParallelSizes(**sizes), Work(1, 1, backend="megatron"))

    norms = 4 * 2 * (4 + 2 * 2) * 64  # four layers of two norms
    assert kept(tensor=2) - norms == (kept() - norms) // 2
    assert kept(tensor=2, sequence=True) == kept() // 2
    assert activation_bytes(DENSE, ParallelSizes(context=4), Work(1, 8, backend="megatron")) == 2 * kept()


def terms(found: tuple[Term, ...]) -> dict[str, int]:
    return {term.name: term.num_bytes for term in found}


def test_fsdp_divides_sixteen_bytes_a_parameter() -> None:
    found = terms(training(DENSE, ParallelSizes(data=4), Work(compute_bytes=4)))
    own = DENSE.num_parameters // 4
    assert DENSE.num_parameters % 4 == 0
    assert (found["weights"], found["gradients"], found["optimizer"]) == (4 * own, 4 * own, 8 * own)
    assert found["gathered"] == 4 * (DENSE.ends + 2 * DENSE.largest_layer)
    assert "gathered" not in terms(training(DENSE, ONE, Work(compute_bytes=4)))


def test_megatron_holds_weights_and_gradients_whole_and_divides_the_optimizer() -> None:
    found = terms(training(DENSE, ParallelSizes(data=4), Work(backend="megatron")))
    own = DENSE.num_parameters
    assert (found["weights"], found["gradients"], found["optimizer"]) == (2 * own, 4 * own, 12 * own // 4)
    plain = Work(backend="megatron", distributed_optimizer=False)
    assert terms(training(DENSE, ParallelSizes(data=4), plain))["optimizer"] == 12 * own
    single = Work(backend="megatron", compute_bytes=4)
    assert terms(training(DENSE, ParallelSizes(data=4), single))["optimizer"] == 8 * own // 4


def test_expert_states_are_divided_over_the_workers_that_hold_the_same_experts() -> None:
    sizes = ParallelSizes(tensor=2, data=4, expert=4, expert_tensor=1)
    dense, experts = megatron_parameters(MOE, sizes)
    assert experts == 4 * (8 // 4) * 3 * 64 * 48  # layers x own experts x three matrices
    found = terms(training(MOE, sizes, Work(backend="megatron")))
    assert found["optimizer"] == 12 * (-(-dense // 4) + experts // 2)  # 8 workers, 4 of them with other experts


def test_megatron_parameters_of_one_worker_are_all_parameters() -> None:
    assert sum(megatron_parameters(DENSE, ONE)) == DENSE.num_parameters
    for name in ("qwen3_next", "qwen3_5", "qwen3_5 with large states", "qwen3_5_moe"):
        shape = ModelShape.of(MODELS[name].to_dict())
        assert shape is not None
        assert sum(megatron_parameters(shape, ONE)) == shape.num_parameters


def test_a_pipeline_stage_has_as_many_layers_of_the_larger_kind_as_there_can_be() -> None:
    halves = ParallelSizes(pipeline=2)
    for name, kind in (("qwen3_5", "attention"), ("qwen3_5 with large states", "delta_rule")):
        shape = ModelShape.of(MODELS[name].to_dict() | {"tie_word_embeddings": False})
        assert shape is not None
        small, large = sorted((sum(shape.attention), sum(shape.delta_rule)))
        assert sum(getattr(shape, kind)) == large
        num_large = 1 if kind == "attention" else 2
        mlps = 2 * (sum(shape.dense_layer) - sum(shape.attention))
        end = shape.embedding + shape.hidden_size
        assert sum(megatron_parameters(shape, halves)) == num_large * large + (2 - num_large) * small + mlps + end


def test_only_layers_of_attention_have_a_cache() -> None:
    shape = ModelShape.of(MODELS["qwen3_5"].to_dict())
    assert shape is not None
    assert cache_bytes_per_token(shape) == 2 * 2 * 1 * 2 * 16
    assert sum(megatron_parameters(MOE, ONE)) == MOE.num_parameters


def test_tensor_and_pipeline_parallel_workers_hold_their_part() -> None:
    layer, norms = DENSE.dense_layer.split, DENSE.dense_layer.replicated
    padded = 51 * 64  # half of 101 tokens, rounded up
    assert megatron_parameters(DENSE, ParallelSizes(tensor=2)) == (4 * (layer // 2 + norms) + 2 * padded + 64, 0)
    assert megatron_parameters(DENSE, ParallelSizes(pipeline=2)) == (2 * (layer + norms) + 101 * 64 + 64, 0)


def test_the_fullest_stage_is_counted_where_stages_have_other_layers() -> None:
    layer = sum(DENSE.dense_layer)
    first, last = ParallelSizes(pipeline=2, first_stage=3), ParallelSizes(pipeline=2, last_stage=3)
    assert megatron_parameters(DENSE, first) == (3 * layer + 101 * 64, 0)
    assert megatron_parameters(DENSE, last) == (3 * layer + 101 * 64 + 64, 0)
    short = ParallelSizes(pipeline=3, first_stage=1, last_stage=1)  # 1 + 2 + 1
    assert megatron_parameters(DENSE, short) == (max(2 * layer, layer + 101 * 64 + 64), 0)
    one = activation_bytes(DENSE, ONE, Work(1, 1, backend="megatron")) / 4
    for sizes, held in ((first, 3 * 2), (last, max(1 * 2, 3 * 1)), (short, max(1 * 3, 2 * 2, 1 * 1))):
        assert activation_bytes(DENSE, sizes, Work(1, 1, backend="megatron")) == held * one
    work = Work(adapter=1000, backend="megatron")
    assert terms(training(DENSE, first, work))["adapter"] == 4 * 750


def test_a_frozen_model_has_neither_gradients_nor_states() -> None:
    found = terms(scoring(DENSE, ONE, Work(micro_batch=1, length=10)))
    assert found["weights"] == 2 * DENSE.num_parameters
    assert set(found) == {"weights", "activations", "logits"}
    assert found["logits"] == 3 * 4 * 101 * 10


def test_a_trained_head_keeps_something_for_the_backward_pass_as_far_as_it_may() -> None:
    def logits(kept: int) -> int:
        work = Work(micro_batch=1, length=10, kept_logits=kept)
        return terms(training(DENSE, ONE, work))["logits"]

    chunk = 3 * 4 * 101 * 10
    assert logits(LOGITS_ROOM) == chunk + 2 * 101 * 10
    assert logits(100) == chunk + 100
    assert logits(0) == chunk


@pytest.mark.parametrize(
    "targets", [["all-linear"], ["q_proj", "self_attn.v_proj"], ["o_proj", "gate_proj", "up_proj"]]
)
@pytest.mark.parametrize("kind", [Qwen3Config, LlamaConfig, Qwen3MoeConfig])
def test_an_adapter_counts_exactly_the_parameters_of_pefts(kind: Any, targets: list[str]) -> None:
    from peft import LoraConfig, get_peft_model

    config = kind(**{**SIZES, **(EXPERTS if kind is Qwen3MoeConfig else {})})
    names: Any = "all-linear" if targets == ["all-linear"] else [name.rpartition(".")[2] for name in targets]
    with torch.device("meta"):
        model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(r=3, target_modules=names))
    shape = ModelShape.of(config.to_dict())
    assert shape is not None
    wanted = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert adapter_parameters(shape, 3, targets) == wanted > 0


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("qwen3_5", "all-linear"),
        ("qwen3_5", ["in_proj_qkv", "in_proj_b", "q_proj", "out_proj"]),
        ("qwen3_next", ["in_proj_qkvz", "in_proj_ba", "out_proj", "k_proj"]),
    ],
)
def test_an_adapter_of_layers_with_a_state_counts_too(name: str, targets: Any) -> None:
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MODELS[name])
        adapted = get_peft_model(model, LoraConfig(r=3, target_modules=targets))
    shape = ModelShape.of(MODELS[name].to_dict())
    assert shape is not None
    wanted = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    assert adapter_parameters(shape, 3, [targets] if isinstance(targets, str) else targets) == wanted > 0


def test_under_an_adapter_it_alone_has_gradients_and_states() -> None:
    work = Work(adapter=1000)
    alone = terms(training(DENSE, ONE, work))
    assert alone["weights"] == 2 * DENSE.num_parameters
    assert (alone["adapter"], alone["gradients"], alone["optimizer"]) == (4000, 4000, 8000)
    assert "gathered" not in alone
    several = terms(training(DENSE, ParallelSizes(data=4), work))
    assert several["weights"] == 4 * DENSE.num_parameters // 4
    assert (several["adapter"], several["optimizer"]) == (1000, 2000)
    assert several["gathered"] == terms(training(DENSE, ParallelSizes(data=4), Work()))["gathered"]
    sizes = ParallelSizes(tensor=2, pipeline=2, data=4)
    cut = terms(training(DENSE, sizes, replace(work, backend="megatron")))
    assert cut["weights"] == 2 * sum(megatron_parameters(DENSE, sizes))
    assert (cut["adapter"], cut["gradients"], cut["optimizer"]) == (2000, 2000, 8 * 125)
    with_reference = terms(training(DENSE, ParallelSizes(data=4), replace(work, has_reference=True)))
    assert with_reference["reference"] == 2 * DENSE.num_parameters // 4


def test_a_reference_model_lies_beside_the_trained_one() -> None:
    assert terms(training(DENSE, ONE, Work(has_reference=True)))["reference"] == 2 * DENSE.num_parameters


def test_vllm_fills_its_share_of_the_gpu_with_the_cache() -> None:
    weights, cache = vllm_engine(DENSE, 2, 0.5, 4 * GIB)
    assert weights.num_bytes == DENSE.num_parameters
    assert weights.num_bytes + cache.num_bytes == 2 * GIB
    assert vllm_engine(DENSE, 1, 0.5, 1000)[1].num_bytes == 0


def test_a_token_of_the_cache_holds_keys_and_values_of_at_least_one_head() -> None:
    assert cache_bytes_per_token(DENSE) == 2 * 2 * 4 * 2 * 16
    assert cache_bytes_per_token(DENSE, 2) == cache_bytes_per_token(DENSE, 8) == 2 * 2 * 4 * 1 * 16


def test_transformers_generates_with_the_trained_weights_where_they_are() -> None:
    work = Work(length=10)
    assert terms(hf_engine(DENSE, work, 3, shares_weights=True)) == {"KV cache": 30 * cache_bytes_per_token(DENSE)}
    assert terms(hf_engine(DENSE, work, 3, shares_weights=False))["weights"] == 2 * DENSE.num_parameters


def test_colocated_roles_need_what_works_and_what_stays() -> None:
    train = RoleMemory(
        "train",
        (
            Term("weights", 10, freed_by=("offload_model",)),
            Term("optimizer", 20, freed_by=("offload_optimizer",)),
            Term("activations", 40, stays=False, is_estimate=True),
        ),
        frozenset({"offload_optimizer"}),
    )
    rollout = RoleMemory("rollout", (Term("KV cache", 50, freed_by=("sleep_level",)),), frozenset({"sleep_level"}))
    assert peak_bytes([train.awake, rollout.awake]) == 10 + 20 + 40 + 50
    assert peak_bytes([train, rollout]) == max(10 + 20 + 40, 50 + 10)
    assert peak_bytes([train.counted.awake, rollout.counted.awake]) == 10 + 20 + 50
    assert peak_bytes([train]) == 70


def test_states_that_are_here_for_the_step_alone_are_not_beside_activations() -> None:
    work = Work(backend="megatron")
    sizes = ParallelSizes(tensor=2, sequence=True)
    train = RoleMemory("train", training(DENSE, sizes, work))
    parts = terms(train.terms)
    passing = parts["activations"] + parts["logits"]
    resting = replace(train, offloads=frozenset({"optimizer_offload"}))
    assert train.at_work == sum(parts.values())
    assert resting.at_work == train.at_work - min(parts["optimizer"], passing)
    assert resting.awake.at_work == train.at_work
    assert resting.idle == parts["weights"] + parts["gradients"]
    assert resting.counted.at_work == train.counted.at_work
    all_keys = replace(train, offloads=frozenset({"optimizer_offload", "grad_offload", "param_offload"}))
    assert all_keys.idle == 0
    for keys, left in (
        ({"offload_model"}, ["gradients", "optimizer"]),
        ({"offload_optimizer"}, ["weights"]),  # gradients go with what the optimizer remembers
        ({"grad_offload"}, ["weights", "optimizer"]),
        ({"param_offload"}, ["gradients", "optimizer"]),
    ):
        found = replace(train, offloads=frozenset(keys)).idle
        assert found == sum(parts[name] for name in left), keys


def test_states_that_come_in_pieces_need_room_for_two() -> None:
    def at_work(at_once: int | None, activations: int) -> int:
        weights = Term("weights", 30)
        states = Term("optimizer", 60, freed_by=("optimizer_offload",), at_once=at_once)
        passing = Term("activations", activations, stays=False, is_estimate=True)
        return RoleMemory("train", (weights, states, passing), frozenset({"optimizer_offload"})).at_work

    assert at_work(None, 50) == 30 + 60
    assert at_work(9, 50) == 30 + 50
    assert at_work(9, 5) == 30 + 9
    found = {term.name: term for term in training(DENSE, ParallelSizes(), Work())}
    assert found["optimizer"].at_once == found["optimizer"].num_bytes < GIB  # smaller than a piece
    large = replace(DENSE, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48)
    found = {term.name: term for term in training(large, ParallelSizes(), Work())}
    assert found["optimizer"].at_once == 2 * GIB < found["optimizer"].num_bytes


def test_processes_on_one_gpu_work_at_the_same_time_but_for_those_that_generate() -> None:
    passing = Term("activations", 40, stays=False)
    train = RoleMemory(
        "train", (Term("weights", 10, freed_by=("offload_model",)), passing), frozenset({"offload_model"})
    )
    critic = RoleMemory("critic", (Term("weights", 1), replace(passing, num_bytes=5)))
    cache = Term("KV cache", 60, freed_by=("sleep_level",))
    rollout = RoleMemory("rollout", (cache,), frozenset({"sleep_level"}), generates=True)
    assert peak_bytes([train.awake], [rollout.awake]) == 10 + 40 + 60
    assert peak_bytes([train], [rollout]) == max(10 + 40, 60)
    assert peak_bytes([train], [critic], [rollout]) == max(10 + 40 + 1 + 5, 60 + 1)
    assert peak_bytes([train, critic], [rollout]) == max(10 + 40 + 1, 60 + 1)
    assert peak_bytes([], [train]) == 50
