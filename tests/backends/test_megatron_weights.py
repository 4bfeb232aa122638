"""Weights between a Hugging Face checkpoint and megatron-core: every tensor comes back bit for bit, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.backends.ranks import run_ranks
from trainers.backends.megatron import weights as megatron_weights
from trainers.backends.megatron.architectures import has_experts
from trainers.backends.megatron.weights import MegatronWeights

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(vocab_size=97, **SIZES),
    "llama_biased": LlamaConfig(vocab_size=97, attention_bias=True, mlp_bias=True, **SIZES),
    "mistral": MistralConfig(vocab_size=98, head_dim=8, **SIZES),
    "qwen2": Qwen2Config(vocab_size=101, **SIZES | {"tie_word_embeddings": True}),
    "qwen3": Qwen3Config(vocab_size=130, head_dim=8, **SIZES),
    "qwen3_moe": Qwen3MoeConfig(vocab_size=131, head_dim=8, norm_topk_prob=True, **EXPERTS, **SIZES),
    "qwen2_moe": Qwen2MoeConfig(
        vocab_size=103, shared_expert_intermediate_size=24, mlp_only_layers=[1], **EXPERTS, **SIZES
    ),
}
ENDS = [5, 7]  # of generation_config.json alone
DENSE = ["llama", "llama_biased", "mistral", "qwen2", "qwen3"]
MIXTURES = ["qwen3_moe", "qwen2_moe"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints in float32, one a family; of several files each."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.2)
        model.generation_config.eos_token_id = ENDS
        model.save_pretrained(root / name, max_shard_size="60KB")
    return root


def layout(**sizes: int) -> dict[str, int]:
    """What ``initialize_model_parallel`` gets; tp, pp, vpp, ep, etp."""
    names = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "vpp": "virtual_pipeline_model_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
    }
    return {names[name]: size for name, size in sizes.items()}


def on_cpu() -> None:
    from tests import megatron_on_cpu  # a rank has it already; this process must not

    megatron_on_cpu.install()


def begin(sizes: dict[str, int]) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from tests import megatron_on_cpu

    megatron_on_cpu.end_groups()
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(7)


def transformer_config(config: PreTrainedConfig, sizes: dict[str, int], **fields: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    mixture = [has_experts(config, layer) for layer in range(config.num_hidden_layers)]
    if any(mixture):
        fields |= {
            "num_moe_experts": config.num_experts,
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_layer_freq": [int(sparse) for sparse in mixture],
            "moe_router_topk": config.num_experts_per_tok,
            "moe_router_pre_softmax": not config.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
            "moe_shared_expert_intermediate_size": getattr(config, "shared_expert_intermediate_size", None),
            "moe_shared_expert_gate": config.model_type == "qwen2_moe",
        }
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=getattr(config, "mlp_bias", False),
        add_qkv_bias=config.model_type in ("qwen2", "qwen2_moe"),
        qk_layernorm=config.model_type in ("qwen3", "qwen3_moe"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        pipeline_dtype=torch.float32,
        **{"params_dtype": torch.float32, **fields, **sizes},
    )


def one_product_an_expert(tokens: Any, weights: Any, num_tokens: Any, trans_b: bool) -> torch.Tensor:
    parts = tokens.split(num_tokens.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def build(config: PreTrainedConfig, sizes: dict[str, int], *, grouped: bool = False, **fields: Any) -> list[Any]:
    """The chunks of this rank, by megatron-core's own specs, with other weights than any checkpoint's."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.moe import experts

    if grouped:
        experts.gg = SimpleNamespace(
            assert_grouped_gemm_is_available=lambda: None, ops=SimpleNamespace(gmm=one_product_an_expert)
        )
        fields |= {"moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": True}
    transformer = transformer_config(config, sizes, **fields)
    tp = parallel_state.get_tensor_model_parallel_world_size()
    vpp = sizes.get("virtual_pipeline_model_parallel_size")
    chunks = []
    for stage in range(vpp or 1):
        place = {"ignore_virtual": False, "vp_stage": stage if vpp else None}
        spec = get_gpt_decoder_block_spec(
            transformer, use_transformer_engine=False, normalization="RMSNorm", vp_stage=place["vp_stage"]
        )
        chunks.append(
            GPTModel(
                transformer,
                spec,
                vocab_size=-(-config.vocab_size // tp) * tp,
                max_sequence_length=64,
                pre_process=parallel_state.is_pipeline_first_stage(**place),
                post_process=parallel_state.is_pipeline_last_stage(**place),
                share_embeddings_and_output_weights=config.tie_word_embeddings,
                position_embedding_type="rope",
                rotary_base=config.rope_parameters["rope_theta"],
                vp_stage=place["vp_stage"],
            )
        )
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(0.5)
    return chunks


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("model*.safetensors") for name, tensor in load_file(file).items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], case: str) -> None:
    assert found.keys() == expected.keys(), f"{case}: {found.keys() ^ expected.keys()}"
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not wrong, f"{case}: {wrong}"
    assert all(tensor.dtype == expected[name].dtype for name, tensor in found.items()), case


def state_of(chunks: list[Any]) -> list[torch.Tensor]:
    return [parameter.detach().clone() for chunk in chunks for parameter in chunk.parameters()]


def round_trips(rank: int, root: Path, cases: list[tuple[dict[str, int], list[str]]]) -> None:
    """Read and streamed back; given by name, after other weights, and equal; written and read by transformers."""
    on_cpu()
    for number, (sizes, names) in enumerate(cases):
        begin(sizes)
        for name in names:
            for grouped in (False, True) if name in MIXTURES else (False,):
                case = f"{name} {sizes} grouped={grouped}"
                config = AutoConfig.from_pretrained(root / name)
                chunks = build(config, sizes, grouped=grouped)
                weights = MegatronWeights(config, chunks, bucket_bytes=1 << 14)
                expected = tensors_of(root / name)
                weights.load(root / name)
                assert_equal(dict(weights.named_weights()), expected, case)
                read = state_of(chunks)
                with torch.no_grad():
                    for chunk in chunks:
                        for parameter in chunk.parameters():
                            parameter.fill_(0.25)
                weights.load_named((key, expected[key]) for key in sorted(expected, reverse=True))
                assert all(map(torch.equal, read, state_of(chunks))), case
                if grouped:
                    continue  # what is written is what is streamed
                out = root / f"export_{torch.distributed.get_world_size()}_{number}_{name}"
                weights.export(out, dtype=torch.float32, max_file_bytes=100_000)
                if rank == 0:
                    assert_equal(tensors_of(out), expected, f"export of {case}")
                    first, second = (AutoModelForCausalLM.from_pretrained(folder) for folder in (root / name, out))
                    assert_equal(second.state_dict(), first.state_dict(), f"from_pretrained of {case}")
                    assert second.generation_config.eos_token_id == ENDS, case


def test_one_rank_returns_every_tensor(checkpoints: Path, tmp_path: Path) -> None:
    run_ranks(1, round_trips, checkpoints, [(layout(), [*DENSE, *MIXTURES])], folder=tmp_path)


def test_two_ranks_return_every_tensor(checkpoints: Path, tmp_path: Path) -> None:
    cases = [
        (layout(tp=2), [*DENSE, *MIXTURES]),
        (layout(pp=2), ["llama", "qwen2", "qwen2_moe"]),
        (layout(pp=2, vpp=2), ["qwen2", "qwen3_moe"]),
        (layout(ep=2), MIXTURES),
    ]
    run_ranks(2, round_trips, checkpoints, cases, folder=tmp_path)


def test_four_ranks_return_every_tensor(checkpoints: Path, tmp_path: Path) -> None:
    cases = [
        (layout(tp=4), ["llama", "qwen2", "qwen2_moe"]),
        (layout(tp=2, pp=2), ["qwen2", "qwen3"]),
        (layout(tp=2, pp=2, vpp=2), ["qwen2"]),
        (layout(pp=4), ["qwen2"]),
        (layout(ep=4), ["qwen3_moe"]),
        (layout(tp=2, ep=2, etp=1), MIXTURES),
        (layout(tp=2, ep=2, etp=2), MIXTURES),
        (layout(ep=2, etp=2), ["qwen3_moe"]),
        (layout(pp=2, ep=2), ["qwen2_moe"]),
    ]
    run_ranks(4, round_trips, checkpoints, cases, folder=tmp_path)


def in_case(case: str, message: str) -> str:
    return f"{case}: {message}"


def learned(rank: int, root: Path, sizes: dict[str, int], names: list[str]) -> None:
    """Logits, and the gradients that ``named_weights`` finds, are those of the Hugging Face model."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    on_cpu()
    moe_utils.te_general_gemm = None  # megatron-core asks for it without TransformerEngine too
    begin(sizes)
    ids = torch.randint(0, 97, (2, 11), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(11).expand(2, 11)
    tp, place = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    for name in names:
        model = AutoModelForCausalLM.from_pretrained(root / name, attn_implementation="eager")
        expected = model(ids).logits
        taste = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4))
        (expected * taste).sum().backward()
        folder = root / f"gradients_{name}_{tp}"
        if rank == 0:  # transformers alone knows what names its experts have in a checkpoint
            gradients = {key: weight.grad for key, weight in model.named_parameters()}
            model.save_pretrained(folder, state_dict=gradients)
        torch.distributed.barrier()

        for grouped in (False, True) if name in MIXTURES else (False,):
            (chunk,) = build(model.config, sizes, grouped=grouped)
            for part in chunk.modules():
                if grouped and hasattr(part, "weight1"):
                    part.config.bf16 = True  # what it asserts, and does not need here
            weights = MegatronWeights(model.config, [chunk])
            weights.load(root / name)
            logits = chunk(ids, positions, None)
            width = logits.shape[-1]
            wanted = expected[..., place * width : (place + 1) * width]
            logits = logits[..., : wanted.shape[-1]]
            torch.testing.assert_close(
                logits, wanted, atol=1e-5, rtol=1e-5, msg=partial(in_case, f"{name} grouped={grouped}")
            )
            (logits * taste[..., place * width : (place + 1) * width]).sum().backward()
            found = dict(weights.named_weights(lambda parameter: parameter.grad))
            for key, gradient in tensors_of(folder).items():
                scale = float(gradient.abs().max())
                torch.testing.assert_close(
                    found.pop(key), gradient, atol=1e-5 * scale, rtol=1e-5, msg=partial(in_case, f"{name} {key}")
                )
            assert not found


def test_logits_and_gradients_are_those_of_hugging_face(checkpoints: Path, tmp_path: Path) -> None:
    run_ranks(1, learned, checkpoints, layout(), [*DENSE, *MIXTURES], folder=tmp_path)
    run_ranks(2, learned, checkpoints, layout(tp=2), ["llama_biased", "mistral", "qwen2"], folder=tmp_path)


class Counting:
    """``safe_open`` of safetensors that notes how many numbers are read, by tensor."""

    def __init__(self, opened: Any, read: dict[str, int]) -> None:
        self.opened, self.read = opened, read

    def __enter__(self) -> Counting:
        self.opened.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.opened.__exit__(*error)

    def keys(self) -> Any:
        return self.opened.keys()

    def get_slice(self, name: str) -> Any:
        tensor = self.opened.get_slice(name)

        class Sliced:
            def get_shape(slice) -> Any:  # noqa: N805
                return tensor.get_shape()

            def __getitem__(slice, index: Any) -> torch.Tensor:  # noqa: N805
                part: torch.Tensor = tensor[index]
                self.read[name] = self.read.get(name, 0) + part.numel()
                return part

        return Sliced()


def numbers_read(rank: int, root: Path, sizes: dict[str, int], name: str) -> dict[str, int]:
    on_cpu()
    begin(sizes)
    config = AutoConfig.from_pretrained(root / name)
    weights = MegatronWeights(config, build(config, sizes))
    read: dict[str, int] = {}
    opened = megatron_weights.safe_open
    megatron_weights.safe_open = lambda *args, **kwargs: Counting(opened(*args, **kwargs), read)
    weights.load(root / name)
    return read


def test_a_rank_reads_its_own_slices_alone(checkpoints: Path, tmp_path: Path) -> None:
    ranks = run_ranks(4, numbers_read, checkpoints, layout(tp=2, pp=2), "llama", folder=tmp_path)
    for name, tensor in tensors_of(checkpoints / "llama").items():
        reads = [read.get(name, 0) for read in ranks]
        on_stage = [read for read in reads if read]
        assert len(on_stage) == 2, f"{name} is read by one stage of two"
        if tensor.dim() == 2:
            assert sum(on_stage) == tensor.numel(), name
            assert max(on_stage) <= -(-tensor.shape[0] // 2) * tensor.shape[1], name

    ranks = run_ranks(4, numbers_read, checkpoints, layout(tp=2, ep=2, etp=2), "qwen3_moe", folder=tmp_path)
    for name, tensor in tensors_of(checkpoints / "qwen3_moe").items():
        if ".experts." in name:
            reads = sorted(read.get(name, 0) for read in ranks)
            assert reads == [0, 0, tensor.numel() // 2, tensor.numel() // 2], name


def counted(rank: int, root: Path, cases: list[tuple[dict[str, int], str]]) -> list[int]:
    """How many collectives all weights cost."""
    on_cpu()
    import torch.distributed as dist

    calls = []
    for name in ("broadcast", "all_gather_into_tensor", "all_reduce", "all_gather"):
        setattr(dist, name, partial(noted, calls, getattr(dist, name)))
    counts = []
    for sizes, name in cases:
        begin(sizes)
        config = AutoConfig.from_pretrained(root / name)
        weights = MegatronWeights(config, build(config, sizes))
        calls.clear()
        assert len(list(weights.named_weights())) == len(weights.shapes)
        counts.append(len(calls))
    return counts


def noted(calls: list[None], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    calls.append(None)
    return function(*args, **kwargs)


def test_a_layer_costs_as_many_collectives_as_are_promised(checkpoints: Path, tmp_path: Path) -> None:
    ends, layers = 2, SIZES["num_hidden_layers"]
    cases = [
        (layout(), "qwen3_moe", 0),
        (layout(tp=2), "qwen3", ends + layers),
        (layout(tp=2, pp=2), "qwen3", 2 * (ends + layers)),
        (layout(pp=2, ep=2), "qwen3_moe", ends + layers + 2 * layers),
        (layout(tp=2, ep=2, etp=1), "qwen3_moe", ends + layers + layers),
    ]
    for counts in run_ranks(4, counted, checkpoints, [case[:2] for case in cases], folder=tmp_path):
        assert counts == [case[2] for case in cases]


def refused(rank: int, root: Path) -> None:
    on_cpu()
    begin(layout())
    config = AutoConfig.from_pretrained(root / "qwen3")
    chunks = build(config, {})
    weights = MegatronWeights(config, chunks)
    named = tensors_of(root / "qwen3")
    llama, norm = tensors_of(root / "llama"), "model.norm.weight"
    with pytest.raises(ValueError, match=r"'model\.norm\.wait'"):
        weights.load_named((named | {"model.norm.wait": torch.zeros(32)}).items())
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' \(31,\).*\(32,\)"):
        weights.load_named((named | {norm: torch.zeros(31)}).items())
    with pytest.raises(ValueError, match=r"1 of \d+ weights.*not given.*model\.norm\.weight"):
        weights.load_named((name, weight) for name, weight in named.items() if name != norm)
    with pytest.raises(ValueError, match=r"not given.*q_norm"):
        weights.load(root / "llama")
    with pytest.raises(ValueError, match=r"k_proj\.weight' \(16, 32\).*\(32, 32\)"):
        weights.load_named((name, tensor) for name, tensor in llama.items() if "k_proj" in name)
    with pytest.raises(FileNotFoundError, match="no model"):
        weights.load(root)

    other = AutoConfig.from_pretrained(root / "llama")
    other.vocab_size, other.head_dim = config.vocab_size, config.head_dim
    with pytest.raises(ValueError, match=r"belong to no tensor.*_layernorm"):
        MegatronWeights(other, chunks)
    other = AutoConfig.from_pretrained(root / "qwen3")
    other.attention_bias = True
    with pytest.raises(ValueError, match=r"q_proj\.bias.*no decoder\.layers\.0\.self_attention\.linear_qkv\.bias"):
        MegatronWeights(other, chunks)
    other = AutoConfig.from_pretrained(root / "qwen3")
    other.intermediate_size = 64
    with pytest.raises(ValueError, match=r"linear_fc1\.weight is \(96, 32\).*\(128, 32\)"):
        MegatronWeights(other, chunks)
    other = AutoConfig.from_pretrained(root / "qwen3_moe")
    experts = build(other, {}, grouped=True)
    other.moe_intermediate_size = 32
    with pytest.raises(ValueError, match=r"experts\.weight1 is \(32, 256\)"):
        MegatronWeights(other, experts)
    other = AutoConfig.from_pretrained(root / "qwen3")
    other.vocab_size += 1
    with pytest.raises(ValueError, match="vocabulary"):
        MegatronWeights(other, chunks)
    other = AutoConfig.from_pretrained(root / "qwen3")
    other.tie_word_embeddings = True
    with pytest.raises(ValueError, match="tie_word_embeddings=True"):
        MegatronWeights(other, chunks)


def test_wrong_weights_and_wrong_models_are_refused_by_name(checkpoints: Path, tmp_path: Path) -> None:
    run_ranks(1, refused, checkpoints, folder=tmp_path)


def test_what_megatron_cannot_cut_or_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor_model_parallel_size 8 .* 4 key-value heads.*\[1, 2, 4\]"):
        megatron_weights.check(CONFIGS["llama"], 8)
    with pytest.raises(ValueError, match=r"'gpt2' .*llama, mistral, qwen2, qwen2_moe, qwen3, qwen3_moe"):
        megatron_weights.check(AutoConfig.for_model("gpt2"), 1)


def other_dtypes_and_wrappers(rank: int, root: Path) -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    on_cpu()
    sizes = layout(tp=2)
    begin(sizes)
    config = AutoConfig.from_pretrained(root / "qwen2")
    expected = tensors_of(root / "qwen2")
    rounded = {name: tensor.bfloat16() for name, tensor in expected.items()}
    (chunk,) = build(config, sizes, params_dtype=torch.bfloat16, bf16=True)
    chunk.bfloat16()  # torch's norm takes no notice of params_dtype
    wrapped = DistributedDataParallel(chunk.config, DistributedDataParallelConfig(), chunk)
    weights = MegatronWeights(config, [wrapped])
    weights.load(root / "qwen2")
    assert_equal(dict(weights.named_weights()), rounded, "float32 into bfloat16")
    out = root / "exported_twice"
    for dtype, limits in ((torch.float32, {"max_file_bytes": 10_000}), (torch.bfloat16, {})):
        weights.export(out, dtype=dtype, **limits)
        if rank == 0:
            assert_equal(tensors_of(out), {name: tensor.to(dtype) for name, tensor in rounded.items()}, f"as {dtype}")
            assert (out / "model.safetensors.index.json").exists() == bool(limits)
            model = AutoModelForCausalLM.from_pretrained(out)
            assert model.dtype == dtype
            assert model.lm_head.weight is model.model.embed_tokens.weight


def shared(rank: int, root: Path) -> None:
    """A quarter of the way to weights that are given; a tied head given too does not go twice."""
    on_cpu()
    sizes = layout(pp=2)
    begin(sizes)
    config = AutoConfig.from_pretrained(root / "qwen2")
    weights = MegatronWeights(config, build(config, sizes))
    weights.load(root / "qwen2")
    own = tensors_of(root / "qwen2")
    given = {
        name: torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)) for name, tensor in own.items()
    }
    weights.load_named([*given.items(), ("lm_head.weight", given["model.embed_tokens.weight"])], share=0.25)
    for name, weight in weights.named_weights():
        torch.testing.assert_close(weight, 0.25 * given[name] + 0.75 * own[name], msg=name)
    tied = [slot.parameter for slot in weights._slots if slot.source.key == "model.embed_tokens.weight"]
    embedding = 0.25 * given["model.embed_tokens.weight"] + 0.75 * own["model.embed_tokens.weight"]
    assert len(tied) == 1, "a stage has the embedding or its copy"
    torch.testing.assert_close(tied[0].detach(), embedding)


def padded(rank: int, root: Path) -> None:
    """Padding of the vocabulary is zero after loading, whatever was there, and stays so."""
    on_cpu()
    sizes = layout(tp=2)
    begin(sizes)
    config = AutoConfig.from_pretrained(root / "llama")
    (chunk,) = build(config, sizes)
    weights = MegatronWeights(config, [chunk])
    weights.load(root / "llama")
    for share in (None, 0.5):
        if share:
            weights.load_named(tensors_of(root / "llama").items(), share)
        for table in (chunk.embedding.word_embeddings.weight, chunk.output_layer.weight):
            assert table.shape[0] == 49
            assert bool((table[-1] == 0).all()) == (rank == 1)


def named_as_transformer_engine(rank: int, root: Path) -> None:
    """The names that its layers have, on a model whose own are moved there."""
    on_cpu()
    begin(layout())
    for name in MIXTURES:
        config = AutoConfig.from_pretrained(root / name)
        (chunk,) = build(config, {})
        for layer in chunk.decoder.layers:
            move(layer.input_layernorm, "weight", layer.self_attention.linear_qkv, "layer_norm_weight")
            if not hasattr(layer.mlp, "experts"):
                move(layer.pre_mlp_layernorm, "weight", layer.mlp.linear_fc1, "layer_norm_weight")
                continue
            experts = torch.nn.Module()
            for fc in ("linear_fc1", "linear_fc2"):
                setattr(experts, fc, torch.nn.Module())
                for j, expert in enumerate(layer.mlp.experts.local_experts):
                    move(getattr(expert, fc), "weight", getattr(experts, fc), f"weight{j}")
            layer.mlp.experts = experts
        weights = MegatronWeights(config, [chunk])
        weights.load(root / name)
        assert_equal(dict(weights.named_weights()), tensors_of(root / name), name)


def move(source: torch.nn.Module, name: str, target: torch.nn.Module, new: str) -> None:
    target.register_parameter(new, getattr(source, name))
    source.register_parameter(name, None)


def of_the_hub(rank: int, root: Path) -> None:
    import huggingface_hub

    on_cpu()
    begin(layout())
    huggingface_hub.constants.HF_HUB_CACHE = str(root / "hub")
    config = AutoConfig.from_pretrained(root / "llama")
    weights = MegatronWeights(config, build(config, {}))
    weights.load("someone/llama")
    assert_equal(dict(weights.named_weights()), tensors_of(root / "llama"), "hub")


def in_one_rank(rank: int, root: Path) -> None:
    named_as_transformer_engine(rank, root)
    of_the_hub(rank, root)


def in_two_ranks(rank: int, root: Path) -> None:
    other_dtypes_and_wrappers(rank, root)
    shared(rank, root)
    padded(rank, root)


def test_transformer_engines_names_and_names_of_the_hub(checkpoints: Path, tmp_path: Path) -> None:
    cache = checkpoints / "hub" / "models--someone--llama"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("1234")
    (cache / "snapshots").mkdir()
    (cache / "snapshots" / "1234").symlink_to(checkpoints / "llama")
    run_ranks(1, in_one_rank, checkpoints, folder=tmp_path)


def test_bfloat16_a_share_of_the_way_and_padding(checkpoints: Path, tmp_path: Path) -> None:
    run_ranks(2, in_two_ranks, checkpoints, folder=tmp_path)
