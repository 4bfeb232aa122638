"""ms-swift's commands, keys and plugins as its users have them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rayhelper import ConfigError, DeviceGroups
from rayhelper.__main__ import main
from tests import warm
from tests.conftest import registries_restored
from tests.golden.tiny import save_tiny, tiny_tokenizer
from tests.trainers.test_other_names import load, told
from trainers.backends.fsdp.hf_model import build_model
from trainers.cli import load_config
from trainers.configuration.others import translations
from trainers.configuration.others.ms_swift import engine_in_parts, spelled, torchrun_options
from trainers.configuration.packs import micro_batch_tokens, pack_length
from trainers.cpo.config import CPOConfig, ORPOConfig, SimPOConfig
from trainers.data.formats import with_names
from trainers.data.held_out import Part
from trainers.data.loss_scale import parsed
from trainers.data.packs import batches_of, packed
from trainers.data.rows import load_rows, tokenize_sft
from trainers.data.sources import read_source
from trainers.dpo.config import DPOConfig
from trainers.gkd.config import GKDConfig
from trainers.grpo.config import GRPOConfig
from trainers.kto.config import KTOConfig
from trainers.plugins import DATASETS, load_plugins
from trainers.ppo.config import PPOConfig
from trainers.program import run
from trainers.reward.config import RewardConfig
from trainers.rewards.functions import resolve_rewards, score
from trainers.sft.config import SFTConfig

ROOT = Path(__file__).resolve().parents[2]
Q = {"role": "user", "content": "q"}


def said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


# Commands


def test_commands_of_ms_swift_are_commands_of_ours() -> None:
    theirs = ["--defaults", "ms-swift"]
    assert spelled(["swift", "sft", "x.yaml", "--lr", "1"]) == ("sft", ["--config", "x.yaml", "--lr", "1", *theirs])
    assert spelled(["swift", "pt", "--model", "m"]) == ("pretrain", ["--model", "m", *theirs])
    assert spelled(["swift", "sample", "--model", "m"]) == ("sampling", ["--model", "m", *theirs])
    megatron = ["--backend", "megatron", "--model", "m", *theirs]
    assert spelled(["megatron", "rlhf", "--model", "m"]) == ("rlhf", megatron)
    assert spelled(["swift", "pt", "--defaults=trl"]) == ("pretrain", ["--defaults=trl"])
    for words, why in (
        (["swift", "infer"], "it serves a model"),
        (["swift", "sfft"], "did you mean sft"),
        (["megatron", "sample"], "has no command 'sample'"),
        (["swift"], "has no command ''"),
    ):
        with pytest.raises(ConfigError, match=why):
            spelled(words)


def test_their_megatron_trains_with_the_backend_that_is_named(tmp_path: Path) -> None:
    """A refusal says "Write backend: fsdp", and that is all there is to write."""
    given = ["--backend", "megatron"]
    assert spelled(["megatron", "sft", *given])[1] == [*given, "--defaults", "ms-swift"]
    assert spelled(["swift", "sft", "--backend=fsdp"])[1][0] == "--backend=fsdp"
    (tmp_path / "x.yaml").write_text("model: m\ndataset: d\nbackend: fsdp\ntensor_model_parallel_size: 2\n")
    words = "--expert_model_parallel_size 8 --moe_grouped_gemm true --moe_permute_fusion true --micro_batch_size 2"
    _, arguments = spelled(["megatron", "sft", str(tmp_path / "x.yaml"), *words.split()])
    config = load_config(SFTConfig, arguments)
    assert (config.backend, config.tensor_model_parallel_size, config.moe_grouped_gemm) == ("fsdp", 1, False)
    # Megatron's defaults of ms-swift, not those of ``swift``
    assert (config.tuner_type, config.global_batch_size, config.per_device_train_batch_size) == ("full", 16, 2)
    _, arguments = spelled(["megatron", "sft", *"--model m --dataset d --backend=fsdp --train_type lora".split()])
    assert load_config(SFTConfig, arguments).tuner_type == "lora"
    for key, remedy in (("moe_aux_loss_coeff", "Write router_aux_loss_coef"), ("moe_expert_capacity_factor", "Remove")):
        with pytest.raises(ConfigError, match=rf"{key} is Megatron's.*{remedy}"):
            load_config(SFTConfig, [*arguments, f"--{key}", "2"])


def test_a_file_may_come_first_without_its_option(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("model: m\ndataset: d\nlearning_rate: 1.0e-3\n")
    config = load_config(SFTConfig, [str(tmp_path / "x.yaml"), "--max_length", "7"])
    assert (config.learning_rate, config.max_length) == (1e-3, 7)


def test_variables_of_processes_start_torchrun_once() -> None:
    variables = {"NPROC_PER_NODE": "4", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "OTHER": "x"}
    asked = ["--nproc_per_node=4", "--nnodes=2", "--node_rank=1", "--master_addr=a"]
    assert torchrun_options(variables) == asked
    assert torchrun_options({**variables, "TORCHELASTIC_RUN_ID": "r"}) == []
    assert torchrun_options({"MASTER_PORT": "1"}) == []


def test_mistakes_are_told_once_before_torchrun_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a b"}\n')
    words = ["swift", "sft", "--model", str(tmp_path / "model"), "--dataset", str(rows), "--report_to", "none"]
    words += ["--output_dir", str(tmp_path / "run"), "--add_version", "false"]
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: started.append(command) or sys.exit(0))
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    for more, code, message in (
        (["--max_length", "8", "--max_seq_length", "9"], 2, "max_length"),
        (["--max_length", "9999999"], 2, "positions"),
        (["--max_length", "64", "--print_config"], 0, "max_length: 64"),
        (["--max_length", "64"], 0, ""),
    ):
        assert not started
        with pytest.raises(SystemExit) as end:
            run([*words, *more])
        found = capfd.readouterr()
        assert end.value.code == code, found.err
        if code:
            assert message in (found.err.splitlines() or [""])[-1]
            assert found.err.count("error: ") == 1
        else:
            assert found.out.count(message or "no output") == bool(message)
        assert "RANK" not in os.environ
    (command,) = started
    assert command[-len(words) - 2 :] == [*words, "--max_length", "64"]
    assert "--nproc_per_node=2" in command
    assert not (tmp_path / "run" / "run.lock").exists()


def test_help_before_a_trainer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["swift", "--help"], "COMMAND is one of"),
        (["megatron"], "COMMAND is one of"),
        (["rlhf", "--help"], "TYPE names: "),
        (["swift", "rlhf", "-h"], "swift rlhf --rlhf_type TYPE"),
    ):
        assert run(words) == 0
        assert message in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        run(["rlhf", "--rlhf_type", "grpo", "--help", "resume_from_checkpoint"])
    assert "auto (or true): continues" in " ".join(capsys.readouterr().out.split())


def test_a_command_of_ms_swift_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "model")
    words = ["swift", "rlhf", "--rlhf_type", "grpo", "--model", str(tmp_path / "model"), "--dataset", "d.jsonl"]
    words += ["--reward_funcs", "accuracy"]
    assert main(["plan", "--", "NPROC_PER_NODE=4", "NNODES=2", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith("NPROC_PER_NODE=4 NNODES=2 swift rlhf: 1 device group\n")
    assert "every_process: GPU, hosts train, rollout (colocated)\n  workers  8, 1 GPU each" in out
    assert "total: 2 nodes x 4 = 8 GPUs" in out
    assert "there is no file 'd.jsonl'" in out  # which the cluster may have
    assert main(["plan", "--", "megatron", *words[1:], "--tensor_model_parallel_size", "2"]) == 1
    assert "does not divide its 1 workers" in capsys.readouterr().out
    for command, message in (
        (["plan", "--", "swift", "infer"], "swift infer is not supported"),
        (["plan", "--", "verl", "x"], "no command 'verl' has a configuration to plan"),
        (["check", "--", *words], "rayhelper plan -- swift rlhf"),
    ):
        assert main(command) == 2
        assert message in capsys.readouterr().err


IN_PARTS = {"use_vllm": "true", "vllm_mode": "colocate", "vllm_tensor_parallel_size": "4"}


def test_a_colocated_engine_in_parts_runs_on_ray_beside_training(tmp_path: Path) -> None:
    """A process of torchrun that trains holds no part of an engine here."""
    words = ["swift", "rlhf", "--rlhf_type", "grpo", "--model", "m", "--dataset", "d", "--reward_funcs", "accuracy"]
    words += [word for name, value in IN_PARTS.items() for word in (f"--{name}", value)]
    command = [warm.python(), "-m", "trainers", *words, "--print_config"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NPROC_PER_NODE": "8"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, cwd=tmp_path)
    assert "on Ray, not torchrun, as workers that train hold no part of an engine" in done.stderr
    config = yaml.safe_load(done.stdout)
    assert (config["use_ray"], config["vllm_tensor_parallel_size"]) == (True, 4)
    groups = DeviceGroups.parse(config["device_groups"])
    assert groups.group_of("train").num_workers == 8
    assert groups.share_devices("rollout", "train")
    assert groups.group_of("rollout") != groups.group_of("train")


@pytest.mark.parametrize(
    ("keys", "environment"),
    [
        ({"vllm_tensor_parallel_size": "1"}, {}),
        ({"use_vllm": "false"}, {}),
        ({"vllm_mode": "server"}, {}),
        ({"use_ray": "true"}, {}),
        ({"device_groups": "{}"}, {}),
        ({}, {"NPROC_PER_NODE": "6"}),
        ({}, {"NPROC_PER_NODE": "gpu"}),
        ({}, {"NNODES": "2"}),
        ({}, {"TORCHELASTIC_RUN_ID": "r"}),
    ],
)
def test_other_engines_run_where_they_are_told_to(keys: dict[str, str], environment: dict[str, str]) -> None:
    assert engine_in_parts(IN_PARTS, {"NPROC_PER_NODE": "8"})
    assert not engine_in_parts(IN_PARTS | keys, {"NPROC_PER_NODE": "8"} | environment)


def test_a_command_of_ms_swift_prints_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("model: m\ndataset: d\nmodel_name: [a, b]\n")
    command = [warm.python(), "-m", "trainers", "swift", "sft", str(tmp_path / "x.yaml"), "--print_config"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, cwd=tmp_path)
    assert "model_name:\n- a\n- b\n" in done.stdout


# Keys


def test_a_layout_of_megatron_chooses_its_backend(tmp_path: Path) -> None:
    assert load(SFTConfig, "tensor_model_parallel_size: 2", tmp_path).backend == "megatron"
    assert load(SFTConfig, "tensor_model_parallel_size: 1", tmp_path).backend == "fsdp"
    assert "tensor_model_parallel_size" in told(SFTConfig, "tensor_model_parallel_size: 2\nbackend: fsdp", tmp_path)


def test_experts_are_whole_in_a_file_of_megatrons_names(tmp_path: Path) -> None:
    text = "tensor_model_parallel_size: 2\nexpert_model_parallel_size: 2\n"
    assert load(SFTConfig, text + "micro_batch_size: 1", tmp_path).expert_tensor_parallel_size == 1
    assert load(SFTConfig, text, tmp_path).expert_tensor_parallel_size is None


def test_evaluation_without_rows_is_left_out(tmp_path: Path) -> None:
    assert load(SFTConfig, "eval_steps: 5", tmp_path).eval_steps is None
    assert load(SFTConfig, "eval_steps: 5\nsplit_dataset_ratio: 0.1", tmp_path).eval_steps == 5
    config = load(SFTConfig, "eval_steps: 5\nsplit_dataset_ratio: 0.1\neval_iters: 0", tmp_path)
    assert (config.eval_steps, config.evaluates) == (None, False)
    assert "must lie in [0, 1)" in told(SFTConfig, "split_dataset_ratio: 1", tmp_path)


def test_the_optimizer_waits_in_the_memory_of_the_host(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "optimizer_cpu_offload: true\nuse_precision_aware_optimizer: true\noptimizer_offload_fraction: 0.4"
    with caplog.at_level(logging.INFO):
        assert load(SFTConfig, text, tmp_path).optimizer_offload
    assert "optimizer_offload_fraction (all states" in caplog.text
    assert "exp_avg_dtype is not supported" in told(SFTConfig, f"{text}\nexp_avg_dtype: bf16", tmp_path)
    assert not load(SFTConfig, "optimizer_offload_fraction: 0.4", tmp_path).optimizer_offload


def test_flash_attention_is_torchs_own_where_its_package_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for installed, meant in ((True, "flash_attention_2"), (False, "sdpa")):
        monkeypatch.setattr(translations, "is_installed", lambda _, installed=installed: installed)
        config = load(SFTConfig, "attn_impl: flash_attn", tmp_path)
        assert config.model_init_kwargs == {"attn_implementation": meant}


def test_fsdp2_is_the_file_that_ms_swift_has_under_that_name(tmp_path: Path) -> None:
    config = load(SFTConfig, "fsdp: fsdp2", tmp_path)
    assert config.gradient_checkpointing
    assert config.fsdp_reshard_after_forward
    assert "fsdp: there is no file 'other.json'" in told(SFTConfig, "fsdp: other.json", tmp_path)


FSDP_FILE = {
    "_note": "a comment",
    "fsdp": "full_shard auto_wrap offload",
    "fsdp_config": {
        "fsdp_version": 2,
        "reshard_after_forward": False,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_ram_efficient_loading": True,
        "state_dict_type": "SHARDED_STATE_DICT",
        "activation_checkpointing": True,
        "activation_cpu_offload": True,
    },
}


def test_a_file_of_fsdp_is_read_as_ms_swift_reads_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "fsdp.json"
    file.write_text(json.dumps(FSDP_FILE))
    words = ["--fsdp", str(file)], ["--fsdp", json.dumps(FSDP_FILE)]
    for config in (load(SFTConfig, f"fsdp: {file}", tmp_path), *(load(SFTConfig, "", tmp_path, *two) for two in words)):
        assert config.fsdp_sharding_strategy == "full_shard"
        assert (config.fsdp_reshard_after_forward, config.fsdp_offload_params) == (False, True)
        assert config.gradient_checkpointing
    with caplog.at_level(logging.INFO):
        load(SFTConfig, f"fsdp: {file}", tmp_path)
    assert "fsdp_config.activation_cpu_offload (activations stay on the device" in caplog.text


@pytest.mark.parametrize(
    ("held", "why"),
    [
        ({"fsdp_config": {"fsdp_version": 1}}, "fsdp_config: fsdp_version: 1 is not supported"),
        ({"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}, "fsdp_sharding_strategy: HYBRID_SHARD is not"),
        ({"fsdp_config": {"min_num_params": 10}}, "fsdp_config: min_num_params: 10 is not supported"),
        ({"fsdp": "hybrid_shard"}, "fsdp hybrid_shard is not supported"),
        ({"num_processes": 2}, "fsdp: num_processes is not supported"),
        ([1], "must hold a mapping"),
    ],
)
def test_what_fsdp_here_cannot_do_is_refused_by_its_key(held: Any, why: str, tmp_path: Path) -> None:
    file = tmp_path / "fsdp.json"
    file.write_text(json.dumps(held))
    assert why in told(SFTConfig, f"fsdp: {file}", tmp_path)


def test_strategies_in_a_file_of_fsdp_are_ours(tmp_path: Path) -> None:
    held = {"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_backward_prefetch": "BACKWARD_PRE"}}
    config = load(SFTConfig, f"fsdp: {json.dumps(held)}", tmp_path)
    assert (config.fsdp_sharding_strategy, config.fsdp_reshard_after_forward) == ("full_shard", False)


def test_keys_of_checkpoints_and_caches(tmp_path: Path) -> None:
    config = load(SFTConfig, "save_total_limit: -1\ncached_dataset: [a, b]\ncached_val_dataset: c", tmp_path)
    assert (config.save_total_limit, config.dataset, config.eval_dataset) == (None, ["d", "a", "b"], ["c"])


def test_a_colocated_engine_in_parts_has_its_own_processes(tmp_path: Path) -> None:
    text = "use_vllm: true\nuse_ray: true\ncolocate_groups: [[train, rollout]]\ntrain: {gpus: 4}\n"
    groups = load(GRPOConfig, text + "rollout: {gpus: 4, vllm_tensor_parallel_size: 2}", tmp_path).device_groups
    assert groups == {"train": {"gpus": 4}, "rollout": {"shares_devices_with": "train"}}
    groups = load(GRPOConfig, text + "rollout: {gpus: 4, vllm_tensor_parallel_size: 1}", tmp_path).device_groups
    assert groups["colocate_groups"] == [["train", "rollout"]]


def test_the_engines_length_ends_completions_of_long_prompts(tmp_path: Path) -> None:
    text = "use_vllm: true\nvllm_max_model_len: 100\nmax_completion_length: 30\n"
    for length, prompt, clips in ((100, 99, True), (90, 90, True), (70, 70, False)):
        config = load(GRPOConfig, text + f"max_length: {length}", tmp_path)
        assert (config.max_prompt_length, config.vllm_clip_completions) == (prompt, clips)
    assert "has no room" in told(GRPOConfig, text + "max_prompt_length: 100", tmp_path)  # a name of ours


def test_the_default_template_writes_what_that_of_ms_swift_writes(tmp_path: Path) -> None:
    """By swift/template/templates/llm.py: prompt, system_prefix and chat_sep; the last answer ends with the token."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = load(SFTConfig, "template: default", tmp_path).chat_template

    def shown(*messages: dict[str, Any], **options: Any) -> str:
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
        return text.removeprefix(tokenizer.bos_token or "")

    asked = "You are a helpful assistant.\n\n### Human:\nq\n\n### Assistant:\n"
    assert shown(Q, add_generation_prompt=True) == asked
    assert shown(Q, said("a")) == f"{asked}a{tokenizer.eos_token}"
    turns = [{"role": "system", "content": "s"}, Q, said("a"), Q, said("b")]
    question = "### Human:\nq\n\n### Assistant:\n"
    assert shown(*turns) == f"s\n\n{question}a\n\n{question}b{tokenizer.eos_token}"
    assert "template is not supported" in told(SFTConfig, "template: qwen2_5", tmp_path)


def test_an_evaluation_has_as_many_batches_as_eval_iters_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "eval_iters: 3\nglobal_batch_size: 4\n"
    with caplog.at_level(logging.INFO):
        assert load(SFTConfig, text + "split_dataset_ratio: 0.1", tmp_path).max_eval_sequences == 12
        assert load(SFTConfig, text, tmp_path).max_eval_sequences is None
    assert "eval_iters (each evaluation has the first 12 sequences;" in caplog.text
    assert "eval_iters (there is no eval_dataset)" in caplog.text
    assert "eval_iters is not supported" in told(DPOConfig, text + "split_dataset_ratio: 0.1", tmp_path)


def test_positions_are_scaled_as_there(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    known = AutoConfig.from_pretrained(model)
    longest = 4 * known.max_position_embeddings - 1
    text = "defaults: ms-swift\nrope_scaling: yarn\n"
    kwargs = load(SFTConfig, text, tmp_path, "--model", model, "--max_model_len", str(longest)).model_init_kwargs
    scaled = AutoConfig.from_pretrained(model, **kwargs)
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": known.max_position_embeddings}
    assert scaled.rope_parameters == expected | {"rope_theta": known.rope_parameters["rope_theta"]}
    assert scaled.max_position_embeddings == longest
    rotation = build_model(
        model, dtype=torch.float32, device=torch.device("cpu"), model_init_kwargs=kwargs
    ).model.rotary_emb
    assert torch.equal(rotation.inv_freq, ROPE_INIT_FUNCTIONS["yarn"](scaled, torch.device("cpu"))[0])
    assert "needs a factor, or max_model_len" in told(SFTConfig, text, tmp_path, "--model", model)
    assert "for backend: fsdp" in told(SFTConfig, text, tmp_path, "--model", model, "--backend", "megatron")


def test_kernels_of_unsloth_are_a_matter_of_speed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert load(SFTConfig, "tuner_type: lora\ntuner_backend: unsloth", tmp_path).tuner_type == "lora"
    assert "tuner_backend (peft computes the adapter" in caplog.text
    assert "tuner_backend is not supported" in told(SFTConfig, "tuner_type: full\ntuner_backend: unsloth", tmp_path)


def test_muon_is_an_optimizer_of_ours(tmp_path: Path) -> None:
    found = load(SFTConfig, "defaults: ms-swift\noptimizer: muon\noptim_args: momentum=0.9", tmp_path)
    assert (found.optim, found.optim_kwargs, found.adam_beta2) == ("muon", {"momentum": 0.9}, 0.95)
    assert found.fsdp_sharding_strategy == "no_shard"
    assert "Write optimizer: muon" in told(SFTConfig, "optimizer: muonclip", tmp_path)
    with pytest.raises(ConfigError, match="muon needs whole weights"):
        load(SFTConfig, "optim: muon\nfsdp_sharding_strategy: full_shard", tmp_path)


def test_bits_without_a_method_and_an_adapter_beside_quantized_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert not load(SFTConfig, "defaults: ms-swift\ntuner_type: lora\nquant_bits: 4", tmp_path).quantization
    assert "quant_bits (without quant_method nothing is quantized, also in ms-swift)" in caplog.text
    text = "tuner_type: lora\nquant_method: bnb\nquant_bits: 4\nuse_vllm: true\nvllm_enable_lora: true"
    with caplog.at_level(logging.INFO):
        config = load(GRPOConfig, text + "\ndefaults: ms-swift", tmp_path)
    assert config.load_in_4bit
    assert not config.vllm_enable_lora
    assert "vllm_enable_lora (the engine gets the dequantized weights" in caplog.text
    with pytest.raises(ConfigError, match="vllm_enable_lora: the engine would use the adapter with weights that"):
        load(GRPOConfig, text + "\ndefaults: trl", tmp_path)


def test_a_loss_that_clips_nothing_reads_no_epsilon(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "loss_type: sapo\nepsilon: 0.1\nepsilon_high: 0.2\n"
    with caplog.at_level(logging.INFO):
        config = load(GRPOConfig, text + "defaults: ms-swift", tmp_path)
    assert (config.epsilon, config.epsilon_high) == (0.2, None)
    assert "epsilon, epsilon_high (loss_type sapo does not read it)" in caplog.text
    assert "has no effect" in told(GRPOConfig, text + "defaults: trl", tmp_path)


def test_workers_that_share_rows_leave_a_step_of_grpo_as_large_as_there(tmp_path: Path) -> None:
    """ms-swift multiplies accumulation by the workers that share rows, in GRPO alone."""
    text = "defaults: ms-swift\nsequence_parallel_size: 4\nper_device_train_batch_size: 8\n"
    config = load(GRPOConfig, text + "gradient_accumulation_steps: 2\nsteps_per_generation: 6", tmp_path)
    assert (config.gradient_accumulation_steps, config.steps_per_generation) == (8, 24)
    config = load(GRPOConfig, text, tmp_path)
    assert (config.gradient_accumulation_steps, config.steps_per_generation) == (4, None)
    config = load(GRPOConfig, text + "global_batch_size: 64", tmp_path)
    assert (config.gradient_accumulation_steps, config.global_batch_size) == (1, 64)
    assert load(SFTConfig, text + "gradient_accumulation_steps: 2", tmp_path).gradient_accumulation_steps == 2
    ours = load(GRPOConfig, text.replace("ms-swift", "trl") + "gradient_accumulation_steps: 2", tmp_path)
    assert ours.gradient_accumulation_steps == 2


def test_a_teacher_alone_judges_completions(tmp_path: Path) -> None:
    config = load(GRPOConfig, "teacher_model: t\nnum_generations: 1\nreward_funcs: []", tmp_path)
    assert (config.functions, config.num_rewards) == (["no_reward"], 1)
    assert "teacher_model that judges" in told(GRPOConfig, "reward_funcs: []", tmp_path)
    assert "at least 2" in told(GRPOConfig, "teacher_model: t\nnum_generations: 1", tmp_path)


def test_loss_scale_of_each_trainer(tmp_path: Path) -> None:
    assert load(SFTConfig, "loss_scale: last_round+ignore_empty_think", tmp_path).loss_scale is not None
    assert load(GKDConfig, "loss_scale: last_round\nteacher_model: t", tmp_path).lmbda is not None
    assert "loss_scale" in told(GKDConfig, "loss_scale: all\nteacher_model: t", tmp_path)
    weighted = load(SFTConfig, "loss_scale: last_round+hermes+react\nloss_type: loss_scale", tmp_path)
    assert (weighted.loss_scale, weighted.loss_type) == ("last_round+hermes+react", "nll")
    assert "Did you mean 'hermes'" in told(SFTConfig, "loss_scale: hermez", tmp_path)
    assert "no first token of an answer" in told(SFTConfig, "loss_scale: all+ignore_empty_think", tmp_path)
    assert "remove one of them" in told(SFTConfig, "loss_scale: all\nassistant_only_loss: true", tmp_path)
    assert "Did you mean 'last_round'" in told(SFTConfig, "loss_scale: last_rounds", tmp_path)


@pytest.mark.parametrize("kind", [DPOConfig, RewardConfig, KTOConfig, CPOConfig, SimPOConfig, ORPOConfig])
def test_packing_of_rows_needs_a_length(kind: type[Any], tmp_path: Path) -> None:
    config = load(kind, "packing: true\npacking_strategy: binpack", tmp_path)
    assert pack_length(config) == config.max_length == 1024
    assert micro_batch_tokens(config) == config.per_device_train_batch_size * config.max_length
    assert micro_batch_tokens(load(kind, "packing: true\ntoken_budget: 9", tmp_path)) == 9
    assert "packing needs max_length" in told(kind, "packing: true\nmax_length: null", tmp_path)
    assert "infer_batch_size is 2, but with packing" in told(
        kind, "packing: true\nbackend: megatron\ninfer_batch_size: 2", tmp_path
    )


def test_rows_that_are_joined_fill_no_packs(tmp_path: Path) -> None:
    config = load(SFTConfig, "packing: true\npacking_strategy: binpack", tmp_path)
    assert (config.packing_strategy, pack_length(config), micro_batch_tokens(config)) == ("bfd", None, "auto")


@pytest.mark.parametrize(("steps", "is_told"), [(1, False), (2, True)])
def test_gkd_says_that_its_mean_is_over_the_step(
    steps: int, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        load(GKDConfig, f"teacher_model: t\ndefaults: ms-swift\ngradient_accumulation_steps: {steps}", tmp_path)
    assert ("in ms-swift it is one per micro-batch" in caplog.text) is is_told


def test_packing_of_rows_that_ms_swift_does_not_pack_is_padding_free(tmp_path: Path) -> None:
    for kind, further in ((GKDConfig, "teacher_model: t"), (GRPOConfig, "reward_funcs: [accuracy]")):
        assert load(kind, f"packing: true\n{further}", tmp_path).padding_free
        assert not load(kind, f"packing: false\n{further}", tmp_path).padding_free
        assert "packing means padding_free: True, but padding_free is False" in told(
            kind, f"packing: true\npadding_free: false\n{further}", tmp_path
        )
    assert "write padding_free: true" in told(PPOConfig, "packing: true\nreward_model: r", tmp_path)


# Rows


@pytest.mark.parametrize(
    ("row", "ours"),
    [
        ({"query": "q", "response": "r"}, {"messages": [Q, said("r")]}),
        (
            {"query": "q2", "response": "r2", "history": [["q", "r"]], "system": "s"},
            {
                "messages": [
                    {"role": "system", "content": "s"},
                    Q,
                    said("r"),
                    {"role": "user", "content": "q2"},
                    said("r2"),
                ]
            },
        ),
        (
            {"instruction": "i", "input": "x", "output": "o"},
            {"messages": [{"role": "user", "content": "i\nx"}, said("o")]},
        ),
        ({"conversation": [{"human": "q", "assistant": "r"}]}, {"messages": [Q, said("r")]}),
        (
            {"question": "q", "answer": "4"},
            {"question": "q", "answer": "4", "messages": [Q, said("4")]},
        ),  # a reward reads it
        ({"query": "q", "solution": "4"}, {"solution": "4", "messages": [Q, said("4")]}),
        (
            {"messages": [Q, said("r")], "rejected_response": "b"},
            {"prompt": [Q], "chosen": [said("r")], "rejected": [said("b")]},
        ),
        (
            {"messages": [Q, said("r")], "rejected_messages": [Q, said("b")]},
            {"prompt": [Q], "chosen": [said("r")], "rejected": [said("b")]},
        ),
        (
            {"query": "q", "response": "r", "rejected_response": "b"},
            {"prompt": [Q], "chosen": [said("r")], "rejected": [said("b")]},
        ),
        ({"prompt": "p", "completion": "c"}, {"prompt": "p", "completion": "c"}),  # ours stay as they are
        ({"prompt": "p", "answer": "c"}, {"prompt": "p", "answer": "c"}),
    ],
)
def test_rows_of_ms_swift_are_rows_of_ours(row: dict[str, Any], ours: dict[str, Any]) -> None:
    assert load_rows([row])[0] == ours


def test_calls_of_tools_are_calls_of_the_assistant() -> None:
    turns = [Q, {"role": "tool_call", "content": '{"name": "f", "arguments": {"a": 1}}'}]
    turns += [{"role": "tool_response", "content": "2"}, said("two")]
    messages = load_rows([{"messages": turns}])[0]["messages"]
    assert messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]


def test_names_are_filled_into_rows_of_self_cognition() -> None:
    rows = load_rows([{"query": "q", "response": "{{NAME}} by {{AUTHOR}}", "tag": tag} for tag in ("zh", "en")])
    filled = with_names(rows, {"model_name": ["Zh", "En"], "model_author": ["A"]})
    assert [row["messages"][1]["content"] for row in filled] == ["Zh by A", "En by A"]
    assert with_names(rows, {"model_name": None, "model_author": None}) is rows


def test_rows_that_are_held_out_are_never_learned(tmp_path: Path) -> None:
    rows = [{"text": str(k)} for k in range(20)]
    parts = [Part(rows, 0.1, 7, is_held_out=is_held_out) for is_held_out in (True, False)]
    held, learned = (set(read_source(part)["text"]) for part in parts)
    assert (len(held), len(learned), held & learned) == (2, 18, set())
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{k}"}}\n' for k in range(10)))
    named = f"{tmp_path / 'a.jsonl'}#25"  # more than there are: those to learn come again
    counted = [read_source(Part([named], 0.2, 7, is_held_out=is_held_out))["text"] for is_held_out in (True, False)]
    assert (len(counted[0]), len(counted[1]), set(counted[0]) & set(counted[1])) == (2, 23, set())
    with pytest.raises(ValueError, match="leaves none of 1 rows"):
        read_source(Part([{"text": "x"}], 0.5, 7, is_held_out=False))


def test_every_trainer_reads_what_is_left_to_learn() -> None:
    for file in (ROOT / "trainers").glob("*/trainer.py"):
        text = file.read_text()
        assert "sampling" in str(file) or "config.dataset," not in text, f"{file} would learn from rows held out"
        assert "config.eval_dataset" not in text, f"{file} would not evaluate rows held out"


@pytest.mark.parametrize(
    ("scale", "learned"),
    [
        ("default", "<think>\n\n</think>\n\nyes<|im_end|>\nno<|im_end|>\n"),
        ("last_round", "no<|im_end|>\n"),
        ("ignore_empty_think", "yes<|im_end|>\nno<|im_end|>\n"),
        ("ignore_think_prefix", "\n</think>\n\nyes<|im_end|>\nno<|im_end|>\n"),
    ],
)
def test_loss_scale_chooses_tokens(scale: str, learned: str) -> None:
    tokenizer = tiny_tokenizer()
    rows = load_rows([{"messages": [Q, said("<think>\n\n</think>\n\nyes"), Q, said("no")]}])
    found = tokenize_sft(rows, tokenizer, max_length=None, loss_scale=parsed(scale))
    assert tokenizer.decode(found.input_ids.values[found.target_mask.values]) == learned


def test_packs_hold_at_most_their_length() -> None:
    lengths = np.array([5, 9, 3, 2, 12, 1])
    packs = packed(lengths, 10)
    assert sorted(np.concatenate(packs).tolist()) == list(range(6))
    assert [int(lengths[pack].sum()) for pack in packs] == [12, 10, 10]  # a longer row is a pack of its own
    batches = batches_of(lengths, 2, seed=0, shuffle=False, pack_length=10)
    assert (batches.steps_per_epoch, batches[0].tolist()) == (2, [4, 1, 5])
    assert batches_of(lengths, 2, seed=0, shuffle=False).steps_per_epoch == 3


def test_packs_are_filled_as_a_plain_loop_fills_them() -> None:
    random = np.random.default_rng(0)
    for most in (1, 30, 100):
        lengths = random.integers(1, 40, size=200)
        packs: list[list[int]] = []
        for row in sorted(range(200), key=lambda row: -lengths[row]):  # the longest first, rows of one length in order
            fitting = [pack for pack in packs if lengths[pack].sum() + lengths[row] <= most]
            if fitting:
                max(fitting, key=lambda pack: lengths[pack].sum()).append(row)
            else:
                packs.append([row])
        assert [pack.tolist() for pack in packed(lengths, most)] == packs


# Plugins

PLUGIN = """
from swift.dataset import DatasetMeta, RowPreprocessor, register_dataset
from swift.rewards import ORM, AsyncORM, PRM, orms, prms
from swift.rewards.rm_plugin import DefaultRMPlugin
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns
from swift.utils import get_logger

logger = get_logger()

class Right(ORM):
    def __call__(self, completions, solution, **columns):
        return [float(text == truth) for text, truth in zip(completions, solution)]

class Later(AsyncORM):
    async def __call__(self, completions, **columns):
        return [float(len(text)) for text in completions]

class Asked(PRM):
    def __call__(self, infer_requests, **columns):
        return [float(len(request["messages"])) for request in infer_requests]

class Scheduler(MultiTurnScheduler):
    pass

class Doubled(RowPreprocessor):
    def preprocess(self, row):
        return {"prompt": row["text"] * 2}

orms["swift_right"] = Right
orms["swift_later"] = Later
prms["swift_asked"] = Asked
multi_turns["s"] = Scheduler
register_dataset(DatasetMeta(dataset_path="ROWS", dataset_name="doubled", preprocess_func=Doubled()))

def made():
    return DefaultRMPlugin(None, None)
"""


@pytest.mark.parametrize("beside", ["nothing", "its sources alone"])
def test_plugins_written_for_ms_swift_are_taken_without_it(
    beside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if beside != "nothing":  # as in a clone of ms-swift, whose dependencies are not installed
        (tmp_path / "swift").mkdir()
        (tmp_path / "swift" / "__init__.py").write_text("import modelscope\n")
        monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "plugin.py").write_text(PLUGIN.replace("ROWS", str(tmp_path / "rows.jsonl")))
    with registries_restored():
        (module,) = load_plugins([tmp_path / "plugin.py"])
        assert "swift" not in sys.modules
        functions, _ = resolve_rewards(["swift_right", "swift_later", "swift_asked"])
        columns = {"solution": ["4", "4"]}
        rewards = score(functions, [[Q]] * 2, [[said("4")], [said("15")]], [[1], [1, 2]], columns)
        assert rewards.tolist() == [[1, 1, 2], [0, 2, 2]]
        assert read_source("doubled")[0] == {"prompt": "aa"}
        assert "doubled" in DATASETS
        with pytest.raises(NotImplementedError, match=r"swift.rewards.rm_plugin.DefaultRMPlugin is ms-swift's"):
            module.made()
