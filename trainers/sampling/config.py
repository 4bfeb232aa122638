"""Sampling's keys, and which values of them have a meaning. Names are ms-swift's. Imports no torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from rayhelper import ConfigError
from trainers.configuration.completion import check_stop_token_ids
from trainers.configuration.reading.secrets import masked
from trainers.configuration.roles import Role
from trainers.configuration.shared import RunConfig, unread
from trainers.configuration.values import at_least, check_seconds, is_there

OUTPUT_TYPES = (".jsonl", ".parquet")
OF_REQUESTS = ("max_concurrent_requests", "max_retries", "request_timeout_s")  # keys of a server's requests
SEQUENCES_AT_ONCE = 256  # of vLLM, in a batch of rows: its own default of sequences that run together
ROUNDS_OF_REQUESTS = 4  # in a batch of rows that a server answers, so that its slowest request holds up little

LOCAL = ("hf", "vllm")  # engines in the sampler's workers

# The keys that decide what a row becomes: a run goes on only under the same ones.
DECIDING = (
    *("model", "sampler_type", "sampler_engine", "prm_model", "orm_model", "num_return_sequences", "n_best_to_keep"),
    *("prm_threshold", "easy_query_threshold", "temperature", "top_p", "top_k", "max_completion_length"),
    *("engine_kwargs", "chat_template", "chat_template_kwargs", "system", "dtype", "seed", "dataset_seed"),
    *("stop_token_ids", "shuffle_dataset", "data_range", "rollout_batch_size", "tokenizer", "max_prompt_length"),
    *("max_pixels", "image_processor_kwargs"),
)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(RunConfig):
    """The keys of sampling and distillation beside those of any run."""

    NAMES: ClassVar = ("sampling", "sample")
    ROLES: ClassVar = {
        "sampler": Role("generates"),
        "prm": Role("judges", models=("prm_model",), host="sampler"),
        "orm": Role("judges", models=("orm_model",), host="sampler"),
    }

    model: str = ""
    """Folder, hub name or a plugin's model. With engine client: the model's name on the server. Engine no needs
    none."""
    output_dir: str = "outputs/sampling"
    """Folder for the samples, their ledger, metrics and the resolved configuration."""
    logging_steps: int = 10
    """Batches between lines on the console. The metrics files hold every batch."""
    shuffle_dataset: bool = False
    """Process the rows in a random order, drawn from ``dataset_seed``."""

    # Rows
    dataset_seed: int | None = None
    """The random seed for the order of rows. null: ``seed``."""
    data_range: list[int] = field(default_factory=list)
    """[shard, total]: process only this shard (from 0) of the rows, which are divided into total near-equal shards.
    Empty: take all."""
    num_sampling_batch_size: int | None = None
    """Rows per batch. null: 1. With client: enough for ``max_concurrent_requests``. With vllm: enough for 256
    candidates."""
    num_sampling_batches: int | None = None
    """Batches of rows to process. null: all."""

    # Sampling
    sampler_type: Literal["sample", "distill"] = "sample"
    """sample: unchanged answers. distill: a server's reasoning in <think>, and its answer in <answer>."""
    sampler_engine: Literal["hf", "transformers", "vllm", "client", "no"] | bool = "hf"
    """hf (or transformers): generate() of transformers. vllm: vLLM, all rows of a batch at once. client: an
    OpenAI-compatible server. no (YAML reads it as false): only completions from ``cache_files``."""
    num_return_sequences: int = 64
    """Candidates per row, N."""
    temperature: float = 1.0
    """Logits are divided by it. 0: greedy."""
    top_p: float = 1.0
    """Draw from the most probable tokens that hold this share of the probability. 1: from all."""
    top_k: int = 0
    """Draw only from this number of the most probable tokens. 0: from all."""
    max_completion_length: int = 2048
    """Tokens of a candidate, the stop token included."""
    stop_token_ids: list[int] = field(default_factory=list)
    """hf and vllm: further tokens that end a candidate, in addition to the end-of-sequence tokens."""
    max_prompt_length: int | None = None
    """Largest number of tokens of a prompt. Rows with a longer prompt fail."""
    rollout_batch_size: int | None = None
    """Candidates that hf completes at once. null: all candidates of a row."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """hf: further fields of transformers' GenerationConfig. vllm: fields of vLLM's EngineArgs, such as
    {tensor_parallel_size: 2}. client: further fields of a request. null removes a field."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as {enable_thinking: false}."""
    max_pixels: int | None = None
    """With hf and a vision model: largest number of pixels. Larger pictures are made smaller. null: the limit of the
    model's processor."""
    image_processor_kwargs: dict[str, Any] = field(default_factory=dict)
    """With hf and a vision model: arguments of the model's image processor. They override its own."""
    image_urls: bool = False
    """With hf and a vision model: download pictures from http addresses. false: rows with an address fail."""
    cache_files: list[str] = field(default_factory=list)
    """Outputs of earlier runs. If they have ``num_return_sequences`` completions for a row, the row uses these."""

    # Server
    base_url: str = ""
    """Base address of the server's API, such as http://localhost:8000/v1."""
    api_key: str | None = field(default=None, repr=False)
    """API key of the server. null: OPENAI_API_KEY. No file or log contains it."""
    max_concurrent_requests: int = 16
    """Requests in flight at the server, over all workers."""
    max_retries: int = 5
    """How often a request is repeated after 429, 5xx or a timeout. Each pause is twice the last one."""
    request_timeout_s: float = 600.0
    """Seconds that the server's answer may take."""

    # Choosing
    prm_model: Any = None
    """Source of process rewards: a reward function (as in ``reward_funcs``), or a reward model's folder or name."""
    orm_model: Any = None
    """Source of outcome rewards, in the same forms as prm_model. A candidate is correct if its reward is positive."""
    reward_batch_size: int = 64
    """Candidates that a reward model scores at once."""
    n_best_to_keep: int = 5
    """Largest number of positives per row. Without prm_model and orm_model, all candidates are kept."""
    prm_threshold: float = 0.0
    """A candidate is a positive only if its process reward is above this value."""
    easy_query_threshold: float | None = None
    """Drop rows if at least this share of their candidates is correct. null: keep all rows."""

    # Output
    output_file: str | None = None
    """A .jsonl or .parquet file in ``output_dir``. null: samples.jsonl, or samples-SHARD-of-TOTAL.jsonl."""
    resume: bool = False
    """Continue an earlier run of this configuration that did not finish."""
    retry_failed: bool = False
    """With ``resume``: also try failed rows again."""
    override_exist_file: bool = False
    """Start over even if an output file exists."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sampling(self)

    @property
    def engine(self) -> str:
        """``sampler_engine`` under our name: hf, vllm, client or no."""
        if isinstance(self.sampler_engine, bool):
            return "no"
        return "hf" if self.sampler_engine == "transformers" else self.sampler_engine

    @property
    def rows_a_batch(self) -> int:
        if self.num_sampling_batch_size is not None:
            return self.num_sampling_batch_size
        if self.engine == "vllm":
            return max(1, SEQUENCES_AT_ONCE // self.num_return_sequences)
        if self.engine != "client":
            return 1
        return max(1, ROUNDS_OF_REQUESTS * self.max_concurrent_requests // self.num_return_sequences)

    @property
    def output_path(self) -> Path:
        shard = "-{}-of-{}".format(*self.data_range) if self.data_range else ""
        return Path(self.output_dir) / (self.output_file or f"samples{shard}.jsonl")

    @property
    def ledger_path(self) -> Path:
        """What became of every row; beside the output."""
        return self.output_path.with_name(self.output_path.name + ".ledger")

    @property
    def log_dir(self) -> Path:
        """Where config.yaml and metrics.jsonl go: shards that run at once have their own."""
        shard = "shard-{}-of-{}".format(*self.data_range) if self.data_range else ""
        return Path(self.output_dir) / shard

    @property
    def run_folder(self) -> Path:
        return self.log_dir

    def deciding(self) -> dict[str, Any]:
        """The values of the keys that decide what a row becomes, as JSON gives them back."""
        values = {name: getattr(self, name) for name in DECIDING} | {"sampler_engine": self.engine}
        if not self.stop_token_ids:
            del values["stop_token_ids"]  # ledgers from before there was such a key go on
        plain: dict[str, Any] = json.loads(
            json.dumps(masked(values), default=lambda value: getattr(value, "__name__", "object"))
        )
        return plain


def check_sampling(config: SamplingConfig) -> None:
    """Raises ConfigError naming the first key whose value has no meaning."""
    at_least(config, 1, "num_return_sequences", "n_best_to_keep", "num_sampling_batch_size", "num_sampling_batches")
    at_least(config, 1, "max_completion_length", "max_prompt_length", "rollout_batch_size", "reward_batch_size")
    at_least(config, 1, "max_concurrent_requests", "max_pixels")
    at_least(config, 0, "temperature", "top_k", "max_retries", "dataset_seed")
    check_stop_token_ids(config.stop_token_ids)
    if not 0 < config.top_p <= 1:
        raise ConfigError(f"top_p must lie in (0, 1], got {config.top_p}; 1 keeps every token")
    check_seconds(config, "request_timeout_s")
    if math.isnan(config.prm_threshold):
        raise ConfigError("prm_threshold is not a number")
    _check_range(config.data_range)
    _check_engine(config)
    _check_choosing(config)
    if config.output_path.suffix not in OUTPUT_TYPES:
        raise ConfigError(f"output_file must end in {' or '.join(OUTPUT_TYPES)}, got {config.output_file!r}")
    if config.resume and config.override_exist_file:
        raise ConfigError("resume continues the file and override_exist_file starts over; set one of them")
    if config.retry_failed and not config.resume:
        raise ConfigError("retry_failed needs a run that resumes: also set resume")


def _check_range(data_range: list[int]) -> None:
    if data_range and not (len(data_range) == 2 and 0 <= data_range[0] < data_range[1]):
        raise ConfigError(f"data_range must be [shard, total] with shard from 0 to total - 1, got {data_range}")


def _check_engine(config: SamplingConfig) -> None:
    if config.sampler_engine is True:
        raise ConfigError("sampler_engine must be one of hf, vllm, client, no; got true")
    if not config.model and config.engine != "no":
        raise ConfigError("model must be given: a folder, a hub name, or with sampler_engine client the server's name")
    if config.engine == "no" and not config.cache_files:
        raise ConfigError("sampler_engine no samples nothing; name the outputs of an earlier run in cache_files")
    if config.sampler_type == "distill" and config.engine in LOCAL:
        raise ConfigError("sampler_type distill requests the server's reasoning; set sampler_engine client")
    if config.stop_token_ids and config.engine not in LOCAL:
        raise ConfigError(
            f"stop_token_ids is for sampler_engine hf and vllm; sampler_engine is {config.sampler_engine}. A server "
            "takes engine_kwargs: {stop: [text]}."
        )
    if config.engine == "client":
        if not config.base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"sampler_engine client needs base_url, such as http://localhost:8000/v1; got {config.base_url!r}"
            )
        for name in ("base_url", "api_key"):
            if name in config.engine_kwargs:
                raise ConfigError(f"{name} is a separate key; remove it from engine_kwargs, which are written to files")
    elif config.base_url:
        raise ConfigError(f"base_url is for sampler_engine client; sampler_engine is {config.sampler_engine}")
    else:
        unread(config, f"sampler_engine is {config.engine}, which asks no server", *OF_REQUESTS)
    if config.engine != "hf":
        unread(config, f"sampler_engine is {config.engine}, which builds its own model", "model_init_kwargs")
    sees = config.max_pixels is not None or config.image_processor_kwargs or config.image_urls
    if config.engine not in LOCAL and sees:
        raise ConfigError(
            "max_pixels, image_processor_kwargs and image_urls are for sampler_engine hf and vllm; sampler_engine is "
            f"{config.sampler_engine}. Other engines take no pictures. Remove them."
        )
    if config.engine == "vllm" and config.rollout_batch_size is not None:
        raise ConfigError("rollout_batch_size is for sampler_engine hf; vllm takes engine_kwargs: {max_num_seqs: N}")
    if config.temperature == 0 and config.num_return_sequences > 1 and config.engine in LOCAL:
        raise ConfigError(
            f"temperature 0 gives {config.num_return_sequences} times the same candidate; raise it, or set "
            "num_return_sequences: 1"
        )
    for file in config.cache_files:
        if not any(mark in file for mark in "*?[") and not is_there(file, Path.is_file):
            raise ConfigError(f"cache_files: there is no file {file!r} (looked from {Path.cwd()})")


def _check_choosing(config: SamplingConfig) -> None:
    if config.easy_query_threshold is not None:
        if not 0 < config.easy_query_threshold <= 1:
            raise ConfigError(f"easy_query_threshold must lie in (0, 1], got {config.easy_query_threshold}")
        if config.orm_model is None:
            raise ConfigError(
                "easy_query_threshold counts correct candidates, but there is no orm_model to find them. Add one."
            )
    if config.prm_threshold != 0 and config.prm_model is None:
        raise ConfigError("prm_threshold is set, but there is no prm_model. Add one.")
