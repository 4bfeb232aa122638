"""A prompt that leaves vLLM no room for its completion is told by its row, before a model is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayhelper import ConfigError
from tests.e2e.runs import gkd_config, grpo_config, ppo_config
from tests.golden.tiny import save_tiny
from trainers.gkd.trainer import GKDTrainer
from trainers.grpo.trainer import GRPOTrainer
from trainers.parts.checks import model_length
from trainers.ppo.trainer import PPOTrainer

UNDER_TEST: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "grpo": (GRPOTrainer, grpo_config, {}),
    "ppo": (PPOTrainer, ppo_config, {}),
    "gkd": (GKDTrainer, gkd_config, {"lmbda": 1.0, "sft_alpha": 0.0, "tuner_type": "lora"}),
}
SHORT = {"prompt": "2+2="}
LONG = {"prompt": "x" * 57}  # one token a byte; 8 are for the completion
VLLM = {"rollout_engine": "vllm", "vllm_max_model_len": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


def build(name: str, model: str, folder: Path, **keys: Any) -> None:
    """Reads the data, as a run does before anything else."""
    trainer, config, own = UNDER_TEST[name]
    trainer(config(model, folder, **own, **{"dataset": [SHORT] * 3, "eval_dataset": [SHORT], **VLLM, **keys}))


@pytest.mark.parametrize("name", UNDER_TEST)
def test_a_prompt_without_room_for_its_completion_is_told_by_its_row(name: str, model: str, tmp_path: Path) -> None:
    message = r"^dataset: the prompt of row 2 \(from 0, of 3\) has 57 tokens.* 8 .*more than vllm_max_model_len=64"
    with pytest.raises(ConfigError, match=message + ".*max_prompt_length to at most 56"):
        build(name, model, tmp_path, dataset=[SHORT, SHORT, LONG])
    with pytest.raises(ConfigError, match=r"^eval_dataset: the prompt of row 0"):
        build(name, model, tmp_path, eval_dataset=[LONG])
    keys = {"vllm_max_model_len": None, "vllm_engine_kwargs": {"max_model_len": 64}}
    with pytest.raises(ConfigError, match=r"more than vllm_engine_kwargs: \{max_model_len: 64\}"):
        build(name, model, tmp_path, dataset=[LONG], **keys)


@pytest.mark.parametrize("name", UNDER_TEST)
def test_rows_of_long_prompts_are_left_out_where_the_keys_say_so(name: str, model: str, tmp_path: Path) -> None:
    trainer, config, own = UNDER_TEST[name]
    keys: dict[str, Any] = {"max_prompt_length": 56, "drop_long_prompts": True, "eval_dataset": [SHORT, LONG]}
    built = trainer(config(model, tmp_path, **own, **VLLM, **keys, dataset=[SHORT, LONG, SHORT]))
    assert list(built.rows["prompt"]) == [SHORT["prompt"]] * 2
    assert list(built.eval_rows["prompt"]) == [SHORT["prompt"]]
    with pytest.raises(ConfigError, match=r"^dataset: all 2 prompts have more than max_prompt_length 56 tokens"):
        build(name, model, tmp_path, **keys | {"dataset": [LONG] * 2})
    with pytest.raises(ConfigError, match="drop_long_prompts needs max_prompt_length"):
        build(name, model, tmp_path, drop_long_prompts=True)


@pytest.mark.parametrize(
    "keys",
    [
        {"dataset": [{"prompt": "x" * 56}]},
        {"dataset": [LONG], "max_prompt_length": 56},
        {"dataset": [LONG], "vllm_max_model_len": None},
        {"dataset": [LONG], "rollout_engine": "hf", "vllm_max_model_len": None},
        {"dataset": [LONG], "environment": "tests.e2e.test_long_prompts.Silent"},
    ],
    ids=["fits", "is cut", "the model has room", "hf has room", "an environment makes prompts"],
)
def test_a_prompt_that_will_have_room_is_left_alone(keys: dict[str, Any], model: str, tmp_path: Path) -> None:
    build("grpo", model, tmp_path, **keys, **({"reward_weights": None} if "environment" in keys else {}))


def test_without_a_length_of_its_own_the_models_positions_are_the_limit(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"row 1 .* has 2041 tokens.* more than the model's 2048 positions"):
        build("ppo", model, tmp_path, vllm_max_model_len=None, dataset=[SHORT, {"prompt": "x" * 2041}])


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0}, None),
    ],
)
def test_positions_that_a_model_stretches_are_vllms_to_say(
    rope: dict[str, Any], positions: int | None, tmp_path: Path
) -> None:
    stretched = {"original_max_position_embeddings": 512, "rope_theta": 1e4, **rope}
    folder = save_tiny(tmp_path, max_position_embeddings=2048, rope_parameters=stretched)
    assert model_length(folder, trust_remote_code=False) == positions


def test_positions_that_a_user_gives_vllm_are_vllms_to_say(model: str, tmp_path: Path) -> None:
    for name, value in (("hf_overrides", {"max_position_embeddings": 4096}), ("hf_config_path", "elsewhere")):
        keys = {"vllm_max_model_len": None, "vllm_engine_kwargs": {name: value}}
        build("ppo", model, tmp_path, dataset=[SHORT, {"prompt": "x" * 2041}], **keys)


class Silent:
    """An environment that is never asked."""
