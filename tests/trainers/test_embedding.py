"""Embedding models and rerankers: how ms-swift's commands reach them, what they refuse, and what becomes of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import BertConfig, XLMRobertaConfig

from rayhelper import ConfigError
from tests.golden.tiny import save_tiny, tiny_tokenizer
from trainers.batch import Ragged
from trainers.commands import command_named, task_of
from trainers.configuration.others.ms_swift import spelled
from trainers.configuration.reading.command_line import given_keys, load_config
from trainers.data.texts.groups import Groups, group_mistake, members_of, tokenize_groups
from trainers.embedding.config import EmbeddingConfig
from trainers.embedding.correlations import correlations, ranks
from trainers.embedding.sentence_files import SentenceFiles, sentence_files, write_sentence_files
from trainers.embedding.texts import TextEncoder
from trainers.embedding.trainer import EmbeddingTrainer, with_hard_negatives
from trainers.reranking.config import RerankingConfig
from trainers.reranking.texts import INSTRUCTION, JUDGE, PairEncoder
from trainers.reranking.trainer import RerankingTrainer, answer_ids, drawn

# ms-swift's examples/train/embedding/qwen3/qwen3_emb.sh, examples/train/reranker/train_generative_reranker_listwise.sh
COMMON = "--split_dataset_ratio 0.05 --eval_strategy steps --output_dir output --eval_steps 100 --num_train_epochs 1"
EMBEDDING = (
    f"--model Qwen/Qwen3-Embedding-4B --task_type embedding --dataset sentence-transformers/stsb:positive {COMMON}"
)
EMBEDDING += " --loss_type infonce --padding_free true --dataloader_drop_last true --tuner_type lora --deepspeed zero2"
RERANKER = f"--model Qwen/Qwen3-Reranker-4B --dataset MTEB/scidocs-reranking {COMMON} --label_names labels"


def read(words: str) -> Any:
    command, arguments = spelled(["swift", "sft", *words.split()])
    found = command_named(command, None, task_of(given_keys(arguments, [])[0].values))
    return load_config(found.config_type, arguments), found.trainer


def test_commands_and_variables_of_ms_swift_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"INFONCE_TEMPERATURE": "0.02", "INFONCE_MASK_FAKE_NEGATIVE": "1", "INFONCE_HARD_NEGATIVES": "3"}
    variables |= {"MAX_NEGATIVE_SAMPLES": "4", "LISTWISE_RERANKER_TEMPERATURE": "0.5"}
    variables |= {"GENERATIVE_RERANKER_POSITIVE_TOKEN": "true", "INFONCE_FAKE_NEG_MARGIN": "0.2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config, trainer = read(EMBEDDING)
    assert trainer is EmbeddingTrainer
    assert (config.infonce_temperature, config.infonce_mask_fake_negative) == (0.02, True)
    assert (config.infonce_hard_negatives, config.infonce_fake_neg_margin) == (3, 0.2)
    assert (config.lora_dropout, config.disable_dropout, config.truncation_mode) == (0.05, False, "drop")
    assert read(f"{EMBEDDING} --infonce_temperature 0.3")[0].infonce_temperature == 0.3
    config, trainer = read(f"{RERANKER} --task_type generative_reranker --loss_type listwise_reranker")
    assert trainer is RerankingTrainer
    assert (config.max_negative_samples, config.listwise_reranker_temperature) == (4, 0.5)
    assert config.generative_reranker_positive_token == "true"
    config, _ = read(f"{RERANKER} --task_type reranker --loss_type pointwise_reranker")  # which does not read the last
    assert (config.is_generative, config.listwise_reranker_temperature) == (False, 1.0)


def test_variables_say_nothing_in_a_file_of_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFONCE_TEMPERATURE", "0.02")
    assert load_config(EmbeddingConfig, ["--model", "m", "--dataset", "d"]).infonce_temperature == 0.1


@pytest.mark.parametrize(
    ("config_type", "keys", "told"),
    [
        (EmbeddingConfig, {"loss_type": "contrastive", "infonce_temperature": 0.5}, "loss_type is contrastive"),
        (EmbeddingConfig, {"margin": 0.1}, "margin is 0.1, but loss_type is infonce"),
        (EmbeddingConfig, {"infonce_use_batch": False, "infonce_include_qq": True}, "infonce_use_batch is false"),
        (EmbeddingConfig, {"infonce_fake_neg_margin": 0.3}, "infonce_mask_fake_negative is false"),
        (EmbeddingConfig, {"mrl_dims": {"a": 1.0}}, "mrl_dims holds a: 1.0"),
        (EmbeddingConfig, {"token_budget": "auto"}, "Dropout would then differ between the two passes"),
        (
            EmbeddingConfig,
            {"backend": "megatron", "tuner_type": "lora"},
            "trains all weights of embedding models, and no adapter",
        ),
        (EmbeddingConfig, {"use_chat_template": False, "end_token": "x"}, "use_chat_template is false"),
        (RerankingConfig, {"listwise_reranker_temperature": 0.5}, "loss_type is pointwise_reranker"),
        (RerankingConfig, {"instruction": "x"}, "task_type is reranker"),
        (RerankingConfig, {"system": "x"}, "Write instruction"),
        (RerankingConfig, {"task_type": "generative_reranker", "use_chat_template": False}, "Remove use_chat_template"),
    ],
)
def test_keys_that_nobody_reads_are_refused(config_type: Any, keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config_type(model="m", dataset="d", **keys)


def test_models_that_would_be_read_wrongly_are_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    for name, made in (("bert", BertConfig), ("roberta", XLMRobertaConfig)):
        kinds = {} if name == "bert" else {"type_vocab_size": 1}
        made(**sizes, num_attention_heads=2, **kinds).save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    rows = [{"query": "a", "positive": "b"}]
    typed = RerankingConfig(model=str(tmp_path / "bert"), dataset=rows)
    with pytest.raises(ConfigError, match="needs token types for query and document"):
        RerankingTrainer.check(typed, None)
    RerankingTrainer.check(RerankingConfig(model=str(tmp_path / "roberta"), dataset=rows), None)
    of_roberta: dict[str, Any] = {"model": str(tmp_path / "roberta"), "dataset": rows}
    packed = RerankingConfig(**of_roberta, packing=True, max_length=32)
    with pytest.raises(ConfigError, match="packing is True"):
        RerankingTrainer.check(packed, None)
    asked = RerankingConfig(**of_roberta, task_type="generative_reranker")
    with pytest.raises(ConfigError, match="writes no answer"):
        RerankingTrainer.check(asked, None)
    joined = EmbeddingConfig(model=str(tmp_path / "bert"), dataset=rows, padding_free=True)
    with pytest.raises(ConfigError, match="attends to later tokens"):
        EmbeddingTrainer.check(joined, None)


def turn(text: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


ROWS: dict[str, dict[str, Any]] = {
    "ms-swift": {"messages": turn("q"), "positive_messages": [turn("p")], "negative_messages": [turn("n"), turn("m")]},
    "MTEB": {"query": "q", "positive": ["p"], "negative": ["n", "m"]},
    "sentence-transformers": {"anchor": "q", "positive": "p", "negative_1": "n", "negative_2": "m"},
}


@pytest.mark.parametrize("form", ROWS)
def test_rows_of_others_have_the_same_members(form: str) -> None:
    assert group_mistake(ROWS[form]) is None
    found = members_of(ROWS[form])
    assert found.anchor.messages == turn("q")
    assert [one.messages for one in found.positives] == [turn("p")]
    assert [one.messages for one in found.negatives] == [turn("n"), turn("m")]
    pair = members_of({"sentence1": "a", "sentence2": "b", "score": 0.8})
    assert (pair.positives[0].messages, pair.label) == (turn("b"), 0.8)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": turn("q")}, "no positive"),
        ({"positive": "p"}, "no anchor"),
        ({"query": "q", "positive": []}, "no positive"),
        ({"query": "q", "positive": "p", "label": "x"}, "'x' is not a number"),
        ({"messages": turn("<image>"), "images": ["a.png"], "positive": "p"}, "which this model cannot read"),
        ({"messages": [{"role": "user"}], "positive": "p"}, "message 0 has no content"),
    ],
)
def test_broken_rows_are_told(row: dict[str, Any], told: str) -> None:
    mistake = group_mistake(row)
    assert mistake is not None
    assert told in mistake[1]


def test_texts_are_read_as_they_are_or_by_the_template() -> None:
    tokenizer = tiny_tokenizer()
    members = members_of({"messages": [*turn("be brief", "system"), *turn("q")], "positive_messages": [turn("pp")]})
    plain = TextEncoder(tokenizer, False, None, "drop", system="say")(members)
    assert [tokenizer.decode(ids) for ids, _ in plain] == ["be brief q", "say pp"]
    told = TextEncoder(tokenizer, True, None, "drop", end_id=3)(members)
    assert tokenizer.decode(told[1][0]) == "<|im_start|>user\npp<|im_end|>\n<|im_start|>assistant\n<|endoftext|>"
    rows = Dataset.from_list([ROWS["MTEB"], {"query": "q" * 9, "positive": ["p"], "negative": []}])
    groups = tokenize_groups(rows, TextEncoder(tokenizer, False, 5, "drop"), max_length=5, drops=True)
    assert [row.tolist() for row in groups.lengths] == [[1, 1, 1, 1]]
    cut = tokenize_groups(rows, TextEncoder(tokenizer, False, 5, "keep_start"), max_length=5, drops=False)
    assert [row.tolist() for row in cut.lengths] == [[1, 1, 1, 1], [5, 1]]


def test_a_question_is_qwen3_rerankers() -> None:
    """With the nearest instruction; its last token is the answer, which is read off before it."""
    tokenizer = tiny_tokenizer()
    row = {"messages": [*turn("find", "system"), *turn("q")], "positive_messages": [turn("p", "assistant")]}
    row |= {"negative_messages": [[*turn("seek", "system"), *turn("n", "assistant")]]}
    right, wrong = (tokenizer.decode(ids) for ids, _ in PairEncoder(tokenizer, True, answer=99)(members_of(row)))
    for text, instruction, document in ((right, "find", "p"), (wrong, "seek", "n")):
        body = f"<Instruct>: {instruction}\n<Query>: q\n<Document>: {document}"
        end = "<|im_end|>\n<|im_start|>assistant\n" + tokenizer.decode([99])
        assert text == f"<|im_start|>system\n{JUDGE}<|im_end|>\n<|im_start|>user\n{body}{end}"
    ((ids, _),) = PairEncoder(tokenizer, True, answer=99)(members_of({"query": "q", "positive": "p"}))
    assert f"<Instruct>: {INSTRUCTION}\n" in tokenizer.decode(ids)
    with pytest.raises(ConfigError, match="'yes' is not a token of the model"):
        answer_ids(RerankingConfig(model="m", dataset="d", task_type="generative_reranker"), tokenizer)


def numbered(counts: list[int], right: list[int]) -> Groups:
    """Rows whose documents have one token, their number."""
    ids = Ragged.of([np.arange(count) for count in counts], np.int64)
    ones = Ragged.of([np.ones(count, np.int64) for count in counts], np.int64)
    return Groups(ids, ones, num_positives=np.array(right))


def test_documents_are_drawn_by_seed_and_step() -> None:
    rows = numbered([6, 3, 1], [2, 1, 1])
    config = RerankingConfig(model="m", dataset="d", max_positive_samples=2, max_negative_samples=3)
    found = drawn(rows, config, (1, 2))
    assert [len(ids) for ids in found.input_ids] == [4, 4, 3, 1]
    assert {int(ids[0]) for ids in list(found.input_ids)[:2]} == {0, 1}
    assert all(set(ids[1:].tolist()) <= {2, 3, 4, 5} for ids in list(found.input_ids)[:2])
    assert sorted(found.input_ids[2][1:].tolist()) == [1, 2]
    assert drawn(rows, config, (1, 2)) == found
    assert any(drawn(rows, config, (1, step)) != found for step in range(3, 6))


def test_hard_negatives_are_the_first_ones_or_some_again() -> None:
    found = with_hard_negatives(numbered([5, 3], [1, 1]), 2, (0, 1))
    assert [ids.tolist() for ids in found.input_ids] == [[0, 1, 2, 3], [0, 1, 2, 2]]


def test_files_of_sentence_transformers_are_read_and_kept(tmp_path: Path) -> None:
    model, final = tmp_path / "model", tmp_path / "final"
    (model / "1_Pooling").mkdir(parents=True)
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (model / "modules.json").write_text(json.dumps([{"path": path, "type": f"a.b.{kind}"} for path, kind in kinds]))
    (model / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True, "other": 1}))
    (model / "config_sentence_transformers.json").write_text('{"prompts": {"query": "Q: "}}')
    files = sentence_files(str(model))
    assert files == SentenceFiles("cls", normalize=False, folders=("", "1_Pooling"))
    final.mkdir()
    write_sentence_files(final, str(model), files, "cls", 32)
    for name in ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"):
        assert (final / name).read_text() == (model / name).read_text()
    write_sentence_files(final, str(model), files, "mean", 32)
    assert sentence_files(str(final)).pooling == "mean"
    assert sentence_files(save_tiny(tmp_path / "plain")) == SentenceFiles()
    (model / "1_Pooling" / "config.json").write_text('{"pooling_mode": "weightedmean"}')
    with pytest.raises(ConfigError, match="has pooling by weightedmean"):
        sentence_files(str(model))
    (model / "modules.json").write_text('[{"path": "2_Dense", "type": "a.Dense"}]')
    with pytest.raises(ConfigError, match="has a part Dense"):
        sentence_files(str(model))


def test_equal_numbers_share_their_rank_and_constants_have_no_correlation() -> None:
    assert ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
    same = np.ones((3, 2))
    assert np.isnan(correlations(same, same, np.array([0.0, 1.0, 0.5]))["pearson_cosine"])
