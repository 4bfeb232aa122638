"""Whole runs of every trainer with ``backend: megatron``: the numbers of ``backend: fsdp``, wherever roles run.

Completions are drawn by each worker of role rollout, so that runs are compared with runs of as many of these. Adam's
epsilon is above the rounding errors of gradients: weights do not move by the sign of one.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification

from rayhelper import ConfigError, RayHelper
from rayhelper.roles.runtime import state
from tests.backends.ranks import run_ranks
from tests.backends.test_megatron import save
from tests.conftest import RaySession
from tests.e2e import runs
from tests.e2e.runs import TEXTS, final_bytes, final_weights, lines, together
from tests.e2e.test_vllm_runs import ROLES, VLLM, LedgerTrainer, assert_same_numbers, greedy_config
from tests.golden.test_classification import LABELS, SETTINGS, classifier, plain_loop, rows_of, templated
from tests.golden.test_classification import TEXTS as TO_CLASSIFY
from tests.golden.tiny import save_tiny, tiny_tokenizer
from tests.golden.training import OUR_ARGUMENTS
from tests.rayhelper.test_torchrun import torchrun
from tests.trainers.test_checkpoint import cut, flip_a_bit
from tests.trainers.test_reward_models import save_reward_model
from trainers.backends.offload import Offload
from trainers.batch import Ragged, Rollouts
from trainers.checkpoint import newest
from trainers.classification.trainer import ClassificationTrainer
from trainers.cli import run
from trainers.configuration.shared import changed
from trainers.cpo.trainer import CPOTrainer
from trainers.dpo.trainer import DPOTrainer
from trainers.gkd.trainer import GKDTrainer
from trainers.grpo.config import GRPOConfig
from trainers.grpo.trainer import GRPOTrainer
from trainers.kto.trainer import KTOTrainer
from trainers.parts.generator import Pending
from trainers.ppo.trainer import PPOTrainer
from trainers.reward.trainer import RewardTrainer
from trainers.sft.trainer import SFTTrainer

pytestmark = pytest.mark.xdist_group("megatron")  # all look at what a few starts of processes left behind

ROOT = Path(__file__).resolve().parents[2]
TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
VPP, EP = "virtual_pipeline_model_parallel_size", "expert_model_parallel_size"
Keys = dict[str, Any]
Wanted = dict[str, tuple[str, Keys]]  # by the name of a run, its case, and what it has beyond that

FSDP: Keys = {"backend": "fsdp"}
OVERLAP: Keys = {"overlap_grad_reduce": True, "overlap_param_gather": True}
RESTING: Keys = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
LAYOUTS: dict[str, Keys] = {
    "fsdp": FSDP,
    "tp": {TP: 2},
    "pp": {PP: 2},
    "cp": {CP: 2},
    "vpp": {PP: 2, VPP: 2},
    "ep": {EP: 2},
    "tp resting": {TP: 2} | RESTING,
    "pp resting": {PP: 2} | RESTING,
    "tp pp": {TP: 2, PP: 2},  # of four workers from here on
    "tp dp": {TP: 2} | OVERLAP,
    "pp ep": {PP: 2, EP: 2},
}


@RayHelper.worker(group=ROLES)
class UnlikeTrainer(GRPOTrainer):
    """Whose engine says other log-probabilities of its tokens than the training code would, as vLLM's do."""

    def __init__(self, config: GRPOConfig) -> None:
        super().__init__(config)
        finished = self.generator.finished

        def unlike(pending: Pending) -> Rollouts:
            rollouts = finished(pending)
            said = rollouts.rollout_logps
            off = 0.1 * np.sin(rollouts.completion_ids.values).astype(said.values.dtype)
            return replace(rollouts, rollout_logps=Ragged(said.values + off, said.offsets))

        self.generator.finished = unlike  # type: ignore[method-assign]


UNDER_TEST: dict[str, Any] = {
    "sft": SFTTrainer,
    "dpo": DPOTrainer,
    "kto": KTOTrainer,
    "orpo": CPOTrainer,
    "reward": RewardTrainer,
    "classification": ClassificationTrainer,
    "ppo": PPOTrainer,
    "grpo": GRPOTrainer,
    "gkd": GKDTrainer,
    "unlike": UnlikeTrainer,
}
ON_CPU: Keys = {"external_plugins": ["tests.megatron_on_cpu"]}
GREEDY: Keys = {"top_k": 1}  # alike for any number of workers
OWN_PROMPTS = [{"prompt": text[:6], "teacher_prompt": text, "completion": text[6:]} for text in TEXTS]
CLIP_COV = {"loss_type": "clip_cov", "clip_cov_ratio": 0.5, "clip_cov_lb": -1.0}
EVEN = {"reward_funcs": ["tests.e2e.runs.evenness"], "reward_weights": None}  # none is negative
KL_COV = {"loss_type": "kl_cov", "kl_cov_ratio": 0.5}
GMPO = {"loss_type": "gmpo", "epsilon": 0.05}
GEOMETRIC = {"rollout_importance_sampling_clip_min": 0.99, "rollout_importance_sampling_clip_max": 1.01}
MULTI = "multi_label_classification"
CLASSES: Keys = OUR_ARGUMENTS | SETTINGS | {"problem_type": MULTI, "num_labels": 3, "eval_steps": 3}
CLASSES |= {"dataset": rows_of(MULTI, LABELS[MULTI]), "eval_dataset": rows_of(MULTI, LABELS[MULTI])}
CLASSES |= {"lr_scheduler_type": "linear", "weight_decay": 0.0, "save_steps": 2}
CLASSES |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 3, "global_batch_size": 4}
WEIGHTED = {"loss_scale": "react", "dataset": [{"text": f"Action: {text} Thought: {text}"} for text in TEXTS]}
CASES: Wanted = {  # trainer and keys
    "sft": ("sft", {"eval_dataset": [{"text": "no one"}], "max_steps": 3, "warmup_steps": 2}),
    "sft, saved": ("sft", {"max_steps": 3, "save_steps": 1, "new_special_tokens": ["<new>"]}),
    "sft of experts": ("sft", {}),
    "sft, adapter": ("sft", {"tuner_type": "lora", "lora_rank": 4, **WEIGHTED}),  # drawn anew
    "dpo": ("dpo", {"max_steps": 3, "sync_ref_model": True, "ref_model_sync_steps": 2, "rpo_alpha": 0.5}),
    "dpo precomputed": ("dpo", {"precompute_ref_log_probs": True, "use_weighting": True}),
    "kto": ("kto", {"desirable_weight": 0.7, "packing": True, "max_length": 100}),
    "orpo": ("orpo", {}),
    "reward": ("reward", {"center_rewards_coefficient": 0.1}),
    "reward of a language model": ("reward", {}),  # the head is drawn anew
    "classes": ("classification", CLASSES),
    "classes, adapter": ("classification", CLASSES | {"tuner_type": "lora", "lora_rank": 4}),
    "ppo": ("ppo", {}),
    "ppo of a language model": ("ppo", {"value_model": None}),  # the critic's head is
    "grpo": (  # two generations, each learnt from twice; the second has another policy, and another reference
        "grpo",
        {"max_steps": 4, "entropy_coef": 0.01, "sync_ref_model": True, "ref_model_sync_steps": 2},
    ),
    "grpo of experts": ("grpo", {"beta": 0.0}),
    "gmpo, opo": ("grpo", GMPO | {"advantage_estimator": "opo"}),
    "gpg": ("grpo", {"loss_type": "gpg", "advantage_estimator": "gpg", "beta": 0.0}),
    "dppo_tv, remax": ("grpo", {"loss_type": "dppo_tv", "epsilon": 0.01, "advantage_estimator": "remax"}),
    "clip_cov, pass_at_k": ("grpo", CLIP_COV | {"advantage_estimator": "pass_at_k", "pass_k": 2} | EVEN),
    "kl_cov, grpo_passk": (
        "grpo",
        {"loss_type": "kl_cov", "kl_cov_ratio": 0.5, "advantage_estimator": "grpo_passk"} | EVEN,
    ),
    "geometric": ("unlike", GEOMETRIC | {"rollout_importance_sampling_mode": "geometric_truncate"}),
    "rejection": ("unlike", {"rollout_rejection": "sequence_mean_k1", "rollout_rejection_max": 1.01}),
    "rejection of tokens": ("unlike", {"rollout_rejection": "token_k3", "rollout_rejection_max": 0.005}),
    "gkd": ("gkd", {}),
    "gkd top": ("gkd", {"gkd_logits_topk": 6, "seq_kd": True, "sft_alpha": 0.0, **GREEDY}),
    "gkd offloaded": ("gkd", {"offload_teacher_model": True}),
    "opsd": ("gkd", {"teacher_model": None, "dataset": OWN_PROMPTS, "eval_dataset": OWN_PROMPTS[:3]}),
    "opsd top": (
        "gkd",
        {
            "teacher_model": None,
            "dataset": OWN_PROMPTS,
            "eval_dataset": OWN_PROMPTS[:3],
            "gkd_logits_topk": 6,
            **GREEDY,
        },
    ),
}
METHODS = [case for case in CASES if "loss_type" in CASES[case][1] or CASES[case][0] == "unlike"]
# Every trainer in some layout, every layout with some trainer: what a layout does to a step is in tests/backends
IN_PARTS = {"gmpo, opo": "cp", "clip_cov, pass_at_k": "tp", "geometric": "pp"}  # sequences, workers, engine's tokens
BY_TWO: dict[str, list[str]] = {
    "sft": ["cp", "vpp", "tp resting"],
    "sft of experts": ["ep"],
    "dpo": ["pp resting"],
    "dpo precomputed": ["tp"],
    "kto": ["pp"],
    "orpo": ["cp"],
    "sft, adapter": ["tp"],
    "reward": ["tp"],
    "reward of a language model": ["pp"],
    "classes": ["cp"],
    "classes, adapter": ["pp"],
    "ppo": ["cp"],
    "ppo of a language model": ["tp"],
    "grpo": ["tp", "pp resting"],
    "grpo of experts": ["ep"],
    **{case: [IN_PARTS[case]] if case in IN_PARTS else [] for case in METHODS},
    "gkd": ["cp"],
    "gkd top": [],
    "gkd offloaded": ["tp resting"],
    "opsd": ["pp"],
    "opsd top": ["tp"],
}
BY_FOUR: dict[str, list[str]] = {
    "sft": ["tp pp", "tp dp"],
    "sft of experts": ["pp ep"],
}
BY_ONE = ["sft", "grpo"]  # with megatron too


def two_groups(first: list[str], second: list[str], size: int = 2) -> Keys:
    """Two processes of torchrun that host the one, and ``size`` further ones that host the other roles."""
    return {
        "device_groups": {
            "first": {"device": "GPU", "ranks": [0, 1], "workers": first},  # invented ones: CPUs have no ranks
            "second": {"device": "GPU", "ranks": [2, 3][:size], "workers": second},
        }
    }


APART: Wanted = {  # the case whose numbers they have, and where roles and layouts are others
    "ppo, critic and reference apart": (
        "ppo",
        two_groups(["train", "rollout", "reward"], ["critic", "reference"]) | {PP: 2},
    ),
    "grpo, reference and engines apart": (
        "grpo",
        two_groups(["train", "teacher", "reward"], ["reference", "rollout"]) | {PP: 2},
    ),
    "gkd top, teacher apart": ("gkd top", two_groups(["train", "rollout"], ["teacher"]) | {PP: 2}),
}
BALANCE: Keys = {"megatron": {"moe_aux_loss_coeff": 0.05, "moe_router_load_balancing_type": "seq_aux_loss"}}
BALANCED: Wanted = {f"balanced {name}": ("sft of experts", LAYOUTS[name] | BALANCE) for name in ("ep", "pp")}
ENGINE = two_groups(["train", "reference", "teacher", "reward"], ["rollout"], size=1)
ONE_ENGINE: Wanted = {"grpo pp, engine apart": ("grpo", ENGINE | {PP: 2})}
ENGINE_OF_RAY = {
    "megatron learner": {"device": "CPU", "ranks": 2, "workers": ["train", "reference", "teacher", "reward"]},
    "engine": {"device": "CPU", "ranks": 1, "workers": ["rollout"]},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The teacher's vocabulary has a padding token more, so that its shards begin elsewhere; "padding" is a tokenizer
    that pads with the end."""
    folder = tmp_path_factory.mktemp("models")
    experts = save("qwen3_moe", folder, vocab_size=260, pad_token_id=0, eos_token_id=2)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(experts)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder / "padding")
    return {
        "policy": save_tiny(folder / "policy"),
        "deep": save_tiny(folder / "deep", num_hidden_layers=4),  # whose stages have several layers
        "teacher": save_tiny(folder / "teacher", seed=1, vocab_size=261),
        "classifier": classifier(str(folder / "policy"), folder / "classifier", 3),
        "judge": save_reward_model(folder / "judge"),
        "experts": str(experts),
        "padding": str(folder / "padding"),
    }


def config_of(case: str, models: dict[str, str], folder: Path, keys: Keys) -> Any:
    """Two steps at once at the whole learning rate, where a case says nothing else."""
    trainer, own = CASES[case]
    trainer = "grpo" if trainer == "unlike" else trainer
    named = {"reward": "judge", "sft": "deep", "classes": "classifier"}
    model = models["experts" if case.endswith("of experts") else named.get(case, "policy")]
    settings: Keys = {"max_steps": 2, "warmup_steps": 0, "adam_epsilon": 1e-4, "backend": "megatron"}
    if trainer == "grpo":
        settings["generation_batch_size"] = 8  # which two steps learn from
    if trainer == "gkd":
        settings |= {"teacher_model": models["teacher"], "lmbda": 0.7}  # one step is on-policy, the other is not
    if trainer == "reward":
        settings["tokenizer"] = models["padding"]
    if trainer == "ppo":
        settings["value_model"] = models["judge"]
    return getattr(runs, f"{trainer}_config")(model, folder, **settings | own | keys)


class Runs:
    """Runs of so many processes that are as torchrun's; those of a trainer run when one of them is first asked for."""

    def __init__(self, num_processes: int, wanted: Wanted, models: dict[str, str], folder: Path) -> None:
        self._num_processes, self._wanted, self._models, self._folder = num_processes, wanted, models, folder
        self._begun: set[str] = set()

    def __call__(self, name: str) -> Path:
        """The folder of the run of that name."""
        trainer = self._trainer(name)
        if trainer not in self._begun:
            self._begun.add(trainer)  # once, though it fails: others then miss their files at once
            self._run({name: one for name, one in self._wanted.items() if self._trainer(name) == trainer})
        return self._folder / name

    def _trainer(self, name: str) -> str:
        case, _ = self._wanted[name]
        return CASES[case][0]

    def _run(self, wanted: Wanted) -> None:
        jobs = [
            (CASES[case][0], config_of(case, self._models, self._folder / name, keys))
            for name, (case, keys) in wanted.items()
        ]
        # As torchrun's agent does: a store of process 0 may end while others come back to it for the next run
        store = torch.distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )  # as torchrun's agent
        run_ranks(
            self._num_processes, process, self._num_processes, store.port, jobs, folder=self._folder, joined=False
        )


def process(rank: int, num_processes: int, port: int, jobs: list[tuple[str, Any]]) -> None:
    """What each process does. Memory of the CPU is given back as that of a GPU is: what is away cannot be read."""
    from tests import megatron_on_cpu

    megatron_on_cpu.install()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
    place |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update({name: str(value) for name, value in place.items()})
    with patch.object(Offload.__init__, "__defaults__", ("cpu", 2**20)):
        for trainer, config in jobs:
            run(UNDER_TEST[trainer], config)
            megatron_on_cpu.end_groups()


@pytest.fixture(scope="module")
def by_one(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    wanted = {f"{case} {name}": (case, keys) for case in BY_ONE for name, keys in (("fsdp", FSDP), ("alone", {}))}
    wanted |= {f"{case} fsdp": (case, FSDP) for case in METHODS}
    return Runs(1, wanted, models, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def by_two(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    wanted = {f"{case} {name}": (case, LAYOUTS[name]) for case in BY_TWO for name in ("fsdp", *BY_TWO[case])}
    wanted["sft, saved tp"] = ("sft, saved", LAYOUTS["tp"])
    return Runs(2, wanted | BALANCED, models, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def by_four(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    wanted = {f"{case} {name}": (case, LAYOUTS[name]) for case in BY_FOUR for name in BY_FOUR[case]}
    return Runs(4, wanted | APART | ONE_ENGINE, models, tmp_path_factory.mktemp("four"))


def assert_same_run(found: Path, expected: Path, tolerance: float = 1e-5) -> None:
    """All metrics of all steps, evaluations too, and the weights after them."""
    assert all(line["grad_norm"] > 1e-3 for line in lines(expected) if "loss" in line)
    for ours, theirs in zip(lines(found), lines(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance), found.name
    weights = final_weights(found)
    for name, weight in final_weights(expected).items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=tolerance, msg=lambda m: f"{found.name}: {m}")


@pytest.mark.parametrize("case", [case for case in BY_TWO if BY_TWO[case]])
def test_two_workers_give_the_numbers_of_fsdp(case: str, by_two: Runs) -> None:
    for layout in BY_TWO[case]:
        assert_same_run(by_two(f"{case} {layout}"), by_two(f"{case} fsdp"))


@pytest.mark.parametrize("case", METHODS)
def test_a_method_gives_two_workers_the_numbers_of_one(case: str, by_two: Runs, by_one: Runs) -> None:
    found, expected = by_two(f"{case} fsdp"), by_one(f"{case} fsdp")
    assert_same_run(found, expected)
    if CASES[case][0] == "unlike":
        first = lines(expected)[0]
        assert first["sampling/sampling_logp_difference/max"] > 0.05
        assert ("rejection" in case) == (0 < first.get("sampling/rejected_tokens", 0.0) < 1)


def test_a_run_that_balances_experts_logs_it_and_does(by_two: Runs) -> None:
    found, other = (by_two(name) for name in BALANCED)
    assert_same_run(found, other)
    plain, steps = lines(by_two("sft of experts ep")), [line for line in lines(found) if "loss" in line]
    assert all("moe_aux_loss" in line and "moe_z_loss" not in line for line in steps)
    assert not any("moe_aux_loss" in line for line in plain)
    routers, unbalanced = final_weights(found), final_weights(by_two("sft of experts ep"))
    apart = [float((routers[name] - unbalanced[name]).abs().max()) for name in routers if ".mlp.gate." in name]
    assert apart
    assert min(apart) > 1e-4


@pytest.mark.parametrize("case", BY_FOUR)
def test_four_workers_give_the_numbers_of_fsdp(case: str, by_four: Runs, by_two: Runs) -> None:
    for layout in BY_FOUR[case]:
        assert_same_run(by_four(f"{case} {layout}"), by_two(f"{case} fsdp"))


@pytest.mark.parametrize("name", APART)
def test_models_in_processes_of_their_own_give_the_numbers_of_fsdp(name: str, by_four: Runs, by_two: Runs) -> None:
    assert_same_run(by_four(name), by_two(f"{APART[name][0]} fsdp"))


@pytest.mark.parametrize("case", BY_ONE)
def test_one_process_gives_the_numbers_of_fsdp(case: str, by_one: Runs) -> None:
    assert_same_run(by_one(f"{case} alone"), by_one(f"{case} fsdp"))


@pytest.mark.parametrize("name", ONE_ENGINE)
def test_an_engine_of_its_own_gets_the_weights_of_all_parts(name: str, by_four: Runs, by_one: Runs) -> None:
    """One engine draws what the one process draws."""
    assert_same_run(by_four(name), by_one("grpo fsdp"))


def test_a_classifier_in_parts_is_transformers_and_is_read_by_it(by_two: Runs, models: dict[str, str]) -> None:
    texts = [templated(text) for text in TO_CLASSIFY]
    (*steps, evaluation), network = plain_loop(models["classifier"], MULTI, LABELS[MULTI], texts, 3)
    for layout in BY_TWO["classes"]:
        folder = by_two(f"classes {layout}")
        *found, last = [line for line in lines(folder) if "loss" in line or "eval_loss" in line]
        assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in steps], abs=1e-5)
        assert last["eval_loss"] == pytest.approx(evaluation["eval_loss"], abs=1e-5)
        exported = AutoModelForSequenceClassification.from_pretrained(folder / "final")
        assert (exported.config.num_labels, exported.config.problem_type) == (3, MULTI)
        for name, weight in network.state_dict().items():
            torch.testing.assert_close(exported.state_dict()[name], weight, rtol=0, atol=1e-5, msg=lambda m: f"{m}")


def test_a_classifier_goes_on_in_another_layout(by_two: Runs, models: dict[str, str], tmp_path: Path) -> None:
    cases = ("classes", "classes, adapter")
    saved = {case: str(by_two(f"{case} {BY_TWO[case][0]}") / "checkpoint-2") for case in cases}
    wanted = {case: (case, LAYOUTS["tp"] | {"resume_from_checkpoint": saved[case]}) for case in cases}
    resumed = Runs(2, wanted, models, tmp_path)
    for case in cases:
        found, whole = lines(resumed(case)), lines(by_two(f"{case} fsdp"))
        assert found[-1] == pytest.approx(whole[-1], rel=1e-5, abs=1e-5)
        assert found[-2] == pytest.approx(whole[-2], rel=1e-5, abs=1e-5)
        weights = final_weights(resumed(case))
        for name, weight in final_weights(by_two(f"{case} fsdp")).items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_a_reward_model_is_written_with_the_padding_it_was_trained_with(by_two: Runs) -> None:
    """By which transformers finds the token whose value is the score."""
    for layout in ("fsdp", *BY_TWO["reward"]):
        written = json.loads((by_two(f"reward {layout}") / "final" / "config.json").read_text())
        assert written["pad_token_id"] == tiny_tokenizer().eos_token_id


# Checkpoints

HARMS: dict[str, tuple[str, Callable[[Path], None], str]] = {  # a file, what becomes of it, and what is told
    "a bit of a shard": ("megatron/__0_0.distcp", flip_a_bit, r"differs from the written file \(checksum\)"),
    "the end of another rank's": ("megatron/__1_0.distcp", cut, r"has \d+ bytes, and was written with \d+"),
    "a bit of the index": ("megatron/.metadata", flip_a_bit, r"differs from the written file \(checksum\)"),
    "a shard that is gone": ("megatron/__1_0.distcp", Path.unlink, "is not there"),
}


def test_a_damaged_checkpoint_is_passed_over_in_one_line(by_two: Runs, tmp_path: Path) -> None:
    for name, (file, harm, told) in HARMS.items():
        folder = tmp_path / name
        shutil.copytree(by_two("sft, saved tp"), folder)
        harm(folder / "checkpoint-2" / file)
        choice = newest(folder)
        assert choice.folder == folder / "checkpoint-1"
        (note,) = choice.notes
        assert "\n" not in note
        assert re.search(rf"skipped checkpoint-2.*{re.escape(file)} {told}", note), note


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    by_two: Runs, models: dict[str, str], tmp_path: Path
) -> None:
    name = "sft, saved tp"
    shutil.copytree(by_two(name), tmp_path / name)
    flip_a_bit(tmp_path / name / "checkpoint-2" / "megatron" / "__0_0.distcp")
    shutil.rmtree(tmp_path / name / "final")
    keys = LAYOUTS["tp"] | {"resume_from_checkpoint": "auto"}
    resumed = Runs(2, {name: ("sft, saved", keys)}, models, tmp_path)(name)
    assert lines(resumed) == lines(by_two(name))
    assert final_bytes(resumed) == final_bytes(by_two(name))


# torchrun and Ray


def test_a_command_line_under_torchrun_gives_the_same_bits(
    by_two: Runs, models: dict[str, str], tmp_path: Path
) -> None:
    for name in ("dataset", "eval_dataset"):
        rows = getattr(config_of("sft", models, tmp_path, LAYOUTS["tp resting"]), name)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("dataset", "eval_dataset")}
    config = config_of("sft", models, tmp_path / "run", LAYOUTS["tp resting"] | ON_CPU | files)
    given = dict(changed(config, [field.name for field in fields(config)]))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(given))
    done = torchrun(2, "-m", "trainers.sft", "--config", str(tmp_path / "run.yaml"), cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    assert lines(tmp_path / "run") == lines(by_two("sft tp resting"))
    assert final_bytes(tmp_path / "run") == final_bytes(by_two("sft tp resting"))


def test_ray_and_torchrun_give_the_same_bits(
    by_two: Runs, models: dict[str, str], tmp_path: Path, ray_session: RaySession
) -> None:
    """Two layouts come after each other in the same two workers."""
    gc.collect()  # the trainers before are gone, and workers let go of their models
    with ray_session({"megatron": together(2)["cpus"]}):
        for case, layout in (("sft", "vpp"), ("sft of experts", "ep")):
            config = config_of(case, models, tmp_path / case, LAYOUTS[layout] | ON_CPU)
            UNDER_TEST[CASES[case][0]](config).train()
            assert lines(tmp_path / case) == lines(by_two(f"{case} {layout}"))
            assert final_bytes(tmp_path / case) == final_bytes(by_two(f"{case} {layout}"))


def test_ray_and_torchrun_give_the_same_bits_with_an_engine_apart(
    by_four: Runs, models: dict[str, str], tmp_path: Path, ray_session: RaySession
) -> None:
    gc.collect()
    with ray_session(ENGINE_OF_RAY):
        GRPOTrainer(config_of("grpo", models, tmp_path, LAYOUTS["pp"] | ON_CPU)).train()
    assert lines(tmp_path) == lines(by_four("grpo pp, engine apart"))
    assert final_bytes(tmp_path) == final_bytes(by_four("grpo pp, engine apart"))


def test_vllm_gets_the_weights_of_all_parts(tmp_path: Path, ray_session: RaySession) -> None:
    """Completions are greedy, so that both engines write the same; what vLLM has got is proven by fingerprints."""
    model = save_tiny(tmp_path / "model", head_dim=32)
    GRPOTrainer(greedy_config(model, tmp_path / "fsdp", max_steps=2)).train()
    gc.collect()
    keys = {"backend": "megatron", PP: 2, "max_steps": 2} | ON_CPU
    with ray_session(ENGINE_OF_RAY):
        trainer = LedgerTrainer(greedy_config(model, tmp_path / "megatron", **keys, **VLLM))
        trainer.train()
        trainer.close_engine()
    assert_same_numbers(tmp_path / "megatron", tmp_path / "fsdp", atol=1e-4)


# Mistakes

LEARNER = ["train", "rollout", "teacher", "reward"]


@pytest.mark.parametrize(
    ("keys", "num_learners", "num_references", "message"),
    [
        ({TP: 2}, 3, 2, r"tensor_model_parallel_size 2 x .* = 2 does not divide the 3 workers of role 'train'"),
        ({PP: 2}, 2, 1, r"pipeline_model_parallel_size 2 x .* = 2 does not divide the 1 workers of role 'reference'"),
        ({TP: 3}, 3, 3, "3 of role 'train' does not divide the model's num_attention_heads 4. Choose among 1, 2, 4"),
        ({PP: 3}, 3, 3, "3 of role 'reference' does not divide the model's num_hidden_layers 2. Choose a product"),
    ],
    ids=["workers", "workers of a reference", "heads", "layers"],
)
def test_a_layout_that_cannot_be_is_refused_before_anything_starts(
    keys: Keys, num_learners: int, num_references: int, message: str, models: dict[str, str], tmp_path: Path
) -> None:
    groups = {
        "learner": {"device": "GPU", "ranks": num_learners, "workers": LEARNER},
        "reference": {"device": "GPU", "ranks": num_references, "workers": ["reference"]},
    }
    with pytest.raises(ConfigError, match=message):
        run(GRPOTrainer, config_of("grpo", models, tmp_path, keys | {"device_groups": groups, "use_ray": True}))
    assert state.active is None
