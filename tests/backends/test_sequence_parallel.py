"""Rows that several ranks share give the step, the scores and the values of one process, and of plain transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    FalconH1Config,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen3NextConfig,
)

from benchmarks.tiny import architectures
from rayhelper import ConfigError
from tests.backends.batches import largest_difference, packed, plain_loss, plain_scores, samples_of, weighted_loss
from tests.backends.ranks import run_ranks
from tests.golden.tiny import save_tiny, tiny_tokenizer
from trainers.backends.fsdp import sequence_attention
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.fsdp.sequence_attention import sequence_mistakes
from trainers.backends.scores.inputs import model_inputs
from trainers.batch import Prompts, Ragged, Samples
from trainers.rollout.base import Sampling
from trainers.rollout.hf.engine import HfEngine

SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "num_training_steps": 4,
    "adam_epsilon": 1e-4,  # see test_step.py
    "max_grad_norm": 0.1,
}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
CASES: dict[str, dict[str, Any]] = {
    "padded": {},
    "padding-free": {"padding_free": True},
    "tokens": {"padding_free": True, "token_budget": 20},
    "checkpointing": {"gradient_checkpointing": True},
    "checkpointing, padding-free": {"gradient_checkpointing": True, "padding_free": True},
    "shards": {"sharding": "full_shard", "gradient_checkpointing": True},
    "lora": {"lora": LORA},
    "eager": {"model_init_kwargs": {"attn_implementation": "eager"}},
    "lora in shards": {"lora": LORA, "sharding": "full_shard", "padding_free": True},
}
SIZES: dict[str, Any] = {
    **{"vocab_size": 260, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1},
    **{"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None},
}
OTHERS = ["one head of keys", "window", "yarn", "gpt2", "qwen3_moe", "deepseek_v3", "gemma3_text"]
Found = dict[str, Any]


def save(folder: Path, configuration: Any) -> str:
    """A folder with a model of this configuration, and the tiny tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(configuration).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models by name: norms of queries and keys, biases, few heads of keys, a window, embeddings of positions,
    experts, values of another width than keys, and layers of two kinds."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "qwen3": save_tiny(folder / "qwen3", tie_word_embeddings=True),
        "qwen2": save_tiny(folder / "qwen2", family="qwen2"),
        "one head of keys": save(folder / "llama", LlamaConfig(**SIZES | {"num_key_value_heads": 1})),
        "window": save(folder / "mistral", MistralConfig(**SIZES, sliding_window=6)),
        "yarn": save(
            folder / "yarn",
            LlamaConfig(
                **SIZES, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
            ),
        ),
        **{name: architectures.save(name, folder / name) for name in ("qwen3_moe", "deepseek_v3", "gemma3_text")},
        "gpt2": save(
            folder / "gpt2", GPT2Config(vocab_size=260, n_embd=64, n_layer=2, n_head=4, initializer_range=0.1)
        ),
    }


def two_steps(rank: int, folder: str, size: int, settings: dict[str, Any]) -> Found:
    """Weights, losses and gradient norms of two steps, and the scores after them, of the rows of this rank."""
    backend = FsdpBackend(folder, sequence_parallel_size=size, **SETTINGS | settings)
    index, count, leads = backend.shard
    found: Found = {"leads": leads, "losses": [], "norms": []}
    for step in range(2):
        samples = samples_of(seed=step)
        loss = partial(weighted_loss, int(samples.target_mask.values.sum()))
        mine = samples[index * 8 // count : (index + 1) * 8 // count]
        metrics = backend.step(mine, loss, micro_batch_size=3).values()
        found["losses"].append(metrics["loss"])
        found["norms"].append(metrics["grad_norm"])
    mine = samples_of()[index * 8 // count : (index + 1) * 8 // count]
    found["scores"] = [column.values for column in backend.token_scores(mine, micro_batch_size=2)]
    found["top"] = [column.values for column in backend.top_logps(mine, 3, micro_batch_size=2)]
    found["features"] = backend.target_features(mine).numpy()
    return found | {"weights": {name: weight.clone() for name, weight in backend.named_weights()}}


def found_of(rank: int, folder: str, size: int, cases: list[str]) -> dict[str, Found]:
    return {case: two_steps(rank, folder, size, CASES[case]) for case in cases}


def check_alike(ranks: list[Found], alone: Found, size: int) -> None:
    """Ranks that share rows found what one process found; the leaders of all groups together have all rows."""
    leaders = [found for found in ranks if found["leads"]]
    assert len(leaders) == len(ranks) // size
    for found in ranks:
        assert largest_difference(found["weights"], alone["weights"]) < 1e-5
        assert found["norms"] == pytest.approx(alone["norms"], abs=1e-5)
    assert np.sum([found["losses"] for found in leaders], axis=0) == pytest.approx(alone["losses"], abs=1e-5)
    for k in range(2):
        scores = np.concatenate([found["scores"][k] for found in leaders])
        np.testing.assert_allclose(scores, alone["scores"][k], atol=1e-5)
    assert np.array_equal(np.concatenate([found["top"][0] for found in leaders]), alone["top"][0])
    for key in ("top", "features"):
        both = [found[key][1] if key == "top" else found[key] for found in leaders]
        expected = alone[key][1] if key == "top" else alone[key]
        np.testing.assert_allclose(np.concatenate(both), expected, atol=1e-4)


@pytest.fixture(scope="module")
def alone(folders: dict[str, str]) -> dict[str, Found]:
    return found_of(0, folders["qwen3"], 1, list(CASES))


IN_PAIRS = ["tokens", "shards", "lora in shards"]


@pytest.mark.parametrize(
    ("num_ranks", "size", "cases"),
    [(2, 2, [case for case in CASES if case not in IN_PAIRS]), (4, 2, IN_PAIRS), (4, 4, ["padded", "lora in shards"])],
)
def test_ranks_that_share_rows_take_the_steps_of_one_process(
    folders: dict[str, str], alone: dict[str, Found], num_ranks: int, size: int, cases: list[str], tmp_path: Path
) -> None:
    ranks = run_ranks(num_ranks, found_of, folders["qwen3"], size, cases, folder=tmp_path)
    before = dict(FsdpBackend(folders["qwen3"]).named_weights())
    for case in cases:
        assert largest_difference(alone[case]["weights"], before) > 1e-4
        check_alike([found[case] for found in ranks], alone[case], size)


BOTH_WAYS = ["padded", "padding-free"]


def found_of_others(rank: int, folders: dict[str, str]) -> dict[str, dict[str, Found]]:
    return {model: found_of(rank, folders[model], 2, BOTH_WAYS) for model in OTHERS}


@pytest.fixture(scope="module")
def of_others(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Found]]]:
    """Of two ranks that share the rows of one model after the other."""
    return run_ranks(2, found_of_others, folders, folder=tmp_path_factory.mktemp("others"))


@pytest.mark.parametrize("model", OTHERS)
def test_other_architectures_share_rows_too(
    folders: dict[str, str], of_others: list[dict[str, dict[str, Found]]], model: str
) -> None:
    for case, expected in found_of(0, folders[model], 1, BOTH_WAYS).items():
        check_alike([found[model][case] for found in of_others], expected, 2)


def first_step(rank: int, folder: str) -> tuple[float, float, np.ndarray, np.ndarray]:
    """Loss and norm of a step of two ranks that share rows, and the scores before it; packed rows are scored too."""
    backend = FsdpBackend(folder, sequence_parallel_size=2, **SETTINGS)
    samples = samples_of()
    scores = backend.token_logps(samples, micro_batch_size=3).values
    rows = packed(samples, [[0, 1, 2], [3, 4], [5, 6, 7]])
    of_packed = backend.token_logps(rows, micro_batch_size=2).values
    loss = partial(weighted_loss, int(samples.target_mask.values.sum()))
    metrics = backend.step(samples, loss, micro_batch_size=3).values()
    return metrics["loss"], metrics["grad_norm"], scores, of_packed


@pytest.mark.parametrize("model", ["qwen3", "qwen2"])
def test_loss_norm_and_scores_are_those_of_plain_transformers(
    folders: dict[str, str], model: str, tmp_path: Path
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folders[model], dtype=torch.float32, attn_implementation="eager")
    loss = plain_loss(plain, samples_of())
    loss.backward()  # type: ignore[no-untyped-call]
    norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), float("inf")))
    with torch.no_grad():
        scores = plain_scores(plain, samples_of())[0].numpy()
    for found in run_ranks(2, first_step, folders[model], folder=tmp_path):
        assert found[:2] == pytest.approx((float(loss), norm), abs=1e-5)
        np.testing.assert_allclose(found[2], scores, atol=1e-5)
        np.testing.assert_allclose(found[3], scores, atol=1e-5)


def uneven_step(rank: int, folder: str, size: int) -> dict[str, torch.Tensor]:
    """Weights after a step for which the first slice has all rows, in shards and without."""
    weights: dict[str, torch.Tensor] = {}
    for sharding in ("no_shard", "full_shard"):
        backend = FsdpBackend(folder, sequence_parallel_size=size, sharding=sharding, **SETTINGS)  # type: ignore[arg-type]
        mine = samples_of()[: 8 if backend.shard[0] == 0 else 0]
        backend.step(mine, partial(weighted_loss, 50), micro_batch_size=3)
        assert len(backend.token_logps(mine, micro_batch_size=3)) == len(mine)
        weights |= {f"{sharding} {name}": weight.clone() for name, weight in backend.named_weights()}
    return weights


def test_a_slice_may_be_empty(folders: dict[str, str], tmp_path: Path) -> None:
    expected = uneven_step(0, folders["qwen2"], 1)
    for found in run_ranks(4, uneven_step, folders["qwen2"], 2, folder=tmp_path):
        assert largest_difference(found, expected) < 1e-5


def lowered(rank: int, folder: str, size: int) -> list[tuple[float, np.ndarray]]:
    """Gradient norms and scores in bfloat16, under autocast and by FSDP, padded and not."""
    found = []
    for sharding in ("no_shard", "full_shard"):
        for padding_free in (False, True):
            backend = FsdpBackend(
                folder,
                dtype="bfloat16",
                sharding=sharding,  # type: ignore[arg-type]
                padding_free=padding_free,
                sequence_parallel_size=size,
                **SETTINGS,
            )
            scores = backend.token_logps(samples_of(), micro_batch_size=3).values
            metrics = backend.step(samples_of(), partial(weighted_loss, 50), micro_batch_size=3).values()
            found.append((metrics["grad_norm"], scores))
    return found


def test_layers_in_bfloat16_exchange_what_they_attend_to(folders: dict[str, str], tmp_path: Path) -> None:
    expected = lowered(0, folders["qwen3"], 1)
    for ranks in run_ranks(2, lowered, folders["qwen3"], 2, folder=tmp_path):
        for (norm, scores), (wanted, wanted_scores) in zip(ranks, expected, strict=True):
            assert norm == pytest.approx(wanted, rel=2e-2)
            np.testing.assert_allclose(scores, wanted_scores, atol=0.15)


def tokens_seen(rank: int, folder: str, size: int) -> tuple[list[int], float]:
    """How many tokens pass through the layers of a rank in each micro-batch of a step, and FLOPs that its slice may
    take."""
    backend = FsdpBackend(folder, sequence_parallel_size=size, padding_free=True, peak_tflops=1.0, **SETTINGS)
    seen: list[int] = []
    embeddings = backend.module.get_input_embeddings()
    embeddings.register_forward_hook(lambda _, args, __: seen.append(args[0].numel()))
    metrics = backend.step(samples_of(), partial(weighted_loss, 50), micro_batch_size=4).values()
    return seen, metrics["update_peak_flops"]


def test_each_rank_computes_its_part_of_the_tokens_alone(folders: dict[str, str], tmp_path: Path) -> None:
    whole, peak = tokens_seen(0, folders["qwen3"], 1)
    assert sum(whole) == len(samples_of().input_ids.values)
    halves = [-(-count // 2) for count in whole]
    assert run_ranks(2, tokens_seen, folders["qwen3"], 2, folder=tmp_path) == 2 * [(halves, 2 * peak)]


def values(rank: int, folder: str, size: int) -> list[np.ndarray]:
    found = []
    for read_at in ("predicting", "target"):
        for labels in (1, 3):
            backend = FsdpBackend(
                folder, head="value", num_labels=labels, values_at=read_at, sequence_parallel_size=size
            )
            found.append(backend.token_values(samples_of(), micro_batch_size=3).values)
    return found


def test_values_are_read_off_on_the_rank_that_has_the_token(folders: dict[str, str], tmp_path: Path) -> None:
    expected = values(0, folders["qwen3"], 1)
    for ranks in run_ranks(2, values, folders["qwen3"], 2, folder=tmp_path):
        for found, wanted in zip(ranks, expected, strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("padding_free", [False, True])
def test_each_target_belongs_to_the_part_with_the_token_before_it(padding_free: bool) -> None:
    samples = samples_of((5, 12, 3))
    samples.target_mask.values[:] = True
    for row in range(3):
        samples.target_mask[row][0] = False
    whole = model_inputs(samples, torch.device("cpu"), padding_free=padding_free)
    parts = [model_inputs(samples, torch.device("cpu"), padding_free=padding_free, sharing=(k, 4)) for k in range(4)]
    ids_BT = torch.cat([part.input_ids_BT for part in parts], dim=1)
    width = whole.input_ids_BT.shape[1]
    assert ids_BT.shape[1] == -(-width // 4) * 4
    assert torch.equal(ids_BT[:, :width], whole.input_ids_BT)
    positions_BT = torch.cat([part.position_ids_BT for part in parts if part.position_ids_BT is not None], dim=1)
    expected = torch.arange(width).expand(len(ids_BT), width)
    if whole.position_ids_BT is not None:
        expected = whole.position_ids_BT
    assert torch.equal(positions_BT[:, :width], expected)
    found = {}
    for part in parts:
        assert part.part is not None
        assert part.part.num_targets == len(whole.target_ids_N)
        before_M = part.input_ids_BT.flatten()[part.places_N]
        for target, before, after in zip(part.part.targets_M, before_M, part.target_ids_N, strict=True):
            found[int(target)] = (int(before), int(after))
    before_N = whole.input_ids_BT.flatten()[whole.places_N].tolist()
    assert [found[k] for k in range(len(before_N))] == list(zip(before_N, whole.target_ids_N.tolist(), strict=True))


def complete(rank: int, folder: str, size: int) -> tuple[list[list[int]], Found]:
    """Completions of prompts by an engine that shares the model, each rank its own; then steps."""
    backend = FsdpBackend(folder, sequence_parallel_size=size, **SETTINGS, sharding="full_shard")
    engine = HfEngine(backend.module, tiny_tokenizer(), whole_weights=backend.whole_weights)
    prompts = Prompts(Ragged.of([[5, 6, 7], [8, 9]][: 1 + rank], np.int64))
    rollouts = engine.generate(prompts, Sampling(max_completion_length=4 + rank, temperature=0.0), seed=1)
    samples = samples_of()
    metrics = backend.step(samples, partial(weighted_loss, 50), micro_batch_size=3).values()
    return [row.tolist() for row in rollouts.completion_ids], metrics


def test_an_engine_completes_whole_rows_with_the_same_module(folders: dict[str, str], tmp_path: Path) -> None:
    ranks = run_ranks(2, complete, folders["qwen3"], 2, folder=tmp_path)
    longer, expected = complete(1, folders["qwen3"], 1)
    for rank, (completions, metrics) in enumerate(ranks):
        assert completions == [row[: 4 + rank] for row in longer[: 1 + rank]]
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], abs=1e-5)


def go_on(rank: int, folder: str, checkpoint: Path, size: int) -> dict[str, torch.Tensor]:
    """Weights after a step, a checkpoint, and another step by a backend that reads it."""
    samples, loss = samples_of(), partial(weighted_loss, 50)
    first = FsdpBackend(folder, sequence_parallel_size=size, **SETTINGS)
    first.step(samples, loss, micro_batch_size=8)
    first.save(checkpoint)
    second = FsdpBackend(folder, sequence_parallel_size=size, **SETTINGS)
    second.load(checkpoint)
    second.step(samples, loss, micro_batch_size=8)
    return {name: weight.clone() for name, weight in second.named_weights()}


def test_a_checkpoint_goes_on_as_that_of_one_process(folders: dict[str, str], tmp_path: Path) -> None:
    expected = go_on(0, folders["qwen3"], tmp_path / "one", 1)
    for found in run_ranks(2, go_on, folders["qwen3"], tmp_path / "two", 2, folder=tmp_path):
        assert largest_difference(found, expected) < 1e-5


REFUSED: dict[str, tuple[Any, int, str]] = {
    "heads": (LlamaConfig(**SIZES), 3, "does not divide the 4 attention heads of the model. Choose among 1, 2, 4"),
    "dynamic": (
        LlamaConfig(**SIZES, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        2,
        "rotary embedding of llama is of type dynamic",
    ),
    "softcap": (Gemma2Config(**SIZES), 2, "attn_logit_softcapping"),
    "delta nets": (Qwen3NextConfig(**SIZES), 2, "layers of qwen3_next have a state or chunks (linear_attention"),
    "sinks": (GptOssConfig(**SIZES), 2, "the attention of gpt_oss has sinks"),
    "mamba": (MambaConfig(vocab_size=260, hidden_size=64), 2, "has no number of attention heads"),
    "falcon-h1": (FalconH1Config(**SIZES), 2, "layers of falcon_h1 have a state or chunks (hybrid, mamba_d_state"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_a_configuration_that_ranks_cannot_share_is_refused_by_name(case: str) -> None:
    configuration, size, told = REFUSED[case]
    (mistake, *_) = sequence_mistakes(configuration, size)
    assert told in mistake
    assert "sequence_parallel_size" in mistake
    assert not list(sequence_mistakes(LlamaConfig(**SIZES), 2))


def refusal(rank: int, folder: str, size: int) -> str:
    with pytest.raises(ConfigError) as refused:
        FsdpBackend(folder, sequence_parallel_size=size)
    return str(refused.value)


def test_a_model_that_cannot_be_called_so_is_refused_on_every_rank(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", BloomConfig(vocab_size=260, hidden_size=64, n_layer=2, n_head=4))
    assert not list(sequence_mistakes(AutoConfig.from_pretrained(folder), 2)), "nothing in its configuration says it"
    for told in run_ranks(2, refusal, folder, 2, folder=tmp_path):
        assert "BloomForCausalLM does not run with rows" in told
        assert told.endswith("Set sequence_parallel_size: 1.")


def refusal_of_a_state(rank: int, folder: str) -> str:
    """Of a model whose layers run on, where nothing in its configuration says so."""
    with patch.object(sequence_attention, "sequence_mistakes", return_value=[]):
        return refusal(rank, folder, 2)


def test_a_model_that_gives_other_numbers_is_refused_on_every_rank(tmp_path: Path) -> None:
    """The first rank finds what one process finds: what runs on reaches the second rank alone."""
    folder = architectures.save("qwen3_next", tmp_path / "model")
    told = run_ranks(2, refusal_of_a_state, folder, folder=tmp_path)
    assert ["one process gives other numbers" in one for one in told] == [False, True]
    assert "another worker found other numbers" in told[0]


def test_ranks_that_are_no_multiple_are_refused(folders: dict[str, str], tmp_path: Path) -> None:
    assert "does not divide the 1 workers" in refusal(0, folders["qwen3"], 2)
    for told in run_ranks(3, refusal, folders["qwen3"], 2, folder=tmp_path):
        assert "does not divide the 3 workers of the role. Start a multiple of 2 workers" in told


def test_rows_of_fewer_tokens_than_ranks_are_padded(folders: dict[str, str], tmp_path: Path) -> None:
    samples = samples_of((2, 3))
    alone = FsdpBackend(folders["qwen3"]).token_logps(samples, micro_batch_size=2).values
    for found in run_ranks(4, short_scores, folders["qwen3"], samples, folder=tmp_path):
        np.testing.assert_allclose(found, alone, atol=1e-5)


def short_scores(rank: int, folder: str, samples: Samples) -> np.ndarray:
    backend = FsdpBackend(folder, sequence_parallel_size=4)
    assert not len(backend.token_logps(samples[:0], micro_batch_size=2))
    return backend.token_logps(samples, micro_batch_size=2).values
