"""Candidates of rows: of a local engine, of an OpenAI-compatible server, or of an earlier run's output alone.

    sampler = Sampler(config)                      # role sampler
    sampler.build(model, api_key)                  # every worker of the role has an engine, a client or neither
    candidates = sampler.sample(questions)         # Candidates, one per row

A row's candidates depend on the seed and the row's place in the dataset, not on the worker, nor on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from rayhelper import ConfigError, RayHelper
from trainers.batch import Prompts, Ragged
from trainers.data.rows import prompt_of, tokenize_prompts
from trainers.parts.models import resolve_dtype
from trainers.parts.tokenizer import load_tokenizer
from trainers.rollout.base import Engine, Sampling
from trainers.rollout.hf import HfEngine, check_stop_tokens
from trainers.sampling.candidates import Candidates, Questions
from trainers.sampling.config import SamplingConfig
from trainers.sampling.openai_client import OpenAIClient, Reply

Found = tuple[list[str], list[str], int]  # a row's texts, its failures, the tokens that were sampled for both
EMPTY = "empty completion"


@RayHelper.worker(group="sampler")
class Sampler:
    """What samples, of role sampler: the kind that ``sampler_engine`` names."""

    def __init__(self, config: SamplingConfig) -> None:
        self.config = config

    @RayHelper.function(group="sampler")
    def build(self, model: str, api_key: str | None) -> None:
        """``api_key`` comes from the driver: its environment need not be the worker's."""
        config = self.config
        self.kind: CachedSampler | ClientSampler | LocalSampler
        if config.engine == "no":
            self.kind = CachedSampler(config)
        elif config.engine == "client":
            num_workers = RayHelper.current().shard.count
            client = OpenAIClient(
                config.base_url,
                api_key=api_key,
                max_concurrent_requests=max(1, config.max_concurrent_requests // num_workers),
                max_retries=config.max_retries,
                request_timeout_s=config.request_timeout_s,
            )
            self.kind = ClientSampler(client, config)
        else:
            tokenizer = load_tokenizer(config, model)
            engine = HfEngine(
                model,
                tokenizer,
                batch_size=config.rollout_batch_size,
                dtype=resolve_dtype(config),
                model_init_kwargs=config.model_init_kwargs,
                trust_remote_code=config.trust_remote_code,
            )
            self.kind = LocalSampler(engine, tokenizer, config)

    @RayHelper.function(group="sampler", dispatch="slice", collect="flatten")
    def sample(self, questions: Questions) -> Candidates:
        """N candidates of every row, or the reasons why there are fewer."""
        return self.kind.sample(questions)


class LocalSampler:
    """Candidates of an engine in this process: one call of it a row."""

    def __init__(self, engine: Engine, tokenizer: Any, config: SamplingConfig) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        check_stop_tokens(config.stop_token_ids, tokenizer)
        self.sampling = Sampling(
            max_completion_length=config.max_completion_length,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            stop_token_ids=tuple(config.stop_token_ids),
            generation_kwargs=config.engine_kwargs,
        )

    def sample(self, questions: Questions) -> Candidates:
        return candidates_of(
            questions, self.config.num_return_sequences, lambda rows: [self._complete(*row) for row in rows]
        )

    def _complete(self, position: int, row: dict[str, Any]) -> Found:
        count = self.config.num_return_sequences
        if not (isinstance(prompt_of(row), str) or self.tokenizer.chat_template):
            raise ConfigError(
                "the rows are conversations, but the tokenizer has no chat_template: set one, or use texts"
            )
        try:
            (prompt_ids,) = tokenize_prompts(
                [row],
                self.tokenizer,
                max_prompt_length=self.config.max_prompt_length,
                truncation="error",
                chat_template_kwargs=self.config.chat_template_kwargs,
            )
            if not prompt_ids:
                raise ValueError("the prompt has no tokens")
        except (ValueError, TemplateError) as error:
            return [], [str(error).replace("the prompt of row 0", "the prompt")] * count, 0
        prompts = Prompts(Ragged.of([prompt_ids] * count, np.int64))
        rollouts = self.engine.generate(prompts, self.sampling, seed=seed_of(self.config.seed, position))
        texts = self.tokenizer.batch_decode(list(rollouts.completion_ids), skip_special_tokens=True)
        kept = [text for text in texts if text.strip()]
        return kept, [EMPTY] * (count - len(kept)), len(rollouts.completion_ids.values)


class ClientSampler:
    """Candidates of a server: one request a candidate, those of all rows at once."""

    def __init__(self, client: OpenAIClient, config: SamplingConfig) -> None:
        self.client = client
        self.config = config

    def sample(self, questions: Questions) -> Candidates:
        return candidates_of(questions, self.config.num_return_sequences, self._complete)

    def _complete(self, rows: list[tuple[int, dict[str, Any]]]) -> list[Found]:
        count = self.config.num_return_sequences
        requests = [self._request(position, row, k) for position, row in rows for k in range(count)]
        replies = self.client.complete(requests)
        return [self._found(replies[start : start + count]) for start in range(0, len(replies), count)]

    def _found(self, replies: list[Reply]) -> Found:
        distills = self.config.sampler_type == "distill"
        texts = [distilled(reply) if distills else reply.text for reply in replies if reply.error is None]
        failures = [reply.error for reply in replies if reply.error is not None]
        return texts, failures, sum(reply.num_tokens for reply in replies)

    def _request(self, position: int, row: dict[str, Any], sample: int) -> dict[str, Any]:
        config = self.config
        prompt = prompt_of(row)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        request = {
            "model": config.model,
            "messages": [{k: v for k, v in message.items() if v is not None} for message in messages],
            "temperature": config.temperature,
            "top_p": config.top_p,
            "max_tokens": config.max_completion_length,
            "seed": seed_of(config.seed, position, sample) % 2**31,  # some servers read 32 bits with a sign
            **({"top_k": config.top_k} if config.top_k else {}),
            **({"chat_template_kwargs": config.chat_template_kwargs} if config.chat_template_kwargs else {}),
            **config.engine_kwargs,
        }
        return {name: value for name, value in request.items() if value is not None}


class CachedSampler:
    """No candidates beside those of an earlier run."""

    def __init__(self, config: SamplingConfig) -> None:
        self.count = config.num_return_sequences

    def sample(self, questions: Questions) -> Candidates:
        nothing: Found = ([], [f"cache_files hold no {self.count} completions of the row"] * self.count, 0)
        return candidates_of(questions, self.count, lambda rows: [nothing for _ in rows])


def candidates_of(
    questions: Questions, count: int, complete: Callable[[list[tuple[int, dict[str, Any]]]], list[Found]]
) -> Candidates:
    """The candidates of every row: cached ones, and for the other rows what ``complete`` finds."""
    found: list[Found] = [(cached or [], [], 0) for cached in questions.cached]
    todo = []
    for k, row in enumerate(questions.rows):
        if questions.cached[k] is None:
            try:
                prompt_of(row)
                todo.append(k)
            except ValueError as error:
                found[k] = [], [str(error)] * count, 0
    if todo:
        for k, new in zip(
            todo, complete([(int(questions.positions[k]), questions.rows[k]) for k in todo]), strict=True
        ):
            found[k] = new
    assert all(len(texts) + len(failures) == count for texts, failures, _ in found), "a row has N candidates"
    return Candidates(
        rows=questions.rows,
        texts=[texts for texts, _, _ in found],
        failures=[failures for _, failures, _ in found],
        num_tokens=np.array([num_tokens for _, _, num_tokens in found], np.int64),
    )


def distilled(reply: Reply) -> str:
    """What a student learns of a reply: ``<think>r</think>``, an empty line, ``<answer>a</answer>``.

    The answer alone where the server gave no reasoning.
    """
    if not reply.reasoning:
        return reply.text
    return f"<think>{reply.reasoning}</think>\n\n<answer>{reply.text}</answer>"


def seed_of(*numbers: int) -> int:
    """A seed of 32 bits for a row or a sample."""
    return int(np.random.SeedSequence(list(numbers)).generate_state(1)[0])
