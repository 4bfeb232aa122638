"""Candidates of rows: of a local engine, of an OpenAI-compatible server, or of an earlier run's output alone.

    sampler = Sampler(config)                      # role sampler
    sampler.build(model, api_key)                  # every worker of the role has an engine, a client or neither
    candidates = sampler.sample(questions)         # Candidates, one per row

A row's candidates depend on the seed and the row's place in the dataset, not on the worker, nor on the rows beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from rayhelper import ConfigError, DeviceGroups, RayHelper
from trainers.batch import Prompts, Ragged
from trainers.data.images.pictures import Pictures
from trainers.data.images.processor import ImageReader
from trainers.data.rows import prompt_of, tokenize_prompts
from trainers.parts.checks import check_model_fits, is_on_cpu
from trainers.parts.engine import vllm_engine
from trainers.parts.inputs import image_reader
from trainers.parts.models import resolve_dtype
from trainers.parts.tokenizer import load_tokenizer
from trainers.rewards.models import names_reward_model
from trainers.rollout.base import Engine, Sampling
from trainers.rollout.hf.engine import HfEngine
from trainers.rollout.hf.settings import check_stop_tokens
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
            images = image_reader(config, model, tokenizer)
            self.kind = LocalSampler(local_engine(config, model, tokenizer), tokenizer, config, images)

    @RayHelper.function(group="sampler", dispatch="slice", collect="flatten")
    def sample(self, questions: Questions) -> Candidates:
        """N candidates of every row, or the reasons why there are fewer."""
        return self.kind.sample(questions)

    @RayHelper.function(group="sampler")
    def close(self) -> None:
        """Frees the engine, if it is vLLM's."""
        if isinstance(self.kind, LocalSampler):
            self.kind.close()


def local_engine(config: SamplingConfig, model: str, tokenizer: Any) -> Engine:
    """The engine of this worker, with the model as it is on disk."""
    if config.engine == "hf":
        return HfEngine(
            model,
            tokenizer,
            batch_size=config.rollout_batch_size,
            dtype=resolve_dtype(config),
            model_init_kwargs=config.model_init_kwargs,
            trust_remote_code=config.trust_remote_code,
            processing=config.image_processor_kwargs,
        )
    settings, size = engine_settings(config, judges_beside=judges_beside(config))
    return vllm_engine(config, model, tokenizer, size, engine_kwargs=settings, key="engine_kwargs")


def check_vllm(config: SamplingConfig, groups: DeviceGroups | None) -> None:
    """Raises ConfigError for a field that vLLM lacks, and for workers that cannot hold the model together."""
    from trainers.rollout.vllm.settings import check_model_on_cpu, checked_engine_kwargs
    from trainers.rollout.vllm.vision.features import check_sees

    given = dict(config.engine_kwargs)
    size = given.pop("tensor_parallel_size", 1)
    said = f"engine_kwargs: tensor_parallel_size={size}"
    if type(size) is not int or size < 1:
        raise ConfigError(f"{said} is not a number of workers")
    checked_engine_kwargs(given, key="engine_kwargs")
    check_model_fits(said, size, groups, "sampler")
    check_sees(config.model, "sampler_engine", trust_remote_code=config.trust_remote_code)
    if is_on_cpu(groups, "sampler"):
        told: dict[str, Any] = {"dtype": resolve_dtype(config), "trust_remote_code": config.trust_remote_code}
        check_model_on_cpu(config.model, key="sampler_engine", **told)


def engine_settings(config: SamplingConfig, *, judges_beside: bool) -> tuple[dict[str, Any], int]:
    """Fields of vLLM's EngineArgs, and the workers that hold one model together.

    ``judges_beside``: a reward model is on the device of this worker.
    """
    settings: dict[str, Any] = {"gpu_memory_utilization": 0.5 if judges_beside else 0.9}
    if config.max_prompt_length is not None:
        settings["max_model_len"] = config.max_prompt_length + config.max_completion_length
    settings |= config.engine_kwargs
    return settings, settings.pop("tensor_parallel_size", 1)


def judges_beside(config: SamplingConfig) -> bool:
    """Whether a reward model is on the device of this worker of role sampler."""
    worker = RayHelper.current()
    models = {role for role, spec in (("prm", config.prm_model), ("orm", config.orm_model)) if names_reward_model(spec)}
    return bool(models) if not worker.roles else bool(models & {*worker.roles, *worker.neighbours})


class LocalSampler:
    """Candidates of an engine in this process: vLLM has all rows at once, hf one row after the other.

    ``images``: of a model that sees pictures.
    """

    def __init__(
        self, engine: Engine, tokenizer: Any, config: SamplingConfig, images: ImageReader | None = None
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        self.images = images
        check_stop_tokens(config.stop_token_ids, tokenizer)
        self.sampling = Sampling(
            max_completion_length=config.max_completion_length,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            stop_token_ids=tuple(config.stop_token_ids),
            generation_kwargs=config.engine_kwargs if config.engine == "hf" else {},
        )

    def sample(self, questions: Questions) -> Candidates:
        return candidates_of(questions, self.config.num_return_sequences, self._complete)

    def _complete(self, rows: list[tuple[int, dict[str, Any]]]) -> list[Found]:
        count, asked = self.config.num_return_sequences, [self._prompt(row) for _, row in rows]
        found: list[Found] = [([], [one] * count if isinstance(one, str) else [], 0) for one in asked]
        places = [place for place, one in enumerate(asked) if not isinstance(one, str)]
        for together in [places] if self.config.engine == "vllm" else [[place] for place in places]:
            prompt_ids = [asked[place] for place in together for _ in range(count)]
            seen = [rows[place][1] for place in together] if self.images is not None else None
            drawn = self._drawn(prompt_ids, [rows[place][0] for place in together], seen)
            for place, ids in zip(together, drawn, strict=True):
                texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
                kept = [text for text in texts if text.strip()]
                found[place] = kept, [EMPTY] * (count - len(kept)), sum(map(len, ids))
        return found

    def _drawn(
        self, prompt_ids: list[Any], positions: list[int], rows: list[dict[str, Any]] | None = None
    ) -> list[list[Any]]:
        """The completions of rows, as token ids. What a row draws depends on the seed and its position alone.

        ``rows``: themselves, if the model sees pictures.
        """
        count, seed = self.config.num_return_sequences, self.config.seed
        if not prompt_ids:
            return []
        pictures: list[Pictures] | None = None
        if rows is not None and self.images is not None:
            pictures = [one for row in rows for one in [self.images.prompt(row)[1]] * count]
        prompts = Prompts(Ragged.of(prompt_ids, np.int64), images=pictures)
        if self.config.engine == "vllm":
            numbers = np.array([position * count + k for position in positions for k in range(count)])
            rollouts = self.engine.generate(dataclasses.replace(prompts, numbers=numbers), self.sampling, seed=seed)
        else:
            rollouts = self.engine.generate(prompts, self.sampling, seed=seed_of(seed, *positions))
        ids = list(rollouts.completion_ids)
        return [ids[start : start + count] for start in range(0, len(ids), count)]

    def _prompt(self, row: dict[str, Any]) -> list[int] | str:
        """The token ids of a row's prompt, or why it has none that could be completed."""
        if not (isinstance(prompt_of(row), str) or self.tokenizer.chat_template):
            raise ConfigError(
                "the rows are conversations, but the tokenizer has no chat_template: set one, or use texts"
            )
        mistake = None if self.images is None else self.images.mistake(row)
        if mistake is not None:
            return ": ".join(mistake)
        try:
            (prompt_ids,) = tokenize_prompts(
                [row],
                self.tokenizer,
                max_prompt_length=self.config.max_prompt_length,
                truncation="error",
                chat_template_kwargs=self.config.chat_template_kwargs,
                images=self.images,
            )
            if not prompt_ids:
                raise ValueError("the prompt has no tokens")
            room = self.room()
            if room is not None and len(prompt_ids) > room:
                raise ValueError(
                    f"the prompt has {len(prompt_ids)} tokens, and vLLM's max_model_len has room for {room}"
                )
        except (ValueError, TemplateError) as error:
            return str(error).replace("the prompt of row 0", "the prompt")
        return prompt_ids

    def room(self) -> int | None:
        """Tokens that a prompt may have beside a completion; None: the engine has no limit of its own."""
        if self.config.engine != "vllm":
            return None
        engine: Any = self.engine
        return int(engine.engine.model_config.max_model_len) - self.config.max_completion_length

    def close(self) -> None:
        """Frees what vLLM holds."""
        if self.config.engine == "vllm":
            engine: Any = self.engine
            engine.close()


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
