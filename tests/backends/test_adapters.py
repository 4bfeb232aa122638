"""LoRA: what is trained, what is written, and that a merged adapter is the adapted model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.tiny import architectures
from rayhelper import ConfigError
from tests.backends.batches import largest_difference, mean_loss, plain_scores, samples_of
from tests.golden.tiny import save_tiny
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.fsdp.tuners.adapters import layer_names
from trainers.dpo.config import DPOConfig
from trainers.parts.models import lora_settings
from trainers.rollout.vllm.adapter import put_adapter
from trainers.sft.config import SFTConfig

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
SETTINGS: dict[str, Any] = {"learning_rate": 1e-2, "num_training_steps": 10, "lora": LORA}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


@pytest.fixture
def trained(folder: str) -> FsdpBackend:
    backend = FsdpBackend(folder, **SETTINGS)
    for step in range(3):
        backend.step(samples_of(seed=step), partial(mean_loss, 50), micro_batch_size=4)
    return backend


def scores(backend: FsdpBackend, **settings: Any) -> np.ndarray:
    return backend.token_logps(samples_of(), micro_batch_size=4, **settings).values


def test_only_the_adapter_is_trained(folder: str, trained: FsdpBackend) -> None:
    assert np.abs(scores(trained) - scores(FsdpBackend(folder))).max() > 1e-2
    names = {name for name, weight in trained.module.named_parameters() if weight.requires_grad}
    assert names
    assert all("lora_" in name for name in names)


def test_a_model_without_its_adapter_scores_as_the_model_it_began_with(folder: str, trained: FsdpBackend) -> None:
    np.testing.assert_array_equal(scores(trained, adapter=False), scores(FsdpBackend(folder)))
    assert np.abs(scores(trained) - scores(trained, adapter=False)).max() > 1e-2, "the adapter is back afterwards"


def test_merged_weights_are_the_adapted_model_and_leave_it_as_it_was(folder: str, trained: FsdpBackend) -> None:
    before = scores(trained)
    merged = FsdpBackend(folder)
    merged.load_weights(trained.named_weights())
    np.testing.assert_allclose(scores(merged), before, atol=1e-5)
    np.testing.assert_array_equal(scores(trained), before)


def test_the_exported_folder_is_the_merged_model_with_the_adapter_beside_it(
    folder: str, trained: FsdpBackend, tmp_path: Path
) -> None:
    from peft import PeftModel

    trained.export(tmp_path)
    np.testing.assert_allclose(scores(FsdpBackend(tmp_path)), scores(trained), atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(folder)
    adapted: Any = PeftModel.from_pretrained(base, tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[5, 9, 40, 7, 100]])
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, atol=1e-5, rtol=0)


def test_a_checkpoint_holds_the_adapter_alone_and_resumes_bit_for_bit(
    folder: str, trained: FsdpBackend, tmp_path: Path
) -> None:
    trained.save(tmp_path)
    files = {file.name for file in tmp_path.iterdir()}
    assert "adapter_model.safetensors" in files
    assert "model.safetensors" not in files
    resumed = FsdpBackend(folder, **SETTINGS)
    resumed.load(tmp_path)
    for backend in (trained, resumed):
        backend.step(samples_of(seed=9), partial(mean_loss, 50), micro_batch_size=4)
    assert largest_difference(dict(resumed.named_weights()), dict(trained.named_weights())) == 0.0


def test_an_adapter_of_another_rank_is_not_loaded(folder: str, trained: FsdpBackend, tmp_path: Path) -> None:
    trained.save(tmp_path)
    other = FsdpBackend(folder, **SETTINGS | {"lora": LORA | {"target_modules": ["q_proj"]}})
    with pytest.raises(ValueError, match="Only one of the two has the weights"):
        other.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="LoRA"):
        other.load(tmp_path / "nowhere")


def test_the_gradients_of_an_adapter_are_those_of_the_merged_model(folder: str, trained: FsdpBackend) -> None:
    """dL/dB of W + s B A is s dL/dW A^T: the full gradient of the merged model gives the adapter's."""
    merged = FsdpBackend(folder, learning_rate=0.0, num_training_steps=1)
    merged.load_weights(trained.named_weights())
    seen: dict[str, torch.Tensor] = {}
    for backend, key in ((trained, "lora_B.default.weight"), (merged, "weight")):
        assert backend.optimizer is not None
        name = f"model.layers.0.mlp.down_proj.{key}"
        weight = dict(backend.module.named_parameters())[name]
        handle = backend.optimizer.register_step_pre_hook(
            lambda *_, key=key, weight=weight: seen.update({key: weight.grad.clone()})
        )
        a = None if key == "weight" else dict(backend.module.named_parameters())[name.replace("lora_B", "lora_A")]
        if a is not None:
            seen["a"] = a.detach().clone()
        backend.max_grad_norm = 0.0
        backend.step(samples_of(), partial(mean_loss, 50), micro_batch_size=4)
        handle.remove()
    expected = 2.0 * seen["weight"] @ seen["a"].T
    assert float(expected.abs().max()) > 1e-4
    torch.testing.assert_close(seen["lora_B.default.weight"], expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_an_output_head_is_trained_too_where_the_adapter_says_so(kind: dict[str, Any], tmp_path: Path) -> None:
    """On the gradient that plain autograd through the whole model gives."""
    backend = FsdpBackend(save_tiny(tmp_path), **SETTINGS | {"lora": LORA | {"target_modules": ["q_proj"]} | kind})
    samples = samples_of()
    before = scores(backend)
    trained = {name: weight for name, weight in backend.module.named_parameters() if weight.requires_grad}
    trained = {name: weight for name, weight in trained.items() if "lm_head" in name}
    assert trained
    loss = -plain_scores(backend.module, samples)[0].sum() / 50
    expected = dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))
    found: dict[str, torch.Tensor] = {}
    assert backend.optimizer is not None
    backend.optimizer.register_step_pre_hook(
        lambda *_: found.update({name: weight.grad.clone() for name, weight in trained.items()})  # type: ignore[union-attr]
    )
    backend.max_grad_norm = 0.0
    backend.step(samples, partial(mean_loss, 50), micro_batch_size=4)
    assert max(float(gradient.abs().max()) for gradient in found.values()) > 1e-3
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)
    np.testing.assert_array_equal(scores(backend, adapter=False), before)
    merged = FsdpBackend(tmp_path)
    merged.load_weights(backend.named_weights())
    np.testing.assert_allclose(scores(merged), scores(backend), atol=1e-5)


WHOLE = {"modules_to_save": ["embed_tokens", "lm_head"]}
EVERYTHING = {"target_modules": ["all-linear", "embed_tokens", "lm_head"]}


@pytest.mark.parametrize(
    ("kind", "tied"), [(WHOLE, False), (WHOLE | {"ensure_weight_tying": True}, True), (EVERYTHING, False)]
)
def test_embedding_and_head_that_are_trained_are_written_as_peft_reads_them(
    kind: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    """Resumed, merged, exported, sent to an engine, and read by peft itself: always the trained model."""
    from peft import PeftModel

    model = save_tiny(tmp_path / "model", tie_word_embeddings=tied)
    settings = SETTINGS | {"lora": LORA | kind}
    backend = FsdpBackend(model, **settings)
    before = {name: weight.clone() for name, weight in backend.named_weights()}
    for step in range(3):
        backend.step(samples_of(seed=step), partial(mean_loss, 50), micro_batch_size=4)
    after = dict(backend.named_weights())
    for name in ["model.embed_tokens.weight"] + ["lm_head.weight"] * (not tied):
        assert float((after[name] - before[name]).abs().max()) > 1e-3, name
    backend.save(tmp_path / "checkpoint")
    backend.export(tmp_path / "final")
    resumed, engine = FsdpBackend(model, **settings), FsdpBackend(model)
    resumed.load(tmp_path / "checkpoint")
    engine.load_weights(after.items())
    np.testing.assert_array_equal(scores(resumed), scores(backend))
    np.testing.assert_allclose(scores(engine), scores(backend), atol=1e-5)
    np.testing.assert_allclose(scores(FsdpBackend(tmp_path / "final")), scores(backend), atol=1e-5)
    ids = torch.tensor([[5, 9, 40, 7, 100]])
    expected = backend.module(ids).logits
    for folder in (tmp_path / "checkpoint", tmp_path / "final" / "adapter"):
        peft: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder)
        torch.testing.assert_close(peft(ids).logits, expected, atol=1e-5, rtol=0)


def test_three_steps_of_an_adapter_of_every_layer_are_those_of_peft_alone(tmp_path: Path) -> None:
    """peft, transformers and torch's AdamW, from the same adapter; then the same merged model."""
    from peft import LoraConfig, get_peft_model

    model = save_tiny(tmp_path)
    steady = {"lr_scheduler_type": "constant", "learning_rate": 1e-3, "adam_epsilon": 1e-3, "max_grad_norm": 0.0}
    backend = FsdpBackend(model, **SETTINGS | steady | {"lora": LORA | EVERYTHING})
    layers = [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]
    targets = [*layers, "embed_tokens", "lm_head"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    peft: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    ours = dict(backend.adapted.named_parameters())
    trained = {name: weight for name, weight in peft.named_parameters() if weight.requires_grad}
    assert trained.keys() == {name for name, weight in ours.items() if weight.requires_grad}
    assert {name for name in trained if "embed" in name} == {
        f"base_model.model.model.embed_tokens.lora_embedding_{half}.default" for half in "AB"
    }
    with torch.no_grad():
        for name, weight in trained.items():
            starts_at_zero = not float(weight.abs().max())
            assert float(ours[name].std()) == pytest.approx(float(weight.std()), rel=0.2, abs=0), name
            assert starts_at_zero is (not float(ours[name].abs().max()))
            weight.copy_(ours[name])
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-3, eps=1e-3, weight_decay=0.0)
    for step in range(3):
        backend.step(samples_of(seed=step), partial(mean_loss, 50), micro_batch_size=4)
        optimizer.zero_grad()
        (-plain_scores(peft, samples_of(seed=step))[0].sum() / 50).backward()
        optimizer.step()
    for name, weight in trained.items():
        torch.testing.assert_close(ours[name].detach(), weight.detach(), atol=1e-6, rtol=0, msg=name)
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= dict(backend.named_weights(trained_only=True)).keys()
    sent = dict(backend.adapter_weights())  # under peft's names in a file, its scaling in B
    for half, factor in (("A", 1.0), ("B", 2.0)):
        name = f"base_model.model.model.embed_tokens.lora_embedding_{half}"
        torch.testing.assert_close(sent[name], factor * trained[f"{name}.default"].detach(), atol=1e-5, rtol=0)
    learned = trained["base_model.model.model.embed_tokens.lora_embedding_A.default"].detach()
    assert float(learned.abs().max()) > 1e-4
    merged = peft.merge_and_unload().state_dict()
    assert largest_difference(dict(backend.named_weights()), merged) < 1e-6


def test_dora_resumed_from_a_checkpoint_is_peft_uninterrupted_and_merges_as_peft_does(tmp_path: Path) -> None:
    """peft and torch's AdamW for four steps; ours goes on from a checkpoint after two."""
    from peft import LoraConfig, get_peft_model

    model = save_tiny(tmp_path / "model")
    steady = {"lr_scheduler_type": "constant", "learning_rate": 1e-2, "adam_epsilon": 1e-3, "max_grad_norm": 0.0}
    fields: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj", "embed_tokens"]}
    settings = SETTINGS | steady | {"lora": fields | {"use_dora": True}}
    backend = FsdpBackend(model, **settings)
    peft: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model), LoraConfig(task_type="CAUSAL_LM", use_dora=True, **fields)
    )
    trained = {name: weight for name, weight in peft.named_parameters() if weight.requires_grad}
    ours = dict(backend.adapted.named_parameters())
    with torch.no_grad():
        for name, weight in trained.items():
            weight.copy_(ours[name])
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, eps=1e-3, weight_decay=0.0)
    for step in range(4):
        if step == 2:
            backend.save(tmp_path / "checkpoint")
            backend = FsdpBackend(model, **settings)
            backend.load(tmp_path / "checkpoint")
        backend.step(samples_of(seed=step), partial(mean_loss, 50), micro_batch_size=4)
        optimizer.zero_grad()
        (-plain_scores(peft, samples_of(seed=step))[0].sum() / 50).backward()
        optimizer.step()
    ours = dict(backend.adapted.named_parameters())
    for name, weight in trained.items():
        torch.testing.assert_close(ours[name].detach(), weight.detach(), atol=1e-5, rtol=0, msg=name)
    merged = peft.merge_and_unload().state_dict()
    began = AutoModelForCausalLM.from_pretrained(model).state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert float((torch.linalg.norm(merged[name], dim=1) - torch.linalg.norm(began[name], dim=1)).abs().max()) > 1e-3
    assert largest_difference(dict(backend.named_weights()), merged) < 1e-5
    sent = dict(backend.named_weights(trained_only=True))
    assert len(sent) == 2 * 2 + 1
    assert largest_difference(sent, {name: merged[name] for name in sent}) < 1e-5
    backend.export(tmp_path / "final")
    np.testing.assert_allclose(scores(FsdpBackend(tmp_path / "final")), scores(backend), atol=1e-5)


@pytest.mark.parametrize("names", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_a_tied_weight_is_not_trained_as_two(names: list[str], folder: str) -> None:
    from trainers.parts.model_checks import check_model_folder
    from trainers.sft import SFTConfig

    with pytest.raises(ConfigError, match="ensure_weight_tying: true"):
        FsdpBackend(folder, **SETTINGS | {"lora": LORA | {"modules_to_save": names}})
    kwargs: dict[str, Any] = {"modules_to_save": names}
    with pytest.raises(ConfigError, match="ensure_weight_tying: true"):
        check_model_folder(SFTConfig(model=folder, dataset="d", tuner_type="lora", lora_kwargs=kwargs))
    kwargs["ensure_weight_tying"] = True
    check_model_folder(SFTConfig(model=folder, dataset="d", tuner_type="lora", lora_kwargs=kwargs))


def test_an_adapter_of_a_tied_head_is_refused(folder: str) -> None:
    from trainers.parts.model_checks import check_model_folder
    from trainers.sft import SFTConfig

    with pytest.raises(ConfigError, match="lora_target_modules has lm_head, but the model ties"):
        FsdpBackend(folder, **SETTINGS | {"lora": LORA | {"target_modules": ["q_proj", "lm_head"]}})
    targets: dict[str, Any] = {"tuner_type": "lora", "lora_target_modules": ["q_proj", "lm_head"]}
    with pytest.raises(ConfigError, match="lora_target_modules has lm_head, but the model ties"):
        check_model_folder(SFTConfig(model=folder, dataset="d", **targets))


def test_names_beside_all_linear_are_those_of_layers(folder: str, tmp_path: Path) -> None:
    from trainers.parts.model_checks import check_model_folder
    from trainers.sft import SFTConfig

    def check(model: str, *names: str, **keys: Any) -> None:
        targets = ["all-linear", *names]
        check_model_folder(SFTConfig(model=model, dataset="d", tuner_type="lora", lora_target_modules=targets, **keys))

    untied = save_tiny(tmp_path)
    check(untied, "embed_tokens", "lm_head")
    with pytest.raises(ConfigError, match=r"no layer of the model is named embed_token\. "):
        check(untied, "embed_token")
    with pytest.raises(ConfigError, match="lora_target_modules has embed_tokens, but the model ties"):
        check(folder, "embed_tokens", "lm_head")
    with pytest.raises(ConfigError, match="with backend: megatron all-linear must be the only entry"):
        check(untied, "lm_head", backend="megatron")
    assert layer_names(untied, ["all-linear"]) | {"lm_head"} == layer_names(untied, ["all-linear", "model.lm_head"])


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen3_moe", {"target_modules": "all-linear"}),
        ("qwen3_moe", {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}),
        ("qwen2_moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    ],
)
def test_experts_that_lie_stacked_are_merged_and_written_as_others(
    family: str, targets: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"vocab_size": 261, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "shared_expert_intermediate_size": 40}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": []}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **experts), dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    backend = FsdpBackend(tmp_path / "model", **SETTINGS | {"lora": {"r": 3, "lora_alpha": 6} | targets})
    with torch.no_grad():
        for name, weight in backend.module.named_parameters():
            if ".lora_B." in name:
                weight.add_(0.3 * torch.randn_like(weight))
    before = scores(backend)
    assert np.abs(before - scores(backend, adapter=False)).max() > 1e-2
    own = {name: weight.clone() for name, weight in FsdpBackend(tmp_path / "model").named_weights()}
    found = {name: weight.clone() for name, weight in backend.named_weights()}
    assert found.keys() == own.keys()
    changed = {name for name, weight in found.items() if not torch.equal(weight, own[name])}
    assert changed == {name for name, _ in backend.named_weights(trained_only=True)}
    assert sum(".experts." in name for name in changed) == 2 * 4 * 3, "of each of four experts in two layers"
    backend.export(tmp_path / "merged")
    np.testing.assert_allclose(scores(FsdpBackend(tmp_path / "merged")), before, atol=1e-5)
    with pytest.raises(ConfigError, match=r"changes experts .*Set vllm_enable_lora: false"):
        put_adapter(None, 3, backend.adapter_weights())


def test_a_layer_that_the_model_does_not_have_is_refused(folder: str) -> None:
    with pytest.raises(ValueError, match=r"no_such_layer"):
        FsdpBackend(folder, **SETTINGS | {"lora": LORA | {"target_modules": ["no_such_layer"]}})


@pytest.mark.parametrize(
    ("name", "adapted"),
    [
        ("qwen3_moe", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("deepseek_v3", {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}),
        ("qwen3", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_dropout_leaves_experts_out_of_all_linear(name: str, adapted: set[str], tmp_path: Path) -> None:
    """peft ends in an error else: ms-swift's defaults are all-linear and a dropout of 0.05."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.05}
    model = architectures.save(name, tmp_path / name)
    backend = FsdpBackend(model, learning_rate=1e-2, num_training_steps=2, lora=settings)
    layers = [key.partition(".lora_")[0] for key, _ in backend.module.named_parameters() if ".lora_" in key]
    names = {layer.rpartition(".")[2] for layer in layers}
    assert names == adapted
    before = scores(backend)
    assert np.array_equal(scores(backend), before)  # no dropout as it scores
    for _ in range(2):
        backend.step(samples_of(), partial(mean_loss, 9), micro_batch_size=4)
    assert scores(backend).mean() > before.mean()


def test_without_dropout_an_adapter_has_none_either() -> None:
    """As in TRL, which disables dropout once the adapter is there. TRL's DPO does so by default, its SFT does not."""
    settings: dict[str, Any] = {"model": "m", "dataset": "d", "tuner_type": "lora", "lora_dropout": 0.5}
    for kind, dropout in ((DPOConfig, 0.0), (SFTConfig, 0.5)):
        found = lora_settings(kind(**settings))
        assert found is not None
        assert found["lora_dropout"] == dropout
    assert (lora_settings(DPOConfig(**settings, disable_dropout=False)) or {})["lora_dropout"] == 0.5


def test_biases_of_an_adapter_are_merged_as_by_peft(tmp_path: Path) -> None:
    """LoRA's lora_bias adds a bias to the layer's own."""
    from peft import PeftModel

    model = save_tiny(tmp_path / "model", attention_bias=True)
    lora = LORA | {"target_modules": ["q_proj", "v_proj"], "lora_bias": True}
    backend = FsdpBackend(model, **SETTINGS | {"lora": lora})
    backend.step(samples_of(), partial(mean_loss, 50), micro_batch_size=4)
    backend.export(tmp_path / "final")
    base = AutoModelForCausalLM.from_pretrained(model)
    began = {name: weight.clone() for name, weight in base.state_dict().items()}
    peft: Any = PeftModel.from_pretrained(base, tmp_path / "final" / "adapter")
    merged = peft.merge_and_unload().state_dict()
    name = "model.layers.0.self_attn.q_proj.bias"
    assert float((merged[name] - began[name]).abs().max()) > 1e-3
    assert largest_difference(dict(backend.named_weights()), merged) < 1e-6
    assert name in dict(backend.named_weights(trained_only=True))
