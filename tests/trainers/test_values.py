"""Values that mean nothing end with one line before anything starts, whatever the key, the trainer and the backend."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, Qwen3MoeConfig

from benchmarks.tiny.architectures import save
from rayhelper import ConfigError
from tests.golden.tiny import save_tiny, tiny_tokenizer
from trainers.classification.config import ClassificationConfig
from trainers.cli import load_config, main
from trainers.configuration.megatron_checks import config_file
from trainers.configuration.reading.folders import configurations
from trainers.configuration.shared import RunConfig, TrainConfig
from trainers.cpo.config import SimPOConfig
from trainers.dpo.config import DPOConfig
from trainers.gkd.config import GKDConfig
from trainers.gkd.trainer import GKDTrainer
from trainers.grpo.config import GRPOConfig
from trainers.parts.model_checks import (
    check_lengths,
    check_model_folder,
    check_optimizer,
    check_vocabulary,
    check_whole,
    configuration_of,
)
from trainers.ppo.config import PPOConfig
from trainers.reward.config import RewardConfig
from trainers.sampling.config import SamplingConfig
from trainers.sampling.trainer import SamplingTrainer
from trainers.sft.config import SFTConfig
from trainers.sft.trainer import SFTTrainer

NEEDED: dict[str, Any] = {"model": "m", "dataset": "d"}
GRPO: dict[str, Any] = {"reward_funcs": ["format"]}


@pytest.mark.parametrize(
    ("kind", "keys", "told"),
    [
        (SFTConfig, {"overlap_param_gather": -math.inf}, "overlap_param_gather must be true or false, got -inf"),
        (SFTConfig, {"sequence_parallel": "xxxx"}, "sequence_parallel must be true or false or null, got 'xxxx'"),
        (SFTConfig, {"overlap_grad_reduce": "1e-3"}, "overlap_grad_reduce must be true or false, got '1e-3'"),
        (GRPOConfig, GRPO | {"reward_weights": [math.nan]}, "reward_weights must hold finite numbers"),
        (GRPOConfig, GRPO | {"temperature": 1e30}, "temperature must be at most 100, got 1e+30"),
        (GRPOConfig, GRPO | {"epsilon_high": 0.1}, "epsilon_high=0.1 is below epsilon=0.2"),
        (GRPOConfig, GRPO | {"vespo_k_pos": math.nan, "loss_type": "vespo"}, "vespo_k_pos must be a finite number"),
        (GRPOConfig, GRPO | {"loss_type": ["grpo"]}, "loss_type must be text or a mapping"),
        (SFTConfig, {"chat_template": "{{ x"}, "chat_template is not a Jinja template (line 1): "),
        (SFTConfig, {"chat_template": " "}, "chat_template is empty"),
        (SFTConfig, {"run_name": "../../../etc/passwd"}, "run_name must be a name, without .."),
        (SFTConfig, {"output_dir": ""}, "output_dir is empty"),
        (SFTConfig, {"output_dir": "a" * 256}, "output_dir is longer than a name of a file may be"),
        (GRPOConfig, GRPO | {"ref_model": "a/" * 2048}, "ref_model is longer than a name of a file may be"),
        (GRPOConfig, GRPO | {"reward_model": ["m", "é" * 128]}, "reward_model is longer than a name of a file may be"),
        (SFTConfig, {"output_dir": "a\0b"}, "output_dir holds a character of code 0"),
        (SFTConfig, {"env": {"A=B": 1}}, "env: 'A=B' is not a name of an environment variable"),
        (SFTConfig, {"env": {"": 1}}, "env: '' is not a name of an environment variable"),
        (SFTConfig, {"seed": 2**32}, "seed must be at most 4294967295, got 4294967296"),
        (SFTConfig, {"seed": True}, "seed must be a whole number, got True"),
        (SFTConfig, {"tuner_type": "lora", "lora_target_modules": []}, "lora_target_modules names no layer"),
        (SFTConfig, {"learning_rate": "1"}, "learning_rate must be a number, got '1'"),
        (SFTConfig, {"save_steps": 10**30}, "save_steps must be a finite number of at most 1e+12"),
        (SFTConfig, {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": "x"}},
         "lr_scheduler_kwargs={'min_lr': 'x'} do not fit lr_scheduler_type=cosine_with_min_lr"),
        (SFTConfig, {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"powr": 1}},
         "lr_scheduler_kwargs={'powr': 1} do not fit lr_scheduler_type=polynomial"),
        (DPOConfig, {"loss_weights": [math.inf]}, "loss_weights must hold finite numbers"),
        (GRPOConfig, GRPO | {"epsilon": 2}, "epsilon must lie in [0, 1], got 2: ratios are clipped to 1 - epsilon"),
        (GRPOConfig, GRPO | {"epsilon": 1.5, "loss_type": "clip_cov"}, "epsilon must lie in [0, 1]"),
        (GRPOConfig, GRPO | {"epsilon": 1.5, "loss_type": "dppo_tv"}, "probabilities, which differ by at most 1"),
        (GRPOConfig, GRPO | {"epsilon_high": 1.5, "loss_type": "dppo_tv"}, "epsilon_high must lie in [0, 1], got 1.5"),
        (GRPOConfig, GRPO | {"delta": 0.9}, "delta must be at least 1, got 0.9"),
        (GRPOConfig, GRPO | {"loss_type": "fipo", "fipo_clip_range": 2, "fipo_clip_high_only": False},
         "fipo_clip_range must lie in [0, 1], got 2"),
        (GRPOConfig, GRPO | {"loss_type": "vespo", "vespo_k_pos": -1}, "vespo_k_pos must be at least 0, got -1"),
        (GRPOConfig, GRPO | {"entropy_coef": 1e5}, "entropy_coef must be at most 10000, got 100000"),
        (GRPOConfig, GRPO | {"rollout_engine": "vllm", "rollout_importance_sampling_mode": "token_truncate",
                             "rollout_importance_sampling_clip_max": 0.0}, "clip_max=0 weighs every token with 0"),
        (PPOConfig, GRPO | {"cliprange_value": 0}, "cliprange_value must be positive, got 0"),
        (PPOConfig, GRPO | {"vf_coef": 1e5}, "vf_coef must be at most 10000"),
        (SimPOConfig, {"alpha": 50.0}, "alpha must lie in [-10, 10], got 50"),
        (DPOConfig, {"rpo_alpha": 1e5}, "rpo_alpha must be at most 10000"),
        (SFTConfig, {"adam_epsilon": 2.0}, "adam_epsilon must be at most 1, got 2"),
        (SFTConfig, {"weight_decay": 1e6}, "weight_decay must be at most 100"),
        (SFTConfig, {"neftune_noise_alpha": 1e6}, "neftune_noise_alpha must be at most 1000"),
        (SFTConfig, {"columns": {"prompt": "prompt", "completion": "prompt"}},
         "columns: 'prompt' and 'completion' would both become 'prompt'"),
        (SFTConfig, {"max_steps": -5}, "max_steps must be at least -1, got -5"),
        (SFTConfig, {"tuner_type": "lora", "lora_alpha": -1}, "lora_alpha must be positive, got -1"),
        (SFTConfig, {"tuner_type": "lora", "lora_alpha": 0}, "lora_alpha must be positive, got 0"),
        (GRPOConfig, GRPO | {"temperature": 1e-9}, "temperature must be at least 0.0001, got 1e-09"),
        (PPOConfig, GRPO | {"eval_temperature": 1e-5}, "eval_temperature must be at least 0.0001, got 1e-05"),
        (GRPOConfig, GRPO | {"epsilon_high": 1e9}, "epsilon_high must be at most 1000, got 1000000000"),
        (SFTConfig, {"dataset": [0.5]}, "dataset is [0.5]. Give a file, a folder, a hub name, a list of them, or rows"),
        (SFTConfig, {"eval_dataset": 3}, "eval_dataset is 3. Give a file"),
        (SFTConfig, {"eval_dataset": {1: 2}}, "eval_dataset is {1: 2}. Give a file"),
        (SFTConfig, {"eval_dataset": "/no/such/rows.jsonlx"}, "there is no file or folder '/no/such/rows.jsonlx'"),
        (SFTConfig, {"dataset": ["d", "./nowhere#:5"]}, "dataset: there is no file or folder './nowhere'"),
        (SFTConfig, {"model": " m"}, "model is ' m', which begins or ends with a space or a new line"),
        (SFTConfig, {"output_dir": "out\n"}, "output_dir is 'out\\n', which begins or ends with a space"),
        (SFTConfig, {"prompt_template": "Answer."}, "prompt_template 'Answer.' names no column, so that all rows"),
        (SFTConfig, {"prompt_template": "{"}, "prompt_template '{': "),
        (SFTConfig, {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"a": 1}},
         "lr_scheduler_kwargs is {'a': 1}, but lr_scheduler_type constant reads none"),
        (SFTConfig, {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-3}},
         "in some step. It must stay between 0 and learning_rate (2e-05)"),
        (SFTConfig, {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": -1e-6}},
         "min_lr must be a finite number of at least 0, got -1e-06"),
        (SFTConfig, {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": math.nan}},
         "min_lr_rate must be a finite number of at least 0, got nan"),
        (SFTConfig, {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1e-4}},
         "lr_end (0.0001) must be smaller than initial lr (2e-05)"),
        (SFTConfig, {"tuner_type": "lora", "lora_dropout": 1.0}, "lora_dropout must lie in [0, 1), got 1.0"),
        (SFTConfig, {"tuner_type": "lora", "lora_rank": 10**6}, "lora_rank must be at most 10000, got 1000000"),
        (SFTConfig, {"tuner_type": "lora", "lora_kwargs": {"modules_to_save": 3}},
         "lora_kwargs: modules_to_save is 3, which is no value of this field of peft's LoraConfig"),
        (SFTConfig, {"tuner_type": "lora", "lora_kwargs": {"modules_to_save": "lm_head"}}, "modules_to_save is 'lm_"),
        (SFTConfig, {"tuner_type": "lora", "lora_kwargs": {"use_dora": "yes"}}, "lora_kwargs: use_dora is 'yes'"),
        (SFTConfig, {"tuner_type": "lora", "lora_kwargs": {"bias": "x"}}, "lora_kwargs: bias is 'x'"),
        (SFTConfig, {"tuner_type": "lora", "lora_kwargs": {"init_lora_weights": "x"}}, "init_lora_weights is 'x'"),
        (SFTConfig, {"tuner_type": "lora", "lora_kwargs": {"auto_mapping": {}}}, "lora_kwargs must be one of r, "),
        (SFTConfig, {"tuner_type": "boft", "tuner_kwargs": {"boft_block_size": "x"}}, "boft_block_size is 'x'"),
        (SFTConfig, {"chat_template": "{{ 1/0 }}"}, "chat_template does not read messages"),
        (SFTConfig, {"chat_template": "/"}, "chat_template: '/' is a folder. Give a file."),
        (SFTConfig, {"output_dir": "s3://bucket/run"}, "output_dir is the address 's3://bucket/run'"),
        (SFTConfig, {"resume_from_checkpoint": ""}, "resume_from_checkpoint is empty"),
        (SFTConfig, {"external_plugins": [""]}, "external_plugins holds an empty name"),
        (SFTConfig, {"system": "\ud800"}, "system holds half a surrogate pair"),
        (SFTConfig, {"env": {"A": "\ud800"}}, "env: 'A' holds half a surrogate pair"),
        (SFTConfig, {"device_groups": {"a": {"device": "CPU", "ranks": 1, "workers": ["train"], "env": {"A": "\0"}}}},
         "env 'A' of group 'a' holds a character of code 0"),
    ],
)  # fmt: skip
def test_a_value_without_a_meaning_is_refused_by_its_key(kind: type, keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        kind(**NEEDED | keys)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_a_split_of_files_is_refused_as_they_have_none(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    file = str(rows)
    for keys in ({"dataset": file}, {"dataset": [file, f"{file}#:5"]}, {"eval_dataset": file}):
        split = f"{next(iter(keys))}_split"
        with pytest.raises(ConfigError, match=rf"^{split} is 'nope', but [^\n]*rows.jsonl is a file, which has no"):
            SFTConfig(**NEEDED | keys | {split: "nope"})
    for keys in ({"dataset": [file, "org/hub"]}, {"dataset": "org/hub"}, {"dataset": "folder"}):  # which have some
        assert SFTConfig(**NEEDED | keys | {"dataset_split": "nope"})
    assert SFTConfig(**NEEDED | {"dataset": file, "eval_dataset": file, "eval_dataset_split": "train"})


def test_a_length_far_beyond_the_positions_of_the_model_is_refused(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "m")
    file = Path(model, "config.json")
    known = json.loads(file.read_text())
    positions = known["max_position_embeddings"]
    for kind, keys in (
        (SFTConfig, {"max_length": 10**12}),
        (DPOConfig, {"max_length": 10**12}),
        (GRPOConfig, GRPO | {"max_completion_length": 10**9}),
    ):
        with pytest.raises(ConfigError, match=rf"^max_\w*length is 10+, but the model .* has {positions} positions"):
            check_lengths(kind(**NEEDED | keys | {"model": model}))
    for length in (None, positions, 4 * positions):  # a row of packed documents
        check_lengths(SFTConfig(**NEEDED | {"model": model, "max_length": length}))
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
    scaled = {"model": model, "max_length": 64 * positions, "model_init_kwargs": {"rope_parameters": rope}}
    check_lengths(SFTConfig(**NEEDED | scaled))
    file.write_text(json.dumps(known | {"rope_parameters": rope}))
    check_lengths(SFTConfig(**NEEDED | {"model": model, "max_length": 64 * positions}))


@pytest.mark.parametrize(
    "keys",
    [
        {"epsilon": 1, "epsilon_high": 5.0},  # no lower bound
        {"epsilon": 2.0, "loss_type": "gmpo"},  # of log-ratios
        {"epsilon": 2.0, "loss_type": "dppo_kl"},  # nats
        {"delta": 10.0},
        {"loss_type": "fipo", "fipo_clip_range": 2, "fipo_clip_high_only": True},
    ],
)
def test_clip_ranges_with_a_meaning_are_accepted(keys: dict[str, Any]) -> None:
    assert GRPOConfig(**NEEDED | GRPO | keys)


@pytest.mark.parametrize("said", ["true", "[[1]]", "3"])
def test_a_loss_of_another_type_is_refused_by_its_key(said: str) -> None:
    with pytest.raises(ConfigError, match="loss_type"):
        load_config(DPOConfig, ["--model=m", "--dataset=d", f"--loss_type={said}"])


@pytest.mark.parametrize("text", ["1_000", "0x10", "٣", "1e", "inf", "nan", "\uff11\uff12", "0b1"])
@pytest.mark.parametrize("key", ["max_steps", "learning_rate", "overlap_grad_reduce", "global_batch_size"])
def test_numbers_are_written_in_plain_digits(key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be "):
        load_config(SFTConfig, ["--model", "m", "--dataset", "d", f"--{key}", text])
    arguments = ["--model", "m", "--dataset", "d", "--reward_funcs", "format", "--reward_weights", text]
    with pytest.raises(ConfigError, match="reward_weights must "):
        load_config(GRPOConfig, arguments)


@pytest.mark.parametrize(
    ("kind", "keys", "told"),
    [
        (DPOConfig, {"loss_type": True}, "loss_type must be "),
        (DPOConfig, {"loss_type": [{"a": 1}]}, "loss_type must be "),
        (SFTConfig, {"eval_steps": {"a": 1}}, "eval_steps must be a whole number"),  # with no eval_dataset, too
        (SFTConfig, {"eval_strategy": "zzz"}, "eval_strategy must be one of steps, epoch, no"),
        (SFTConfig, {"eval_strategy": 3}, "eval_strategy must be one of steps, epoch, no"),
        (SFTConfig, {"eval_strategy": -math.inf}, "eval_strategy must be one of steps, epoch, no"),
        (SFTConfig, {"eval_steps": math.nan}, "eval_steps must be a whole number"),
        (SFTConfig, {"eval_steps": -1}, "eval_steps must be at least 1"),
        (SFTConfig, {"learning_rate": 10**400}, "learning_rate must be a number, got 1000"),  # no float is so large
        (GRPOConfig, GRPO | {"vllm_tensor_parallel_size": True}, "vllm_tensor_parallel_size must be a whole number"),
        (GRPOConfig, GRPO | {"sleep_level": True}, "sleep_level must be one of 0, 1, 2"),
    ],
)
def test_a_file_with_a_value_of_another_type_is_refused(
    kind: type[RunConfig], keys: dict[str, Any], told: str, tmp_path: Path
) -> None:
    (tmp_path / "x.yaml").write_text(json.dumps(NEEDED | keys))
    with pytest.raises(ConfigError, match=told):
        load_config(kind, ["--config", str(tmp_path / "x.yaml")])


def test_a_key_that_is_given_twice_is_told_as_such() -> None:
    with pytest.raises(ConfigError, match="learning_rate is given twice; give one of them"):
        load_config(SFTConfig, ["--model", "m", "--dataset", "d", "--learning_rate", "1", "--learning_rate", "2"])


@pytest.mark.parametrize(("text", "number"), [("0x10", 16), ("1_000", 1000), ("010", 8), ("0b11", 3), ("1:30", 90)])
@pytest.mark.parametrize("line", ["max_steps: {}", "learning_rate: {}", "optim_kwargs: {{a: {}}}", "data_seed: [{}]"])
def test_a_file_says_numbers_in_plain_digits_too(line: str, text: str, number: int, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("model: m\ndataset: d\n" + line.format(text))
    with pytest.raises(
        ConfigError,
        match=f"{text} is not a number in decimal digits. Write {number}, or put it in quotes if it is text",
    ):
        load_config(SFTConfig, ["--config", str(tmp_path / "x.yaml")])


def test_numbers_and_quoted_text_of_a_file_are_what_they_say(tmp_path: Path) -> None:
    lines = ["model: m", "dataset: d", "learning_rate: 1e-3", "run_name: '1_000'", "warmup_steps: 0", "max_steps: +12"]
    (tmp_path / "x.yaml").write_text("\n".join([*lines, "optim_kwargs: {a: 1e-3, b: .5, c: -2.5E+3, d: '0x10'}"]))
    config = load_config(SFTConfig, ["--config", str(tmp_path / "x.yaml")])
    assert (config.learning_rate, config.run_name, config.max_steps) == (1e-3, "1_000", 12)
    assert config.optim_kwargs == {"a": 1e-3, "b": 0.5, "c": -2500.0, "d": "0x10"}


@pytest.mark.parametrize("name", ["exp-1", "llama/lr 1e-5", "a..b", "日本"])
def test_names_of_runs_are_left_alone(name: str) -> None:
    assert SFTConfig(**NEEDED, run_name=name).run_name == name


def test_templates_of_transformers_are_templates(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'x' %}{% continue %}{% endif %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% endfor %}"
    )
    assert SFTConfig(**NEEDED, chat_template=template)
    (tmp_path / "good.jinja").write_text(template)
    assert SFTConfig(**NEEDED, chat_template=str(tmp_path / "good.jinja"))
    (tmp_path / "bad.jinja").write_text(template + "\n{% endfor %}")
    with pytest.raises(ConfigError, match=r"chat_template: .*bad.jinja is not a Jinja template \(line 2\)"):
        SFTConfig(**NEEDED, chat_template=str(tmp_path / "bad.jinja"))


# Models, tokenizers, and arguments of theirs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({"atn_implementation": "sdpa"}, "model_init_kwargs holds atn_implementation, which is neither an argument"),
        ({"attn_implementation": "flash"}, "attn_implementation must be one of eager, "),
        ({"attn_implementation": 3}, "attn_implementation must be a name, got 3"),
        ({"attention_dropout": 0.5, "attn_implementation": "sdpa", "revision": "main"}, ""),
    ],
)
def test_arguments_that_a_model_does_not_take_are_named(kwargs: dict[str, Any], told: str, model: str) -> None:
    config = SFTConfig(model=model, dataset="d", model_init_kwargs=kwargs)
    if not told:
        check_model_folder(config)
        return
    with pytest.raises(ConfigError, match=told):
        check_model_folder(config)


LINEAR = "Its linear layers are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"


@pytest.mark.parametrize(
    ("targets", "kwargs", "told"),
    [
        (["query_key_value"], {}, f"is query_key_value, .*no layer of the model is named query_key_value. {LINEAR}"),
        (["q_proj", "c_attn"], {}, f"is q_proj, c_attn, .*no layer of the model is named c_attn. {LINEAR}"),
        (["self_attn"], {}, f": Target module Qwen3Attention is not supported. .*{LINEAR}"),
        (["q_proj"], {"layers_to_transform": [7]}, LINEAR),
        (["q_proj"], {"layers_to_transform": [0, 7]}, "lora_kwargs do not fit .*layers_to_transform has 7, .* 0 to 1"),
        (["q_proj"], {"modules_to_save": ["head"]}, "lora_kwargs do not fit .*modules_to_save has head, and no module"),
        (["q_proj"], {"trainable_token_indices": [-1]}, "lora_kwargs do not fit .*trainable_token_indices has -1"),
        (["q_proj"], {"target_parameters": ["x"]}, "lora_kwargs do not fit .*target_parameters has x, and no weight"),
        (["all-linear"], {"exclude_modules": ".*"}, "lora_kwargs do not fit .*: All modules were excluded"),
        (["all-linear"], {"alpha_pattern": {"q_proj": "x"}}, "lora_kwargs do not fit .*: unsupported operand"),
        (["all-linear"], {"use_dora": True, "init_lora_weights": "pissa_niter_4", "modules_to_save": ["lm_head"]}, ""),
        (["q_proj", "layers.1.mlp.up_proj", "embed_tokens", "lm_head"], {}, ""),
        (["auto"], {}, ""),
        (["all-linear"], {}, ""),
    ],
)
def test_layers_of_an_adapter_that_the_model_lacks_are_named(
    targets: list[str], kwargs: dict[str, Any], told: str, model: str
) -> None:
    keys = {"tuner_type": "lora", "lora_target_modules": targets, "lora_kwargs": kwargs}
    config = SFTConfig(model=model, dataset="d", **keys)
    if not told:
        check_model_folder(config)
        return
    with pytest.raises(ConfigError, match=told) as error:
        check_model_folder(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("qwen3_moe", ""),
        ("qwen3", "router_aux_loss_coef is 0.01, but Qwen3ForCausalLM has no experts. Remove it"),
        (
            "nemotron_h",
            "NemotronHForCausalLM of transformers has no loss that balances its experts, .* backend: megatron",
        ),
    ],
)
def test_a_model_whose_experts_cannot_be_balanced_is_refused_before_the_start(
    name: str, told: str, tmp_path: Path
) -> None:
    check_model_folder(SFTConfig(model=save(name, tmp_path), dataset="d"))
    config = SFTConfig(model=str(tmp_path), dataset="d", router_aux_loss_coef=0.01)
    if not told:
        check_model_folder(config)
        return
    with pytest.raises(ConfigError, match=told):
        check_model_folder(config)


@pytest.mark.parametrize(
    ("kind", "keys", "told"),
    [
        (SFTConfig, {"router_aux_loss_coef": -0.1}, "router_aux_loss_coef must be at least 0"),
        (RewardConfig, {"router_aux_loss_coef": 0.1}, "sequence classifiers give no logits of their routers. Remove"),
        (ClassificationConfig, {"num_labels": 2, "router_aux_loss_coef": 0.1}, "give no logits of their routers. Rem"),
        (SFTConfig, {"backend": "megatron", "router_aux_loss_coef": 0.1}, r"Write megatron: \{moe_aux_loss_coeff"),
    ],
)
def test_experts_are_balanced_by_a_loss_of_language_models(kind: type[Any], keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        kind(model="m", dataset="d", **keys)


def test_names_of_stacked_experts_are_names_of_layers_to_an_adapter(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    Qwen3MoeConfig(vocab_size=260, num_key_value_heads=2, head_dim=16, **sizes).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    keys = {"model": str(tmp_path), "dataset": "d", "tuner_type": "lora"}
    check_model_folder(SFTConfig(lora_target_modules=["gate_proj", "up_proj", "down_proj"], **keys))
    with pytest.raises(ConfigError, match=r"without also targeting up_proj"):
        check_model_folder(SFTConfig(lora_target_modules=["gate_proj"], **keys))


@pytest.mark.parametrize(
    ("optim", "kwargs", "fits"),
    [
        ("sgd", {"momentum": 0.9}, True),
        ("sgd", {"momentun": 0.9}, False),
        ("sgd", {"momentum": -1}, False),
        ("adamw_torch", {"amsgrad": True}, True),
        ("adamw_torch", {"lr": 1.0}, False),
        ("rmsprop", {"alpha": "x"}, False),
        ("sgd", {"momentum": math.nan}, False),
        ("rmsprop", {"momentum": math.inf}, False),
    ],
)
def test_arguments_that_an_optimizer_does_not_take_are_named(optim: Any, kwargs: dict[str, Any], fits: bool) -> None:
    config = SFTConfig(**NEEDED, optim=optim, optim_kwargs=kwargs)
    if fits:
        check_optimizer(config)
        return
    with pytest.raises(ConfigError, match=f"do not fit optim={optim}"):
        check_optimizer(config)


def test_a_weight_decay_beside_the_key_is_refused_as_no_weight_would_have_it() -> None:
    with pytest.raises(ConfigError, match="optim_kwargs holds weight_decay, which is the key weight_decay"):
        check_optimizer(SFTConfig(**NEEDED, optim_kwargs={"weight_decay": 0.1}))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", "model: m\ndataset: d\n".encode("utf-16")])
def test_a_file_of_another_encoding_is_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"^--config: [^\n]*x.yaml' cannot be read: it is not text in UTF-8[^\n]*$"):
        load_config(SFTConfig, ["--config", str(tmp_path / "x.yaml")])


@pytest.mark.parametrize("section", ["train: 3", "train: {learning_rate: 1e-5}", "rollout: [1]"])
def test_a_section_without_devices_is_told_what_it_must_hold(section: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(f"model: m\ndataset: d\n{section}\n")
    with pytest.raises(ConfigError, match=r"is the section of a role, and must hold one of gpus, npus, cpus") as error:
        load_config(SFTConfig, ["--config", str(tmp_path / "x.yaml")])
    assert "did you mean" not in str(error.value)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(model: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    check_vocabulary(tokenizer, configuration_of(model, False), model, model)
    tokenizer.add_tokens([f"<new {k}>" for k in range(1000)])
    tokenizer.save_pretrained(tmp_path / "larger")
    config = SFTConfig(model=model, dataset="d", tokenizer=str(tmp_path / "larger"))
    with pytest.raises(ConfigError, match=r"tokenizer: .*larger' has token ids up to \d+, but the model"):
        check_model_folder(config)


def test_a_model_that_sees_is_refused_where_its_tower_would_be_lost() -> None:
    from transformers import BertConfig, Gemma3Config, Qwen2AudioConfig, Qwen3_5Config, Qwen3_5TextConfig

    check_whole(Qwen3_5Config(), "m")  # trained whole
    check_whole(Qwen3_5TextConfig(), "m")
    check_whole(Gemma3Config(), "m")
    check_whole(Qwen3_5Config(), "m", "megatron")  # which keeps it as it is
    with pytest.raises(ConfigError, match=r"has a vision tower, and is trained here by Qwen3_5ForCausalLM"):
        check_whole(Qwen3_5Config(), "m", "a backend of texts alone")
    with pytest.raises(ConfigError, match=r"type qwen2_audio, which neither AutoModelForCausalLM"):
        check_whole(Qwen2AudioConfig(), "m")
    check_whole(BertConfig(), "m", scores=True)


def test_an_engine_that_quantizes_its_weights_is_refused_unless_it_keeps_them() -> None:
    keys = {**NEEDED, "reward_funcs": ["exact_answer"], "rollout_engine": "vllm"}
    with pytest.raises(ConfigError, match=r"cannot take new weights.*vllm_enable_lora: true"):
        GRPOConfig(**keys, vllm_engine_kwargs={"quantization": "fp8"})
    GRPOConfig(**keys, vllm_engine_kwargs={"quantization": None})
    GRPOConfig(**keys, vllm_engine_kwargs={"quantization": "fp8"}, tuner_type="lora", vllm_enable_lora=True)


def test_arguments_that_a_models_class_does_not_take_are_named_by_those_that_only_read_it(model: str) -> None:
    with pytest.raises(ConfigError, match="model_init_kwargs holds min_lr, which is neither"):
        SamplingTrainer.check(SamplingConfig(**NEEDED | {"model": model, "model_init_kwargs": {"min_lr": 1}}), None)
    with pytest.raises(ConfigError, match="max_completion_length is 1000000, but the model"):
        SamplingTrainer.check(SamplingConfig(**NEEDED | {"model": model, "max_completion_length": 10**6}), None)
    teacher: dict[str, Any] = {"teacher_model": model, "teacher_model_init_kwargs": {"min_lr": 1}}
    with pytest.raises(ConfigError, match="teacher_model_init_kwargs holds min_lr, which is neither"):
        GKDTrainer.check(GKDConfig(**NEEDED | {"model": model} | teacher), None)


@pytest.mark.parametrize("name", ["a b", "{{ x", "-x"])
def test_a_name_that_the_hub_cannot_have_has_no_file_here(name: str) -> None:
    assert config_file(name) is None


@pytest.mark.parametrize("token", ["{{ x", "</end>", " "])
def test_an_end_that_is_no_token_is_refused_as_no_text_would_end(token: str, model: str) -> None:
    with pytest.raises(ConfigError, match=r"eos_token .* is not one token of the tokenizer"):
        SFTTrainer.check(SFTConfig(model=model, dataset=[{"text": "a"}], eos_token=token), None)


def test_an_end_may_be_a_new_token(model: str) -> None:
    config = SFTConfig(model=model, dataset=[{"text": "a"}], eos_token="</end>", new_special_tokens=["</end>"])
    SFTTrainer.check(config, None)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: .* has no config.json"):
        check_model_folder(SFTConfig(model=str(tmp_path), dataset="d"))


@pytest.mark.parametrize(
    "keys",
    [
        ["--optim_kwargs", "{lr: 1}"],
        ["--model_init_kwargs", "{x: 1}"],
        ["--output_dir", "/proc/1/x"],
        ["--env.A=B", "1"],
    ],
)
def test_a_command_with_one_ends_with_one_line_and_exit_code_2(
    keys: list[str], model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    arguments = ["--model", model, "--dataset", str(tmp_path / "rows.jsonl"), "--output_dir", str(tmp_path / "run")]
    arguments = [*arguments[: 4 if "--output_dir" in keys else 6], *keys]
    if keys[0].startswith("--env"):
        (tmp_path / "x.yaml").write_text("env: {'A=B': 1}\n")
        arguments = [*arguments[:6], "--config", str(tmp_path / "x.yaml")]
    with pytest.raises(SystemExit) as ended:
        main("sft", arguments)
    assert ended.value.code == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line for line in errors if line.startswith("error: ")] == errors[-1:]
    assert not (tmp_path / "run").exists()


# Anything at all

KINDS = sorted({kind.__name__: kind for kind in configurations().values()}.items())
MALFORMED = st.one_of(
    st.sampled_from(
        [None, True, False, "", " ", "null", "true", "x", "1_000", "0x10", "٣", "1e-3", "inf", "-inf", "nan", "{", "[",
         "{{ x", "../../etc/passwd", "a\0b", "\ud800", "é" * 5000, "#5", "*", "~", "/", ":", "a:b", "a.b", "1" * 5000]
    ),
    st.sampled_from([math.nan, math.inf, -math.inf, 0, -1, 2**32, 2**63, 10**30, 1e30, -1e30, 5e-324, 0.5]),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.text(max_size=4), st.just(math.nan)),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
        max_leaves=6,
    ),
    st.builds(object),
)  # fmt: skip


@st.composite
def malformed(draw: st.DrawFn) -> tuple[type[RunConfig], dict[str, Any]]:
    """A configuration with one to four of its keys, each with a value that may be anything."""
    _, kind = draw(st.sampled_from(KINDS))
    names = [one.name for one in dataclasses.fields(kind) if one.init]
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True))
    return kind, {name: draw(MALFORMED) for name in chosen}


def right(kind: type[RunConfig]) -> dict[str, Any]:
    """The keys that a configuration needs."""
    needed: dict[str, dict[str, Any]] = {"GKDConfig": {"teacher_model": "t"}, "ClassificationConfig": {"num_labels": 2}}
    rewarded = {"GRPOConfig", "PPOConfig"}
    return NEEDED | needed.get(kind.__name__, {}) | (GRPO if kind.__name__ in rewarded else {})


@settings(max_examples=400, suppress_health_check=list(HealthCheck))
@given(malformed())
def test_whatever_is_written_in_python_is_accepted_or_refused_in_one_line(case: tuple[type, dict[str, Any]]) -> None:
    kind, keys = case
    try:
        config = kind(**right(kind) | keys)
    except ConfigError:
        return
    hints = get_type_hints(kind)
    for name in keys:  # what was accepted is of the key's type
        kept = getattr(config, name)
        if hints[name] is bool:
            assert isinstance(kept, bool), name
        if hints[name] is float:
            assert math.isfinite(kept) or name == "prm_threshold", name


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(malformed(), st.booleans())
def test_whatever_is_written_in_a_file_or_on_the_command_line_is_too(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[type[TrainConfig], dict[str, Any]], in_file: bool
) -> None:
    kind, keys = case
    keys = {name: value for name, value in keys.items() if type(value) is not object}
    arguments = [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in keys.items()]
    given = {name: value for name, value in right(kind).items() if name not in keys}
    arguments += [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in given.items()]
    if in_file:
        file = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
        file.write_text(json.dumps(given | keys))
        arguments = ["--config", str(file)]
    with contextlib.suppress(ConfigError):
        load_config(kind, arguments)
