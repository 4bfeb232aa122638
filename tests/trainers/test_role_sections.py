"""Sections of roles: where they run becomes device groups, what else they say becomes the keys that they mean."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from rayhelper import ConfigError, DeviceGroups
from trainers.cli import load_config, placement
from trainers.gkd.config import GKDConfig
from trainers.gkd.trainer import GKDTrainer
from trainers.grpo.config import GRPOConfig
from trainers.grpo.trainer import GRPOTrainer
from trainers.ppo.config import PPOConfig
from trainers.ppo.trainer import PPOTrainer
from trainers.sampling.config import SamplingConfig

SIZES = {"train": {"gpus": 4}, "rollout": {"gpus": 4}}


def load(kind: type[Any], text: str, tmp_path: Path, *argv: str) -> Any:
    rewards = "" if kind in (GKDConfig, SamplingConfig) else "reward_funcs: [format]\n"
    model = "" if "model: s" in text else "model: m\n"
    (tmp_path / "x.yaml").write_text(f"{model}dataset: d\n{rewards}{text}\n")
    return load_config(kind, ["--config", str(tmp_path / "x.yaml"), *argv])


GRPO = "rollout: {gpus: 4}\n"
LIFTED: list[tuple[type[Any], str, dict[str, Any]]] = [
    (
        GRPOConfig,
        GRPO + "train: {gpus: 4, lr: 1e-5, tuner_type: lora, lora_rank: 4}",
        {"learning_rate": 1e-5, "lora_rank": 4},
    ),
    (GRPOConfig, GRPO + "output_dir: a\ntrain: {gpus: 4, output_dir: b}", {"output_dir": "b"}),
    (
        GRPOConfig,
        GRPO + "train: {gpus: 4, attention_backend: unfused}",
        {"model_init_kwargs": {"attn_implementation": "eager"}},
    ),
    (GRPOConfig, GRPO + "train: {gpus: 4, tensor_model_parallel_size: 1, sequence_parallel: true}", {}),
    (GRPOConfig, "train: {gpus: 4}\nrollout: {gpus: 4, top_p: 0.9, vllm_tensor_parallel_size: 1}", {"top_p": 0.9}),
    (
        GRPOConfig,
        "train: {gpus: 4}\nuse_vllm: true\nvllm_max_model_len: 900\n"
        "rollout: {gpus: 4, vllm_tensor_parallel_size: 2, vllm_max_model_len: 800, sleep_level: 1, "
        "vllm_kv_cache_dtype: fp8}",
        {"rollout_engine": "vllm", "vllm_tensor_parallel_size": 2, "vllm_max_model_len": 800, "sleep_level": 1}
        | {"vllm_engine_kwargs": {"kv_cache_dtype": "fp8"}},
    ),
    (
        GRPOConfig,  # the words of verl and siiRL
        "train: {gpus: 4}\nrollout: {gpus: 4, name: vllm, tensor_model_parallel_size: 2, gpu_memory_utilization: 0.5, "
        "max_num_batched_tokens: 64, enforce_eager: true, free_cache_engine: true, n: 4}",
        {"rollout_engine": "vllm", "vllm_tensor_parallel_size": 2, "vllm_gpu_memory_utilization": 0.5}
        | {"vllm_engine_kwargs": {"max_num_batched_tokens": 64}, "vllm_enforce_eager": True, "sleep_level": 1}
        | {"num_generations": 4},
    ),
    (GRPOConfig, "train: {gpus: 4}\nrollout: {gpus: 4, strategy_name: hf_infer}", {"rollout_engine": "hf"}),
    (GRPOConfig, "use_vllm: false\ntrain: {gpus: 4}\nrollout: {gpus: 4, use_vllm: true}", {"rollout_engine": "vllm"}),
    (GRPOConfig, "temperature: 0.7\ntrain: {gpus: 4}\nrollout: {gpus: 4, temperature: 0.7}", {"temperature": 0.7}),
    (GRPOConfig, "train: {gpus: 4, temperature: 0.7}\nrollout: {gpus: 4, temperature: 0.7}", {"temperature": 0.7}),
    (GRPOConfig, GRPO + "train: {gpus: 4, model: s}", {"model": "s"}),
    (
        GRPOConfig,
        GRPO + "tensor_model_parallel_size: 1\ntrain: {gpus: 4, backend: megatron, tensor_model_parallel_size: 2}",
        {"backend": "megatron", "tensor_model_parallel_size": 2},
    ),
    (
        GRPOConfig,  # a section may repeat what holds for all roles, before that of train too
        GRPO + "backend: megatron\nreference: {gpus: 4, context_parallel_size: 2}\ntrain: {gpus: 4, "
        "context_parallel_size: 2}",
        {"context_parallel_size": 2},
    ),
    (
        GRPOConfig,  # the form of ROLL
        "train: {gpus: 4, strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: "
        "2, use_distributed_optimizer: true}}, infer_batch_size: 3}\nrollout: {gpus: 4, strategy_args: {strategy_name: "
        "vllm, strategy_config: {gpu_memory_utilization: 0.5}}}\nreference: {gpus: 4, strategy_args: {strategy_name: "
        "megatron_infer, strategy_config: {tensor_model_parallel_size: 2}}}",
        {"backend": "megatron", "tensor_model_parallel_size": 2, "infer_batch_size": 3}
        | {"rollout_engine": "vllm", "vllm_gpu_memory_utilization": 0.5},
    ),
    (GRPOConfig, "train: {gpus: 4}\nrollout: {gpus: 4, infer_batch_size: 3}", {"rollout_batch_size": 3}),
    (GRPOConfig, "train: {gpus: 4}\nrollout: {gpus: 4, stop_token_ids: [3]}", {"stop_token_ids": [3]}),
    (GRPOConfig, GRPO + "train: {gpus: 4, strategy_args: {strategy_name: fsdp2_train}}", {"backend": "fsdp"}),
    (GKDConfig, GRPO + "train: {gpus: 4}\ngkd_logits_topk: 64\nteacher: {gpus: 2, model: t}", {"teacher_model": "t"}),
    (GKDConfig, GRPO + "train: {gpus: 4}\nteacher: {gpus: 2, model: t, gkd_logits_topk: 8}", {"gkd_logits_topk": 8}),
    (
        PPOConfig,
        GRPO + "train: {gpus: 4, lr: 1}\ncritic: {gpus: 4, lr: 2}",
        {"learning_rate": 1.0, "value_learning_rate": 2.0},
    ),
    (
        SamplingConfig,
        "sampler: {gpus: 1, temperature: 0.5}\nprm: {gpus: 1, model: p}",
        {"temperature": 0.5, "prm_model": "p"},
    ),
]


@pytest.mark.parametrize(("kind", "text", "keys"), LIFTED, ids=[text.replace("\n", ", ")[:70] for _, text, _ in LIFTED])
def test_a_key_of_a_section_is_the_runs_key_that_it_means(
    kind: type[Any], text: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    found = load(kind, text, tmp_path)
    assert {name: getattr(found, name) for name in keys} == keys
    for section in found.device_groups.values():
        assert list(section) == ["gpus"]


def test_a_role_may_have_processes_of_its_own_on_the_devices_of_another(tmp_path: Path) -> None:
    text = "train: {gpus: 4, lr: 1}\nrollout: {shares_devices_with: train, top_p: 0.9}"
    found = load(GRPOConfig, text, tmp_path)
    assert (found.top_p, found.learning_rate) == (0.9, 1.0)
    groups = placement(GRPOTrainer, found)
    assert groups.group_of("rollout").shares_devices_with == "train"
    assert groups.share_devices("rollout", "reference")
    written = load(GRPOConfig, "train: {gpus: 4}", tmp_path, "--rollout.shares_devices_with", "train")
    assert written.device_groups == {"train": {"gpus": 4}, "rollout": {"shares_devices_with": "train"}}


def test_the_role_that_shares_its_devices_may_have_another_systems_name(tmp_path: Path) -> None:
    found = load(PPOConfig, "default: {gpus: 2}\ncritic: {gpus: 2}\nrollout: {shares_devices_with: default}", tmp_path)
    assert placement(PPOTrainer, found).group_of("rollout").shares_devices_with == "train"


def test_the_command_line_wins_over_a_section_and_may_write_one(tmp_path: Path) -> None:
    text = GRPO + "train: {gpus: 4, output_dir: a, lr: 1}"
    assert load(GRPOConfig, text, tmp_path, "--output_dir", "b").output_dir == "b"
    found = load(GRPOConfig, text, tmp_path, "--train.learning_rate", "2", "--train.output_dir", "c")
    assert (found.learning_rate, found.output_dir) == (2.0, "c")
    found = load(GRPOConfig, "lr: 1\n" + GRPO + "train: {gpus: 4}", tmp_path, "--train.lr", "3")
    assert (found.learning_rate, found.device_groups) == (3.0, SIZES | {})


def test_device_groups_on_the_command_line_replaces_where_roles_run_and_no_other_key(tmp_path: Path) -> None:
    text = (
        "colocate_groups: [[train, rollout]]\ntrain: {gpus: 4, tuner_type: lora, lora_rank: 4, env: {A: b}}\n"
        "rollout: {gpus: 4, vllm_max_model_len: 800}\nuse_vllm: true\nteacher: {gpus: 4, model: t}"
    )
    groups = '{"all": {"device": "CPU", "ranks": 2, "workers": ["train", "rollout", "teacher"]}}'
    argv = ["--device_groups", groups, "--teacher.model", "other", "--rollout.top_p", "0.9"]
    found = load(GRPOConfig, text, tmp_path, *argv)
    assert (found.tuner_type, found.lora_rank, found.vllm_max_model_len) == ("lora", 4, 800)
    assert (found.teacher_model, found.top_p) == ("other", 0.9)
    assert [group.name for group in placement(GRPOTrainer, found).groups] == ["all"]
    spoken_first = load(GRPOConfig, text, tmp_path, "--teacher.model", "other", "--device_groups", groups)
    assert spoken_first.teacher_model == "other"


def test_a_section_without_devices_may_stand_beside_device_groups(tmp_path: Path) -> None:
    groups = "device_groups: {all: {device: CPU, ranks: 2, workers: [train, rollout, teacher]}}\n"
    assert load(GRPOConfig, groups + "teacher: {model: t}", tmp_path).teacher_model == "t"
    argv = ["--device_groups", groups.removeprefix("device_groups: "), "--teacher.model=t"]
    found = load(GRPOConfig, "", tmp_path, *argv)
    assert found.teacher_model == "t"


def test_the_command_line_cannot_say_in_two_ways_where_roles_run(tmp_path: Path) -> None:
    groups = '{"all": {"device": "CPU", "ranks": 2, "workers": ["train", "rollout"]}}'
    with pytest.raises(ConfigError, match="command line: device_groups and train both set where roles run"):
        load(GRPOConfig, "train: {gpus: 2}", tmp_path, "--device_groups", groups, "--train.gpus", "1")


REFUSED: list[tuple[str, list[str]]] = [
    ("train: {gpus: 4, lerning_rate: 1}", ["unknown key lerning_rate", "did you mean learning_rate?"]),
    ("train: {gpus: 4, lr: 1, learning_rate: 2}", ["section 'train' sets learning_rate twice", "lr"]),
    ("train: {gpus: 4}\nrollout: {gpus: 4, timeot_s: 3}", ["section rollout", "did you mean timeout_s?"]),
    (
        "train: {gpus: 4, temperature: 1.0}\nrollout: {gpus: 4, temperature: 0.9}",
        ["sections 'train' and 'rollout' disagree on temperature (1.0 and 0.9)", "Write it once"],
    ),
    (
        "temperature: 1.0\ntrain: {gpus: 4}\nrollout: {gpus: 4, temperature: 0.9}",
        ["temperature: 0.9", "the top level 1.0"],
    ),
    ("train: {gpus: 4, top_p: 0.9}", ["section 'train' has top_p, which role rollout reads"]),
    ("train: {gpus: 4}\nrollout: {gpus: 4, lr: 1}", ["section 'rollout' has lr, which role rollout does not read"]),
    (
        "backend: megatron\nreference: {gpus: 4, tensor_model_parallel_size: 2}\ntrain: {gpus: 4}",
        ["section 'reference' has tensor_model_parallel_size: 2, and role train 1", "Write it once, at the top level"],
    ),
    (
        "train: {gpus: 4, strategy_name: megatron_train}\nreference: {gpus: 4, strategy_name: hf_infer}",
        ["section 'reference' has backend: fsdp, and role train megatron"],
    ),
    ("train: {gpus: 4, strategy_name: megatron_infer}", ["role train is trained. Write megatron_train"]),
    ("train: {gpus: 4, strategy_name: hf_infer}", ["role train is trained. Write fsdp2_train"]),
    ("strategy_args: {strategy_name: megatron_infer}", ["the model is trained. Write megatron_train"]),
    ("reference: {gpus: 4, strategy_name: megatron_train}", ["role reference only scores. Write megatron_infer"]),
    ("train: {gpus: 4, strategy_name: megatron_trian}", ["did you mean megatron_train?", "fsdp2_train"]),
    ("train: {gpus: 4, strategy_args: megatron_train}", ["strategy_args must be a mapping", "'megatron_train'"]),
    ("train: {gpus: 4, strategy_args: {strategy: a}}", ["strategy_args holds strategy", "strategy_config are read"]),
    (
        "train: {gpus: 4, context_parallel_size: 1, strategy_args: {strategy_config: {context_parallel_size: 2}}}",
        ["context_parallel_size is 1, and 2 in strategy_args"],
    ),
    (
        "backend: fsdp\nstrategy_args: {strategy_name: megatron_train}",
        ["backend is fsdp, and megatron by the strategy"],
    ),
    (
        "use_vllm: true\ntrain: {gpus: 4, vllm_kv_cache_dtype: fp8}",
        ["section 'train' has vllm_kv_cache_dtype, which role rollout reads"],
    ),
    (
        "train: {gpus: 4}\nrollout: {gpus: 4, name: sglang}",
        ["rollout_engine must be one of hf, vllm, auto, got 'sglang'"],
    ),
    ("train: {gpus: 4}\nrollout: {gpus: 4, vllm_enforce_eager: true}", ["needs rollout_engine: vllm, but it is hf"]),
    ("train: {gpus: 4}\nrollout: {gpus: 4, enable_thinking: true}", ["enable_thinking holds for all roles; move it"]),
    ("train: {gpus: 4}\nteacher: {gpus: 4, model: a}\nteacher_model: b", ["'teacher' has model: a", "top level b"]),
]


@pytest.mark.parametrize(("text", "words"), REFUSED, ids=[text.replace("\n", ", ")[:70] for text, _ in REFUSED])
def test_a_section_that_says_what_its_role_cannot_mean_is_refused(text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(GRPOConfig, text, tmp_path)
    for word in words:
        assert word in str(error.value)


OF_VLLM = "vllm_max_model_length: 2048, vllm_tensor_parallel_size: 2, vllm_engine_kwargs: {max_logprobs: 64}"
GKD = "rollout: {gpus: 4}\ntrain: {gpus: 4}\ngkd_logits_topk: 8\n"


def test_what_a_teacher_is_told_of_vllm_is_for_an_engine_of_its_own(tmp_path: Path) -> None:
    found = load(GKDConfig, f"{GKD}teacher: {{gpus: 4, model: t, {OF_VLLM}}}", tmp_path)
    assert (found.rollout_engine, found.teacher_engine, found.teacher_model) == ("hf", "vllm", "t")
    assert (found.vllm_max_model_len, found.vllm_engine_kwargs) == (None, {})
    assert found.teacher_engine_kwargs == {"max_model_len": 2048, "tensor_parallel_size": 2, "max_logprobs": 64}
    argv = ["--teacher.vllm_max_num_seqs", "4", "--teacher.vllm_tensor_parallel_size=1"]
    found = load(GKDConfig, f"{GKD}teacher: {{gpus: 4, model: t, {OF_VLLM}}}", tmp_path, *argv)
    assert found.teacher_engine_kwargs == {"max_model_len": 2048, "max_num_seqs": 4, "max_logprobs": 64}
    one = load(GKDConfig, f"{GKD}teacher: {{gpus: 4, model: t, vllm_tensor_parallel_size: 1}}", tmp_path)
    assert (one.teacher_engine, one.teacher_engine_kwargs) == ("vllm", {})


@pytest.mark.parametrize(
    ("kind", "more", "reason"),
    [
        (GKDConfig, ["--use_vllm=false"], "use_vllm is false"),
        (GKDConfig, ["--teacher.use_vllm=false"], "use_vllm is false"),
        (GKDConfig, ["--teacher_engine=hf"], "teacher_engine is hf"),
        (GRPOConfig, [], "this trainer's teacher does not use vLLM"),
    ],
)
def test_a_teacher_without_vllm_passes_over_what_it_is_told_of_it(
    kind: type[Any], more: list[str], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = f"{GKD if kind is GKDConfig else GRPO + 'train: {gpus: 4}'}\nteacher: {{gpus: 4, model: t, {OF_VLLM}}}"
    with caplog.at_level(logging.INFO):
        found = load(kind, text, tmp_path, *more)
    assert found.teacher_model == "t"
    assert getattr(found, "teacher_engine_kwargs", {}) == {}
    assert "teacher.vllm_engine_kwargs" in caplog.text
    assert f"({reason})" in caplog.text


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("vllm_pipeline_parallel_size: 2", "vllm_pipeline_parallel_size is not supported"),
        ("vllm_server_port: 8000", "vllm_server_port is not supported"),
        ("vllm_engine_kwargs: 5", "vllm_engine_kwargs must be a mapping, got 5"),
        ("vllm_engine_kwargs: {max_logprobs: 4}", "max_logprobs=4 is below gkd_logits_topk=8"),
        ("vllm_max_num_seqs: 3, vllm_engine_kwargs: {max_num_seqs: 4}", "remove one of them"),
    ],
)
def test_what_no_engine_of_a_teacher_can_be_told_is_refused(said: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        load(GKDConfig, f"{GKD}teacher: {{gpus: 4, model: t, {said}}}", tmp_path)


def test_a_teacher_without_a_section_lives_with_train(tmp_path: Path) -> None:
    text = "teacher_model: t\ncolocate_groups: [[train, rollout]]\ntrain: {cpus: 2}\nrollout: {cpus: 2}"
    groups = placement(GKDTrainer, load(GKDConfig, text, tmp_path))
    assert [group.roles for group in groups.groups] == [("train", "rollout", "teacher")]
    apart = DeviceGroups.parse(
        load(GKDConfig, text + "\nteacher: {cpus: 1}\ngkd_logits_topk: 8", tmp_path).device_groups
    )
    assert [group.roles for group in apart.groups] == [("train", "rollout"), ("teacher",)]
