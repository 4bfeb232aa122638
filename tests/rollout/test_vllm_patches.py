"""Steps that start vLLM's Triton attention otherwise; what is skipped changes nothing; where all stays vLLM's."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rayhelper import ConfigError
from trainers.parts.fingerprints import fingerprints
from trainers.rollout.vllm import patches
from trainers.rollout.vllm.model import as_in_files, check_experts, model_fingerprints, scale_logits
from trainers.rollout.vllm.scheduling.choice import decoding_scheduler
from trainers.rollout.vllm.start import variables

pytestmark = pytest.mark.xdist_group("vllm")

STEP = {
    "query_ptr": torch.zeros(8, 4, 128),
    "seq_lens_ptr": torch.zeros(8),
    "key_cache_ptr": torch.zeros(1, dtype=torch.bfloat16),
    "HEAD_SIZE": 128,
    "TILE_SIZE": 32,
}


class Kernel:
    """Keeps how it was started."""

    cache = "its own"

    def __init__(self) -> None:
        self.started: list[tuple[Any, dict[str, Any]]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **arguments: self.started.append((grid, arguments))


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.v1.attention.ops import triton_unified_attention

    monkeypatch.setattr(triton_unified_attention, "kernel_unified_attention", Kernel())
    monkeypatch.setattr(patches, "_is_hopper", lambda: True)
    return triton_unified_attention


def started(attention: Any, grid: tuple[int, ...] = (10, 2), **changed: Any) -> dict[str, Any]:
    """What the kernel was given that the caller did not give it."""
    kernel = attention.kernel_unified_attention.kernel
    given = STEP | changed
    attention.kernel_unified_attention[grid](**given)
    seen_grid, arguments = kernel.started[-1]
    assert seen_grid == grid
    assert all(arguments[name] is value for name, value in given.items())
    return {name: value for name, value in arguments.items() if name not in given}


def test_decoding_steps_start_the_kernel_in_small_blocks(attention: Any) -> None:
    patches.small_blocks_decode()
    assert started(attention) == {"num_warps": 2, "num_stages": 2}
    assert started(attention, num_warps=8) == {"num_stages": 2}  # what vLLM says itself stays


@pytest.mark.parametrize(
    "changed",
    [
        {"query_ptr": torch.zeros(9, 4, 128)},  # a prompt among them
        {"grid": (10, 2, 16)},  # several blocks share a sequence
        {"HEAD_SIZE": 64},
        {"TILE_SIZE": 16},
        {"key_cache_ptr": torch.zeros(1, dtype=torch.float8_e4m3fn)},
        {"key_cache_ptr": torch.zeros(1)},
    ],
)
def test_other_steps_start_it_as_vllm_does(attention: Any, changed: dict[str, Any]) -> None:
    patches.small_blocks_decode()
    assert started(attention, **changed) == {}


def test_a_version_that_says_less_of_a_step_starts_it_as_it_does(attention: Any) -> None:
    patches.small_blocks_decode()
    attention.kernel_unified_attention[(10, 2)](1, 2, HEAD_SIZE=128)
    assert attention.kernel_unified_attention.kernel.started == [((10, 2), {"HEAD_SIZE": 128})]


def test_it_is_changed_once_and_stays_the_kernel_for_all_else(attention: Any) -> None:
    kernel = attention.kernel_unified_attention
    for _ in range(2):
        patches.small_blocks_decode()
    assert attention.kernel_unified_attention.kernel is kernel
    assert attention.kernel_unified_attention.cache == "its own"


def test_where_it_was_not_measured_nothing_changes(attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = attention.kernel_unified_attention
    monkeypatch.setattr(patches, "_is_hopper", lambda: False)
    patches.small_blocks_decode()
    assert attention.kernel_unified_attention is kernel
    monkeypatch.setattr(patches, "_is_hopper", lambda: True)
    monkeypatch.setattr(attention, "kernel_unified_attention", None)
    patches.small_blocks_decode()
    assert attention.kernel_unified_attention is None


def test_an_engine_without_patches_gets_the_kernel_back(attention: Any) -> None:
    kernel = attention.kernel_unified_attention
    patches.small_blocks_decode(False)
    assert attention.kernel_unified_attention is kernel
    patches.small_blocks_decode()
    assert attention.kernel_unified_attention is not kernel
    patches.small_blocks_decode(False)
    assert attention.kernel_unified_attention is kernel


def test_the_kernel_takes_what_the_choice_is_made_by() -> None:
    """The names are vLLM's: were they others, a decoding step would fail."""
    import inspect

    from vllm.v1.attention.ops import triton_unified_attention as attention

    source = inspect.getsource(attention.unified_attention)
    assert "kernel_unified_attention[grid](" in source
    for name in STEP:
        assert f"{name}=" in source


# --- what was compared


def other_function() -> None:
    """The function of vLLM has another source."""


@pytest.mark.parametrize(
    ("name", "place"), [(name, place) for name, places in patches.SOURCES.items() for place in places]
)
def test_a_function_that_was_not_compared_stays_vllms_and_one_line_says_so(
    name: str, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, _, function = place.partition(":")
    monkeypatch.setattr(f"{module}.{function}", other_function)
    patches._tell.cache_clear()
    for _ in range(2):
        assert {one: patches.is_compared(one) for one in patches.SOURCES} == {
            one: one != name for one in patches.SOURCES
        }
    (line,) = [record.getMessage() for record in caplog.records if record.name == patches.__name__]
    assert line.startswith("vLLM 0.32.0: ")
    assert f": {name} stays off, as it was not compared with its {function}." in line


def test_all_functions_of_this_version_were_compared(caplog: pytest.LogCaptureFixture) -> None:
    assert all(patches.is_compared(name) for name in patches.SOURCES)
    assert not [record for record in caplog.records if record.name == patches.__name__]


@pytest.mark.parametrize("version", ["0.33.0", "0.3.2"])
def test_a_version_that_was_not_compared_has_vllms_own(
    version: str, attention: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import vllm

    kernel = attention.kernel_unified_attention
    monkeypatch.setattr(vllm, "__version__", version)
    patches._tell.cache_clear()
    patches.small_blocks_decode()
    assert attention.kernel_unified_attention is kernel
    assert decoding_scheduler(SimpleNamespace(scheduler_cls=None, async_scheduling=True)) is None
    lines = [record.getMessage() for record in caplog.records if record.name == patches.__name__]
    assert len(lines) == 2
    assert all(f"vLLM {version}: " in line and "compared with this version" in line for line in lines)


# --- what an engine cannot do without


def test_a_class_of_transformers_that_vllm_ran_is_transformers_own_again() -> None:
    """A policy of that class in the same process was broken by vLLM's changes to it."""
    from vllm.compilation.decorators import DynamicArgDims
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.models.transformers.base import Base

    class Part(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids + 1

    policy, bases, own = Part(), Part.__bases__, dict(vars(Part))
    ones = torch.ones(2)
    with variables({}), set_current_vllm_config(VllmConfig()), patches.own_classes():
        dims = DynamicArgDims(input_ids=0)
        Base._decorate_cls_for_torch_compile(None, Part, dims, enable_if=lambda _: False, is_encoder=False)
        built = Part()
        with pytest.raises(AttributeError, match="do_not_compile"):
            policy(ones)
    assert torch.equal(policy(ones), built(ones))
    assert (Part.__bases__, dict(vars(Part))) == (bases, own)
    assert isinstance(built, Part)
    assert built.do_not_compile
    assert not hasattr(Part(), "do_not_compile")


def test_weights_that_vllm_keeps_in_float32_have_the_fingerprint_of_the_bfloat16_that_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Biases of routers (GLM-4.5, DeepSeek-V3), decays of states (Qwen3-Next)."""
    from vllm.distributed import parallel_state

    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    model = torch.nn.Module()
    sent = {"weight": torch.randn(4, 8).bfloat16(), "e_score_correction_bias": torch.randn(6).bfloat16()}
    for name, weight in sent.items():
        kept = weight.float() if name.endswith("bias") else weight
        model.register_parameter(name, torch.nn.Parameter(kept, requires_grad=False))
    assert model_fingerprints(torch.bfloat16, model) == fingerprints(sent.items())
    model.e_score_correction_bias.mul_(1.5)
    assert model_fingerprints(torch.bfloat16, model) != fingerprints(sent.items())


@pytest.mark.parametrize(("backend", "is_plain"), [("TRITON", True), ("CPU", True), ("FLASHINFER_CUTLASS", False)])
def test_experts_in_a_layout_of_their_own_are_refused(backend: str, is_plain: bool) -> None:
    """New weights would be read in that layout, and their fingerprints would be right."""
    model, experts = torch.nn.Module(), torch.nn.Module()
    experts.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name=backend))
    model.experts = experts
    if is_plain:
        check_experts(model)
        return
    with pytest.raises(ConfigError, match=r"layout of FLASHINFER_CUTLASS.*moe_backend: triton"):
        check_experts(model)


@pytest.mark.parametrize("is_exchanged", [True, False])
def test_stacks_of_experts_come_as_the_models_own_files_have_them(is_exchanged: bool) -> None:
    model: Any = torch.nn.Linear(1, 1)
    model.is_fused_checkpoint_transposed = is_exchanged
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    sent = {name: torch.randn(2, 3, 4), name.replace("experts", "gate"): torch.randn(2, 3, 4)}
    found = dict(as_in_files(sent.items(), model))
    assert found.keys() == sent.keys()
    for key, weight in sent.items():
        assert torch.equal(found[key], weight.transpose(1, 2) if is_exchanged and key == name else weight)


def test_a_temperature_multiplies_the_scale_that_a_model_has_itself() -> None:
    model = SimpleNamespace(logits_processor=SimpleNamespace(scale=0.25))  # Granite
    for temperature in (0.7, 2.0, 1.0):
        scale_logits(1 / temperature, model)
        assert model.logits_processor.scale == 0.25 * (1 / temperature)


def test_requests_that_have_computed_nothing_are_salted_again() -> None:
    hashed: list[str] = []

    def request(name: str, num_computed_tokens: int) -> Any:
        return SimpleNamespace(
            num_computed_tokens=num_computed_tokens,
            cache_salt="1",
            block_hashes=["old"],
            update_block_hashes=lambda: hashed.append(name),
        )

    requests = {"waits": request("waits", 0), "runs": request("runs", 5)}
    patches.salt_again(SimpleNamespace(requests=requests), "2")
    assert {name: (one.cache_salt, one.block_hashes) for name, one in requests.items()} == {
        "waits": ("2", []),
        "runs": ("1", ["old"]),
    }
    assert hashed == ["waits"]


def test_what_older_weights_made_of_pictures_is_not_found_by_requests_that_wait() -> None:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    def request(num_computed_tokens: int) -> SimpleNamespace:
        seen = MultiModalFeatureSpec(None, "image", "1:abc-0", PlaceholderRange(2, 4))
        fields = {"cache_salt": "1", "block_hashes": [], "update_block_hashes": lambda: None, "mm_features": [seen]}
        return SimpleNamespace(num_computed_tokens=num_computed_tokens, **fields)

    requests = {"waits": request(0), "runs": request(5)}
    patches.salt_again(SimpleNamespace(requests=requests), "2")
    assert {name: one.mm_features[0].identifier for name, one in requests.items()} == {
        "waits": "2:abc-0",
        "runs": "1:abc-0",
    }


def test_convolutions_of_delta_layers_take_new_weights_on_a_cpu() -> None:
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    def packed(weight: torch.Tensor) -> torch.nn.Module:
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        return layer

    old, new = (torch.randn(64, 1, 4, dtype=torch.bfloat16) for _ in range(2))
    layer, expected = packed(old), packed(new)
    with patches.plain_convolutions(layer):
        assert torch.equal(layer.weight, old)
        layer.weight.copy_(new)
    assert torch.equal(layer.weight, expected.weight)
    with patches.plain_convolutions(layer):
        assert torch.equal(layer.weight, new)


def test_decays_of_delta_layers_are_told_by_the_workers_that_have_their_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import parallel_state

    whole = {f"layers.0.{name}": torch.randn(16) for name in ("A_log", "dt_bias", "norm")}
    group = SimpleNamespace(device_group=None)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: group)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **named: None)
    found = Counter[str]()
    for rank in range(2):
        monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        layer = torch.nn.Module()
        for name, value in whole.items():
            part = value if name.endswith("norm") else value[8 * rank : 8 * rank + 8]
            layer.register_parameter(name.rpartition(".")[2], torch.nn.Parameter(part))
        model = torch.nn.Module()
        model.layers = torch.nn.ModuleList([layer])
        found.update(model_fingerprints(torch.float32, model))
    wrapped = {name: (value + 2**63) % 2**64 - 2**63 for name, value in found.items()}
    assert wrapped == fingerprints(whole.items())


def test_small_products_are_not_packed_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers import utils

    monkeypatch.setattr(utils, "check_cpu_sgl_kernel", lambda *_: True)  # as with AMX
    patches.plain_products()
    assert utils.check_cpu_sgl_kernel(16, 32, torch.bfloat16) is False


@pytest.mark.parametrize("missing", patches.SALTED)
def test_requests_that_cannot_be_salted_are_told_and_need_it_only_with_a_cache(missing: str) -> None:
    request = SimpleNamespace(**{name: 0 for name in patches.SALTED if name != missing})
    scheduler = SimpleNamespace(requests={"one": request}, kv_cache_manager=SimpleNamespace(enable_caching=True))
    with pytest.raises(RuntimeError, match=f"no {missing} of requests.*vllm_enable_prefix_caching: false"):
        patches.salt_again(scheduler, "2")
    scheduler.kv_cache_manager.enable_caching = False
    patches.salt_again(scheduler, "2")


def test_an_engine_ends_with_its_process_where_it_would_end_itself() -> None:
    finalizer = SimpleNamespace(atexit=True)
    patches.end_with_process(SimpleNamespace(engine_core=SimpleNamespace(_finalizer=finalizer)))
    assert finalizer.atexit is False
    patches.end_with_process(SimpleNamespace(engine_core=SimpleNamespace()))


def test_the_group_of_vllms_processes_is_left_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import parallel_state

    ended: list[str] = []
    monkeypatch.setattr(parallel_state, "_WORLD", SimpleNamespace(destroy=lambda: ended.append("world")))
    patches.leave_group()
    patches.leave_group()
    assert (ended, parallel_state._WORLD) == (["world"], None)
    monkeypatch.delattr(parallel_state, "_WORLD")
    patches.leave_group()
    assert not hasattr(parallel_state, "_WORLD")


def test_queries_of_several_heads_are_rotated_on_a_cpu_whatever_their_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSeek's latent attention gives them: a part of each head, in a table of heads."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_cpu)  # as it was afterwards
    for _ in range(2):
        patches.flat_rotations()
    torch.manual_seed(0)
    table, positions = torch.randn(16, 64), torch.tensor([3, 7, 9])
    heads, key = torch.randn(3, 2, 96), torch.randn(3, 1, 64)
    fields = {"head_size": 64, "is_neox_style": False, "_match_cos_sin_cache_dtype": lambda query: table}
    for query in (heads[..., 32:], heads[..., 32:].reshape(3, 128)):
        expected = RotaryEmbedding.forward_static(positions, query.reshape(3, 2, 64), key, 64, 64, table, False)
        found = RotaryEmbedding.forward_cpu(SimpleNamespace(**fields), positions, query.clone(), key.clone())
        assert (found[0].shape, found[1].shape) == (query.shape, key.shape)
        torch.testing.assert_close(found[0].reshape(3, 2, 64), expected[0])
        torch.testing.assert_close(found[1], expected[1])


@pytest.mark.parametrize("is_named", [True, False])
def test_experts_on_a_cpu_are_packed_as_the_call_asks(is_named: bool) -> None:
    def run(output: Any, states: Any, w13: Any, w2: Any, top_k: int, isa: str) -> Any:
        return output, states, w13, w2, top_k, isa

    kernel = patches._PackingKernel(run, lambda weight, isa: (weight, isa))
    given: tuple[Any, ...] = ("output", "states", "w13", "w2", 2)
    found = kernel(*given, isa="amx") if is_named else kernel(*given, "amx")
    assert found == ("output", "states", ("w13", "amx"), ("w2", "amx"), 2, "amx")


def test_heads_that_a_cpu_refuses_are_those_that_vllm_lacks_there() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from trainers.rollout.vllm.settings import HEADS_ON_CPU

    assert CPUAttentionBackend.get_supported_head_sizes() == list(HEADS_ON_CPU)
