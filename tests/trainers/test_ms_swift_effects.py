"""Keys of ms-swift that are easy to get subtly wrong, by what they do and not by being taken.

Each expected value is written from ms-swift's own source (4.6), which the name of the test or a comment says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from rayhelper import ConfigError
from tests.golden.tiny import save_tiny
from trainers.commands import command_named
from trainers.configuration.reading.command_line import load_config

ROW = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model and a file of data."""
    folder = tmp_path_factory.mktemp("effects")
    (folder / "d.jsonl").write_text(json.dumps(ROW) + "\n")
    return save_tiny(folder / "model"), str(folder / "d.jsonl")


@pytest.fixture
def read(paths: tuple[str, str]) -> Any:
    def read(command: str, *words: str) -> Any:
        rewards = ["--reward_funcs", "accuracy"] if command in ("grpo", "ppo") else []
        given = ["--model", paths[0], "--dataset", paths[1], "--defaults", "ms-swift", *rewards, *words]
        return load_config(command_named(command).config_type, given)

    return read


def test_bco_pair_is_shifted_by_the_running_mean_of_rewards(read: Any) -> None:
    """dpo_trainer.py: -logsigmoid(beta c - d) - logsigmoid(-(beta r - d)), d the mean of all rewards so far."""
    import torch

    from trainers.dpo.scores import RunningMean
    from trainers.losses.preference import CompletionTotals, pair_losses

    assert read("dpo", "--loss_type", "sigmoid", "bco_pair").bco_shift
    assert not read("dpo").bco_shift
    found, rewards = RunningMean(), [0.0, 0.7, -0.2, 1.9]
    for k, reward in enumerate(rewards, start=1):
        found.add(reward)
        assert found.mean == pytest.approx(sum(rewards[:k]) / k)
    zero, (chosen, rejected) = torch.zeros(2), (torch.tensor([0.7, -1.0]), torch.tensor([-0.4, 0.5]))
    sides = [CompletionTotals(one, zero, one, zero + 3) for one in (chosen, rejected)]
    losses = pair_losses("bco_pair", *sides, beta=0.3, bco_shift=0.25)
    logsigmoid = torch.nn.functional.logsigmoid
    torch.testing.assert_close(losses, -logsigmoid(0.3 * chosen - 0.25) - logsigmoid(-(0.3 * rejected - 0.25)))


def test_label_smoothing_of_sigmoid_is_that_of_conservative_dpo(read: Any) -> None:
    """dpo_trainer.py: -logsigmoid(x) (1 - e) - logsigmoid(-x) e."""
    import torch

    from trainers.dpo.config import weighted_losses
    from trainers.losses.preference import CompletionTotals, pair_losses

    config = read("dpo", "--label_smoothing", "0.1", "--beta", "0.3")
    (types, weights), zero = weighted_losses(config), torch.zeros(2)
    assert weights == [1.0]
    chosen, rejected = torch.tensor([0.7, -1.0]), torch.tensor([-0.4, 0.5])
    sides = [CompletionTotals(one, zero, one, zero + 3) for one in (chosen, rejected)]
    found = pair_losses(types[0], *sides, beta=config.beta, label_smoothing=config.label_smoothing)
    x = 0.3 * (chosen - rejected)
    logsigmoid = torch.nn.functional.logsigmoid
    torch.testing.assert_close(found, -logsigmoid(x) * 0.9 - logsigmoid(-x) * 0.1)
    assert read("dpo").loss_type == ["sigmoid"]
    assert read("dpo", "--loss_type", "exo_pair").label_smoothing == 1e-3  # where it is 0 there


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--loss_type ipo sft", "divides all losses by lengths"),
        ("--ld_alpha 0.5", "weighs only the policy"),
    ],
)
def test_losses_of_pairs_that_are_others_there_are_refused(read: Any, words: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read("dpo", *words.split())


ESTIMATED = [("grpo", "group"), ("grpo", "batch"), ("grpo", "none"), ("rloo", "none"), ("reinforce_plus_plus", "batch")]


@pytest.mark.parametrize(("estimator", "scale"), ESTIMATED)
def test_advantages_are_divided_by_what_they_are_divided_by_there(read: Any, estimator: str, scale: str) -> None:
    """rl_core/advantage.py, for two rewards with weights and groups of four."""
    import numpy as np

    from trainers.rewards.estimators import RewardBatch, estimated

    words = ["--advantage_estimator", estimator, "--scale_rewards", scale, "--num_generations", "4"]
    rewards_BK, weights = np.random.default_rng(0).random((12, 2)), np.array([1.0, 0.5])
    sums = (rewards_BK * weights).sum(1)
    groups = sums.reshape(-1, 4)
    expected = sums - groups.mean(1).repeat(4)
    if estimator == "rloo":
        expected *= 4 / 3
    spread = expected if estimator == "reinforce_plus_plus" else sums
    if scale != "none":
        expected = expected / ((spread.std(ddof=1) if scale == "batch" else groups.std(1, ddof=1).repeat(4)) + 1e-4)
    config = read("grpo", *words)
    batch = RewardBatch(rewards_BK, weights, config.num_generations, np.full(12, 3))
    found, _ = estimated(config.advantage_estimator, config, batch)
    np.testing.assert_allclose(np.asarray(found).reshape(-1), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("estimator", "scale", "remedy"),
    [
        ("rloo", "group", "Write scale_rewards: none"),
        ("reinforce_plus_plus", "group", "Write scale_rewards: batch"),
        ("grpo", "gdpo", "multi_objective_aggregation: normalize_then_sum"),
    ],
)
def test_what_an_estimator_divides_by_there_alone_is_refused(
    read: Any, estimator: str, scale: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        read("grpo", "--advantage_estimator", estimator, "--scale_rewards", scale)


def test_top_k_of_minus_one_means_all_tokens(read: Any) -> None:
    assert read("grpo", "--top_k", "-1").top_k == 0
    assert read("grpo", "--top_k", "20").top_k == 20


def test_rows_that_are_malformed_are_left_out_unless_strict(read: Any) -> None:
    assert read("sft", "--strict", "false").skip_broken_rows
    assert not read("sft", "--strict", "true").skip_broken_rows


def test_the_side_of_padding_changes_nothing(read: Any) -> None:
    assert read("sft", "--padding_side", "left") == read("sft")


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("--freeze_parameters model.embed_tokens", "tuner_type: lora"),
        ("--freeze_parameters_ratio 0.5", "tuner_type: lora"),
        ("--trainable_parameters lm_head", "tuner_type: lora"),
        ("--interleave_prob 0.5 0.5", "Write datasets, each with its fraction"),
        ("--target_parameters mlp.experts.down_proj", "lora_kwargs: {target_parameters"),
    ],
)
def test_what_is_not_built_is_refused_with_a_remedy(read: Any, words: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy.replace("{", r"\{")):
        read("sft", *words.split())
    assert read("sft", "--freeze_parameters_ratio", "0") == read("sft")


def test_a_system_prompt_may_be_a_file(read: Any, tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text("Be short.")
    assert read("sft", "--system", str(tmp_path / "system.txt")).system == "Be short."


@pytest.mark.parametrize("command", ["sft", "dpo", "grpo"])
def test_an_adapter_has_its_rank_where_nobody_writes_tuner_type(read: Any, command: str) -> None:
    """base_args.py: tuner_type is lora, and 16 and 0.05 are defaults of TRL's that are read there."""
    found = read(command, "--lora_rank", "16", "--lora_dropout", "0.05")
    assert (found.tuner_type, found.lora_rank, found.lora_dropout) == ("lora", 16, 0.05)


def test_an_engine_that_megatron_has_by_default_keeps_its_share_of_memory(read: Any) -> None:
    """megatron_args.py: use_vllm is true, and 0.3 is TRL's default for an engine."""
    found = read("grpo", "--backend", "megatron", "--vllm_gpu_memory_utilization", "0.3")
    assert (found.rollout_engine, found.vllm_gpu_memory_utilization) == ("vllm", 0.3)


EMPTY_THOUGHTS = (  # as Qwen3's template writes them before the last answer
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_empty_thoughts_that_a_template_writes_are_not_learned(
    read: Any, paths: tuple[str, str], tmp_path: Path
) -> None:
    """template_args.py, _set_loss_scale: of models that think or not, unless disable_ignore_empty_think."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    from trainers.data.loss_scale import parsed
    from trainers.data.rows import tokenize_sft

    (tmp_path / "thinks.jinja").write_text(EMPTY_THOUGHTS)
    thinks = ["--chat_template", str(tmp_path / "thinks.jinja")]
    assert read("sft").loss_scale == "default"
    disabled = read("sft", *thinks, "--disable_ignore_empty_think", "true").loss_scale
    found = read("sft", *thinks).loss_scale
    assert (disabled, found) == ("default", "default+ignore_empty_think")
    assert read("sft", *thinks, "--loss_scale", "last_round").loss_scale == "last_round+ignore_empty_think"
    tokenizer = AutoTokenizer.from_pretrained(paths[0], chat_template=EMPTY_THOUGHTS)
    learned = []
    for scale in (disabled, found):
        rows = tokenize_sft(Dataset.from_list([ROW]), tokenizer, max_length=None, loss_scale=parsed(scale))
        learned.append(tokenizer.decode(rows.input_ids.values[rows.target_mask.values]))
    assert learned[0].startswith("<think>")
    assert learned[1].startswith("a<")


def test_keys_of_generation_do_nothing_where_nothing_is_generated(read: Any) -> None:
    """base.py: the prefix of a response is appended only where the row has no answer."""
    words = "--temperature 0.5 --top_k 20 --stop_words x --max_new_tokens 9 --num_beams 2 --response_prefix <think>"
    for command in ("sft", "dpo", "kto"):
        assert read(command, *words.split()) == read(command)
    for command in ("grpo", "ppo"):
        with pytest.raises(ConfigError, match="Write a chat_template whose generation prompt ends with this text"):
            read(command, *(["--reward_funcs", "format"] if command == "ppo" else []), "--response_prefix", "<think>")


def test_stop_words_that_are_tokens_end_a_completion(read: Any, paths: tuple[str, str]) -> None:
    from transformers import AutoTokenizer

    known = AutoTokenizer.from_pretrained(paths[0]).get_added_vocab()
    word = next(iter(known))
    assert read("grpo", "--stop_words", word).stop_token_ids == [known[word]]
    with pytest.raises(ConfigError, match="write stop_token_ids"):
        read("grpo", "--stop_words", word, "Observation:")


@pytest.mark.parametrize(
    ("words", "keeps"),
    [
        (["sft"], True),
        (["sft", "--loss_scale", "last_round"], False),
        (["sft", "--loss_scale", "last_round", "--preserve_thinking", "true"], True),
        (["dpo"], False),
        (["kto"], False),
        (["cpo"], False),
        (["rm"], False),
        (["orpo"], True),
    ],
)
def test_thoughts_of_earlier_answers_stay_where_these_are_learned(
    read: Any, tmp_path: Path, words: list[str], keeps: bool
) -> None:
    """base.py, _get_preserve_thinking; rlhf_args.py, _set_loss_scale."""
    (tmp_path / "thinks.jinja").write_text(EMPTY_THOUGHTS)
    assert read(*words, "--chat_template", str(tmp_path / "thinks.jinja")).preserve_thinking is keeps
    assert read(words[0]).preserve_thinking is None


@pytest.mark.parametrize("command", ["grpo", "gkd", "ppo"])
def test_a_model_that_may_think_is_asked_not_to(read: Any, tmp_path: Path, command: str) -> None:
    """base.py: enable_thinking is is_thinking and not non_thinking_prefix, and the prefix ends the prompt."""
    (tmp_path / "thinks.jinja").write_text(EMPTY_THOUGHTS)
    thinks = [command, "--chat_template", str(tmp_path / "thinks.jinja")]
    assert read(*thinks).chat_template_kwargs == {"enable_thinking": False}
    assert read(*thinks, "--enable_thinking", "true").chat_template_kwargs == {"enable_thinking": True}
    assert read(command).chat_template_kwargs == {}


def test_keys_of_trackers_are_variables_that_these_read(read: Any) -> None:
    """megatron_args.py, sft_args.py: swanlab_token is SWANLAB_API_KEY."""
    words = ["--wandb_project", "p", "--swanlab_project", "q", "--swanlab_token", "secret"]
    assert read("sft", *words).env == {"WANDB_PROJECT": "p", "SWANLAB_PROJECT": "q", "SWANLAB_API_KEY": "secret"}
    assert read("grpo", "--env", '{"A": "b"}', "--wandb_project", "p").env == {"A": "b", "WANDB_PROJECT": "p"}
    with pytest.raises(ConfigError, match="remove one of them"):
        read("sft", "--env", '{"WANDB_PROJECT": "q"}', "--wandb_project", "p")


@pytest.mark.parametrize(("num_workers", "first"), [(1, [0, 1, 2, 3]), (2, [0, 1, 4, 5])])
def test_a_step_has_the_next_completions_of_each_worker(read: Any, num_workers: int, first: list[int]) -> None:
    """rollout_mixin.py, split_by_mini_batches: without TRL's shuffle_sequence_dict."""
    import numpy as np

    from trainers.batch import Samples
    from trainers.grpo.plan import GenerationPlan

    sizes = ["--per_device_train_batch_size", str(4 // num_workers), "--num_generations", "2"]
    config = read("grpo", *sizes, "--steps_per_generation", "2")
    plan, samples = GenerationPlan.of(config, 8, num_workers, {}), cast(Samples, np.arange(8))
    steps = cast(list[list[int]], list(plan.chunks(samples, seed=(0, 0))))
    assert [sorted(step) for step in steps] == [first, [k for k in range(8) if k not in first]]
    assert all(sorted(step) == list(step) for step in steps)
