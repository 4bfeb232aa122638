"""The keys that all trainers share, under the names of TRL and transformers, and what follows from them.

A trainer's own keys stand in a dataclass beside the trainer, which extends ``TrainConfig``. Reading them from YAML and
the command line is ``reading/command_line.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from rayhelper import ConfigError, DeviceGroups
from rayhelper.device_groups.keys import SECTION_KEYS
from rayhelper.planning.parallel_sizes import SIZE_KEYS, VLLM_KEY
from rayhelper.text import nearest
from trainers.backends.megatron.settings import MegatronSettings
from trainers.configuration.megatron import OF_FSDP, MegatronConfig, key_mistakes, settings_of
from trainers.configuration.packs import check_packing, micro_batch_tokens
from trainers.configuration.roles import WELL_KNOWN, Role
from trainers.configuration.saving import SavingConfig, saving_mistakes
from trainers.configuration.tuners import TunerConfig, check_tuner
from trainers.configuration.values import (
    at_least,
    check_choices,
    check_file,
    check_folder,
    check_schedule,
    check_seconds,
    check_source,
    check_values,
    is_there,
    one_of,
)
from trainers.configuration.vision import VisionConfig, check_vision
from trainers.data.held_out import Part
from trainers.run.trackers import BUILT_IN, NONE, check_installed

SEQUENCES_PER_STEP = "sequences a step"  # the name of that number in what a checkpoint says of the order of the data
PARALLEL_KEYS = tuple(key for key in SIZE_KEYS if key != VLLM_KEY)
OF_MEGATRON = tuple(one.name for one in fields(MegatronConfig))
OF_FSDP_INSTEAD = {  # what fsdp does in the place of a key of megatron
    **dict.fromkeys(PARALLEL_KEYS, " (fsdp_sharding_strategy: full_shard shards weights over all workers)"),
    **dict.fromkeys(
        ("param_offload", "grad_offload"),
        " (offload_model and offload_optimizer free memory for an engine, and fsdp_offload_params at all times)",
    ),
    **dict.fromkeys(
        (name for name in OF_MEGATRON if "recompute" in name), " (gradient_checkpointing recomputes layers)"
    ),
}
SET_BY_TRAINERS = ("device_map", "output_loading_info", "num_labels", "state_dict", "config")  # of from_pretrained


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The keys that every run has, whether it trains or not."""

    ROLES: ClassVar[Mapping[str, Role]] = WELL_KNOWN
    """The roles of the trainer, by name, the main one first; see ``roles.py``."""

    # Model
    model: str
    """Folder, hub name, or the name of a model that a plugin registered."""
    tokenizer: str | None = None
    """Folder or hub name. null: the model's tokenizer."""
    chat_template: str | None = None
    """A Jinja template, or a file that holds one. null: the tokenizer's template."""
    model_init_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of AutoModelForCausalLM.from_pretrained."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model or tokenizer."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The precision of the forward pass. auto: bfloat16 on GPUs that support it, else float32. Trained weights are
    float32."""

    # Data
    dataset: Any
    """JSONL, JSON, Parquet or CSV files (globs, lists), a folder, a hub name, a plugin's dataset, or rows."""
    dataset_split: str = "train"
    """The split of a folder or hub dataset to train on."""
    columns: dict[str, str] = field(default_factory=dict)
    """Columns to rename, from the data's names to RayHelper's names: {question: prompt}."""
    prompt_template: str | None = None
    """Writes ``prompt`` from the other columns: 'Question: {question}'."""
    system: str | None = None
    """System message for every conversation that has none. A text prompt then becomes a conversation."""
    model_name: list[str] | None = None
    """The name for {{NAME}} in the rows of swift/self-cognition. Two names: first the Chinese one, then the English
    one."""
    model_author: list[str] | None = None
    """The author for {{AUTHOR}} in the rows of swift/self-cognition. Two names: first the Chinese one, then the English
    one."""
    shuffle_dataset: bool = True
    """Read the rows in a new random order in every epoch."""
    external_plugins: list[str] = field(default_factory=list)
    """Python files or modules that register reward functions, datasets and models."""
    seed: int = 42
    """The random seed for shuffling, sampling, dropout and new weights."""

    defaults: Literal["trl", "ms-swift"] = "trl"
    """The system whose defaults apply to keys that a file does not give. Some keys also have the meaning that they
    have in that system. For a file with a key that only ms-swift has, it is ms-swift. In Python, the defaults of the
    class apply."""

    # Output
    output_dir: str = "outputs"
    """Folder for the trained model (final), checkpoints, metrics and the resolved configuration."""
    run_name: str | None = None
    """The run's name in trackers."""
    logging_steps: int = 10
    """Optimizer steps between lines on the console. The metrics files hold every step."""
    log_level: Literal["passive", "debug", "info", "warning", "error", "critical"] = "passive"
    """The console's log level. passive: libraries show only warnings and errors. ``output_dir/logs`` has all lines."""
    report_to: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Trackers: tensorboard, wandb, swanlab, mlflow, trackio, a plugin's tracker, or none."""
    report_every: int = 0
    """Optimizer steps between updates of report.html, the page about the run. 0: the page is written only at the
    end."""
    trace: bool = False
    """Record every call of every role in ``output_dir/trace.json.gz``, which ``rayhelper timeline`` shows."""

    # Placement
    use_ray: bool = False
    """Run the roles in workers on a Ray cluster. false: in this process."""
    device_groups: dict[str, Any] | str | None = None
    """The devices of each role, as a mapping or JSON. null: all roles in one worker."""
    ray_address: str | None = None
    """The Ray cluster to join. null: RAY_ADDRESS, else a cluster on this machine."""
    timeout_s: float | None = None
    """Seconds that a call to a role may take, unless device_groups sets it. It also applies to the driver. null: no
    limit."""
    env: dict[str, str | int | float] = field(default_factory=dict)
    """Environment variables of every process. They override variables of the shell. ``env`` of a device group overrides
    them. Files and trackers show secrets such as HF_TOKEN as ***. If a file that you pass holds ***, the
    variable keeps the value of the shell."""

    def __post_init__(self) -> None:
        check_run(self)

    @property
    def run_folder(self) -> Path:
        """The folder that this run writes into, and no other run at the same time."""
        return Path(self.output_dir)

    def __rayhelper_off__(self, trainer: type) -> None:
        """Raises ConfigError, as ``trainer`` is constructed with this outside a session, if it asks for one."""
        if self.use_ray:
            name = trainer.__name__
            raise ConfigError(
                f"use_ray is true, but {name} is constructed only in this process. Start its workers too: "
                f"from trainers.cli import run; run({name}, config). Or set use_ray=False."
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(SavingConfig, VisionConfig, MegatronConfig, TunerConfig, RunConfig):
    """The keys that all trainers share."""

    JOINS_ROWS: ClassVar[bool] = False
    """Whether ``packing`` makes longer rows of the rows; see ``packs.py``."""
    ENCODES: ClassVar[bool] = False
    """Whether the model may be an encoder, such as BERT, whose texts need no end of sequence."""

    # Backend
    backend: Literal["fsdp", "megatron"] = "fsdp"
    """The backend that trains and scores models. fsdp: transformers and torch. megatron: megatron-core, which is
    installed separately and divides a model over workers."""
    new_special_tokens: list[str] = field(default_factory=list)
    """Tokens to add to tokenizer and model, or .txt files with such tokens, separated by spaces or lines."""
    fsdp_sharding_strategy: Literal["full_shard", "no_shard"] = "full_shard"
    """full_shard: weights, gradients and optimizer are sharded over the train workers (FSDP2). no_shard: each worker
    has all of them (DDP)."""
    fsdp_reshard_after_forward: bool = True
    """Free a layer's gathered weights between forward and backward (ZeRO-3); false keeps them (ZeRO-2)."""
    optimizer_offload: bool = False
    """Keep the optimizer states in the memory of the host, except while the optimizer changes the weights."""
    cuda_graphs: bool = True
    """Run training passes as CUDA graphs. It needs a single GPU, a whole model in bfloat16, and no vLLM on that GPU.
    The rows of a pass are joined, as with ``padding_free``. The numbers are the same except for rounding."""
    torch_compile: bool | Literal["auto"] = "auto"
    """Compile the model's layers: the first step takes longer, later steps are faster. auto: compile training passes
    that run as CUDA graphs, if the run has at least 20 steps."""
    activation_memory_budget: float = 1.0
    """With ``torch_compile: true``: the share of a layer's activations that is kept for the backward pass. The rest is
    computed again, the cheapest operations first. 0.9 frees values between matrix products. 0 keeps only the layer's
    input."""
    logits_memory_gib: float | None = None
    """GiB per worker for the logits of the backward pass. Logits above this limit are computed again. null: 3, or 0
    with gradient_checkpointing or recompute_granularity full."""
    fsdp_offload_params: bool = False
    """Keep the shards and the optimizer in the memory of the host."""
    sequence_parallel_size: int = 1
    """Workers that divide every sequence among them, for long sequences (Ulysses). They are consecutive, get the same
    rows, and count as one worker. It must divide the model's attention heads, and the workers of each role with a
    model."""

    # Evaluation data
    eval_dataset: Any = None
    """The rows for evaluation, in the same forms as ``dataset``. null: no evaluation."""
    eval_dataset_split: str = "test"
    """The split of ``eval_dataset``."""
    split_dataset_ratio: float = 0.0
    """Without ``eval_dataset``: the share of the rows of ``dataset`` for evaluation. They are not trained on."""
    split_dataset_rows: Literal["random", "last"] = "random"
    """Which rows of each source ``split_dataset_ratio`` holds out: random rows, or the last rows."""
    skip_broken_rows: bool = False
    """Leave out rows that the trainer cannot use (no prompt, null, a number, not UTF-8), and report their number.
    false: refuse to start."""

    # Optimization
    learning_rate: float = 2e-5
    """Learning rate of the optimizer after warm-up."""
    optim: Literal["adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "rmsprop", "adagrad", "muon"] = "adamw_torch"
    """An optimizer, by its name in transformers. On a GPU, both names of AdamW mean the fused one. muon: Muon for
    matrices (arXiv 2502.16982), and AdamW for embeddings, the head and all other weights."""
    optim_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer, such as {momentum: 0.9} for sgd."""
    weight_decay: float = 0.0
    """Weight decay of the optimizer. Biases and norms do not decay."""
    adam_beta1: float = 0.9
    """Decay of AdamW's running mean of gradients."""
    adam_beta2: float = 0.999
    """Decay of AdamW's running mean of squared gradients."""
    adam_epsilon: float = 1e-8
    """AdamW adds it to the root of the running mean of squared gradients."""
    max_grad_norm: float = 1.0
    """Larger gradients are scaled down to this norm. 0: no limit."""
    max_bad_steps: int = 3
    """A step whose loss or gradient norm is not finite changes nothing. This number of such steps in a row ends the
    run."""
    lr_scheduler_type: str = "linear"
    """One of transformers' schedules: linear, cosine, constant, constant_with_warmup, ..."""
    lr_scheduler_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the schedule, such as {min_lr: 1e-6} for cosine_with_min_lr."""
    warmup_steps: int = 0
    """Optimizer steps in which the learning rate rises from 0."""
    warmup_ratio: float = 0.0
    """Share of all steps that are warm-up, if ``warmup_steps`` is 0."""
    dataloader_drop_last: bool = False
    """Drop the last micro-batch of an epoch if it is incomplete. With ``global_batch_size``, drop the last step
    instead. GRPO drops the last generation, PPO the last batch."""
    group_by_length: bool = False
    """Put rows of similar length into one step, as Hugging Face's length-grouped sampler does."""
    num_train_epochs: float = 3.0
    """Number of passes through the rows. It may be a fraction."""
    max_steps: int = -1
    """Total number of optimizer steps. A positive number overrides ``num_train_epochs``. -1: no limit."""
    per_device_train_batch_size: int = 8
    """Sequences that a worker passes through the model at once (the micro-batch)."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per worker and optimizer step."""
    global_batch_size: int | None = None
    """Sequences per optimizer step, over all workers. null: per_device_train_batch_size x gradient_accumulation_steps x
    workers. Workers that share one model or one sequence count as one. Set either this key or
    gradient_accumulation_steps."""
    token_budget: int | Literal["auto"] | None = None
    """Largest number of tokens per micro-batch, with padding. A longer sequence is a micro-batch of its own. null:
    per_device_train_batch_size counts sequences instead. auto (backend: fsdp): the GPU measures the first passes, and
    chooses the fastest number that fits. The numbers are the same except for rounding. A file without both keys uses
    auto, unless its numbers depend on the micro-batch."""
    padding_free: bool = False
    """Pass the sequences of a micro-batch through the model as one row of documents, without padding. backend: megatron
    always does this."""
    gradient_checkpointing: bool | Literal["auto"] = False
    """Compute activations twice instead of keeping them: less memory, more time. auto (backend: fsdp; the default of a
    file): only if ``rayhelper plan`` finds too little memory for them."""
    disable_dropout: bool = True
    """Train without dropout in model and adapter."""
    router_aux_loss_coef: float = 0.0
    """Weight of the auxiliary loss that balances the experts (backend: fsdp). It is added to the trainer's loss."""
    peak_tflops: float | None = None
    """Peak speed of a device, in 10^12 floating-point operations per second, for ``throughput/mfu``. null: RayHelper
    knows common GPUs (bfloat16). For other GPUs there is no mfu."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shared(self)

    @property
    def workers_per_shard(self) -> int:
        """Workers that get the same slice of the data: they hold one model together, or share its rows."""
        return super().workers_per_shard * self.sequence_parallel_size

    @property
    def is_divided(self) -> bool:
        """Whether rows of ``dataset`` are held out for evaluation: with an ``eval_dataset`` none are."""
        return self.split_dataset_ratio > 0 and not self.eval_dataset and self.eval_strategy != "no"

    @property
    def evaluates(self) -> bool:
        """Whether rows are evaluated, at the end at least."""
        return self.has_evaluation_rows and self.eval_strategy != "no"

    @property
    def has_evaluation_rows(self) -> bool:
        """Whether there are rows to evaluate on."""
        return bool(self.eval_dataset) or self.split_dataset_ratio > 0

    @property
    def training_data(self) -> tuple[Any, str]:
        """The source of the rows to learn from, and its split."""
        return self._part(is_held_out=False) if self.is_divided else self.dataset, self.dataset_split

    @property
    def evaluation_data(self) -> tuple[Any, str]:
        """The source of the rows to evaluate on, and its split; ``evaluates`` says whether there are any."""
        if not self.is_divided:
            return self.eval_dataset, self.eval_dataset_split
        return self._part(is_held_out=True), self.dataset_split

    def _part(self, is_held_out: bool) -> Part:
        takes_last = self.split_dataset_rows == "last"
        return Part(self.dataset, self.split_dataset_ratio, self.seed, is_held_out, takes_last)


def check_run(config: RunConfig) -> None:
    """Raises ConfigError naming the first key of any run whose value has no meaning."""
    check_values(config)
    at_least(config, 1, "logging_steps")
    at_least(config, 0, "seed", "report_every")
    check_choices(config)
    for reporter in [] if config.external_plugins else config.report_to:  # a plugin may register others
        one_of("report_to", reporter, (*BUILT_IN, NONE))
    check_installed(config.report_to)
    if config.dataset is None or config.dataset == [] or config.dataset == "":
        raise ConfigError("dataset is empty; give a file, a folder, a hub name, a plugin's dataset, or rows")
    check_source("dataset", config.dataset, config.dataset_split, "train")
    for plugin in config.external_plugins:
        if not plugin.strip():
            raise ConfigError("external_plugins holds an empty name. Name a file or a module, or remove it.")
        check_file("external_plugins", plugin, (".py",))
    check_init_kwargs("model_init_kwargs", config.model_init_kwargs, "trust_remote_code", "dtype", "torch_dtype")
    check_folder("model", config.model)
    check_folder("tokenizer", config.tokenizer)
    if config.chat_template is not None and "{" not in config.chat_template:
        check_file("chat_template", config.chat_template, ("",))
    check_seconds(config, "timeout_s")
    if config.device_groups is not None:
        check_sections(DeviceGroups.parse(config.device_groups))


def check_shared(config: TrainConfig) -> None:
    """Raises ConfigError naming the first key of any training whose value has no meaning."""
    at_least(config, 1, "per_device_train_batch_size", "gradient_accumulation_steps")
    at_least(config, 1, "global_batch_size", "eval_steps", "save_total_limit", "max_bad_steps")
    at_least(config, 1, "end_after_epochs", "early_stop_interval")
    at_least(config, 0, "learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "warmup_steps", "save_steps")
    at_least(config, 0, "num_train_epochs", "lora_dropout", "logits_memory_gib", "resume_on_failure")
    at_least(config, 0, "router_aux_loss_coef")
    counted = [] if config.token_budget == "auto" else ["token_budget"]
    at_least(config, -1, "max_steps")
    at_least(config, 1, "lora_rank", "sequence_parallel_size", *counted)
    at_least(config, 1, "recompute_num_layers", "infer_batch_size", *PARALLEL_KEYS)
    if not str(config.model).strip():
        raise ConfigError("model is empty. Give a folder, a hub name, or the name of a plugin's model.")
    check_packing(config)
    check_vision(config)
    _check_backend(config)
    _check_sequences(config)
    _check_adapter(config)
    if not config.shuffle_dataset or getattr(config, "packing", False):
        why = "packing fills rows to one length" if config.shuffle_dataset else "shuffle_dataset is false"
        unread(config, why, "group_by_length")
    check_source("eval_dataset", config.eval_dataset, config.eval_dataset_split, "test")
    if not 0 <= config.activation_memory_budget <= 1:
        raise ConfigError(f"activation_memory_budget must lie in [0, 1], got {config.activation_memory_budget}")
    if config.torch_compile is not True:
        unread(config, "torch_compile is not true", "activation_memory_budget")
    for name in ("adam_beta1", "adam_beta2", "warmup_ratio"):
        if not 0 <= getattr(config, name) < 1:
            raise ConfigError(f"{name} must lie in [0, 1), got {getattr(config, name)}")
    if config.max_steps <= 0 and config.num_train_epochs <= 0:
        raise ConfigError(
            f"nothing would be trained: max_steps is {config.max_steps}, num_train_epochs {config.num_train_epochs}. "
            "Make one of them positive."
        )
    if config.global_batch_size is not None and config.gradient_accumulation_steps != 1:
        raise ConfigError(
            "global_batch_size and gradient_accumulation_steps both set the size of a step; "
            "remove gradient_accumulation_steps (the micro-batch is per_device_train_batch_size)"
        )
    if config.warmup_steps and config.warmup_ratio:
        raise ConfigError(
            f"warmup_steps={config.warmup_steps} and warmup_ratio={config.warmup_ratio} set the same thing. Remove one."
        )
    if config.peak_tflops is not None and not 0 < config.peak_tflops < math.inf:
        raise ConfigError(f"peak_tflops must be a positive number, got {config.peak_tflops}")
    check_schedule(config.lr_scheduler_type, config.lr_scheduler_kwargs, config.learning_rate)
    if not 0 <= config.split_dataset_ratio < 1:
        raise ConfigError(f"split_dataset_ratio must lie in [0, 1), got {config.split_dataset_ratio}")
    if not config.split_dataset_ratio:
        unread(config, "split_dataset_ratio is 0", "split_dataset_rows")
    for mistake in saving_mistakes(config, has_rows=config.has_evaluation_rows):
        raise ConfigError(mistake)
    check_seconds(config, "save_before_s", "stop_grace_s")
    if config.resume_on_failure and not config.use_ray:
        raise ConfigError(
            f"resume_on_failure is {config.resume_on_failure}, but only with use_ray another process can start the "
            "workers again. Set use_ray: true. Under torchrun give the launcher --max-restarts, and the run "
            "resume_from_checkpoint: auto."
        )
    resume = config.resume_from_checkpoint
    if resume == "":  # of a variable of the shell that is not set: a new run would begin
        raise ConfigError("resume_from_checkpoint is empty. Name a checkpoint-N folder, or write auto or null.")
    if not resume:
        unread(config, "resume_from_checkpoint is not set", "resume_without_manifest")
    if isinstance(resume, str) and resume != "auto" and not is_there(resume, Path.is_dir):
        raise ConfigError(
            f"resume_from_checkpoint: there is no folder {resume!r}. Give a checkpoint-N folder, or 'auto' for the "
            "newest of output_dir."
        )


def check_init_kwargs(name: str, kwargs: Mapping[str, Any], *keys: str) -> None:
    """Raises ConfigError for an argument of ``from_pretrained`` that is one of our ``keys``, or that trainers set."""
    for argument in kwargs:
        if argument in keys:
            key = argument.removeprefix("torch_")
            raise ConfigError(f"{name} holds {argument}, which is the key {key}. Write it there, and remove it here.")
        if argument in SET_BY_TRAINERS:
            raise ConfigError(f"{name} holds {argument}, which the trainer decides. Remove it.")


def check_sections(groups: DeviceGroups) -> None:
    """Raises ConfigError if the section of a role says more than where the role runs: nobody would read it."""
    for role, settings in groups.role_settings.items():
        for key in settings:
            hint = nearest(key, SECTION_KEYS, " (did you mean {!r}?)")
            raise ConfigError(
                f"section {role!r} has the key {key!r}{hint}. A section decides where its role runs "
                f"({', '.join(SECTION_KEYS)}). Move other keys to the top level, where they apply to all roles."
            )


def changed(config: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The named keys that have another value than their default, and that value; what is no key has none."""
    for one in [one for one in fields(config) if one.name in names]:
        default = one.default if one.default_factory is MISSING else one.default_factory()
        if getattr(config, one.name) != default:
            yield one.name, getattr(config, one.name)


def unread(config: Any, reason: str, *names: str) -> None:
    """Raises ConfigError if a named key has another value than its default: with ``reason``, nobody reads it."""
    for name, value in changed(config, names):
        raise ConfigError(f"{name} is {value!r}, but {reason}. Remove it, or change that")


def _check_backend(config: TrainConfig) -> None:
    """Raises ConfigError for keys that the other backend reads, and for those of megatron that break each other."""
    if config.backend == "megatron":
        asked = [name for name in OF_FSDP if getattr(config, name, None) is not False]
        unread(config, "backend is megatron, which does not read it", *asked)
        if config.gradient_checkpointing == "auto":
            raise ConfigError("gradient_checkpointing: auto works only with backend: fsdp. Write true or false.")
        if config.router_aux_loss_coef:
            raise ConfigError(
                f"router_aux_loss_coef is {config.router_aux_loss_coef}, but backend is megatron. "
                "Write megatron: {moe_aux_loss_coeff: ...}"
            )
        if getattr(config, "rollout_engine", "vllm") != "hf":  # whose model is transformers'
            unread(config, "backend is megatron, which builds the model itself", "model_init_kwargs")
        for mistake in key_mistakes(
            config,
            megatron_settings(config),
            optim=config.optim,
            optim_kwargs=config.optim_kwargs,
            token_budget=micro_batch_tokens(config),
            gradient_checkpointing=config.gradient_checkpointing is True,
        ):
            raise ConfigError(mistake)
        return
    for name, value in changed(config, OF_MEGATRON):
        raise ConfigError(
            f"{name} is {value!r}, but backend is fsdp, which does not read it. Set backend: megatron, or remove it"
            f"{OF_FSDP_INSTEAD.get(name, '')}."
        )


def _check_sequences(config: TrainConfig) -> None:
    """Raises ConfigError for keys that do not go together with rows that workers share."""
    size = config.sequence_parallel_size
    if size == 1:
        return
    if config.backend == "megatron":
        raise ConfigError(
            f"sequence_parallel_size is {size}, but backend is megatron, which divides sequences by "
            f"context_parallel_size. Write context_parallel_size: {size} in its place."
        )
    for name in ("torch_compile", "router_aux_loss_coef", "neftune_noise_alpha"):
        if (value := getattr(config, name, None)) not in (None, False, 0.0, "auto"):
            raise ConfigError(
                f"{name} is {value}, but sequence_parallel_size is {size}, and the backend cannot do both. Remove one "
                "of them."
            )


def megatron_settings(config: TrainConfig) -> MegatronSettings:
    """What the keys say to ``backend: megatron``, all but the fields in ``megatron``."""
    return settings_of(
        config, gradient_checkpointing=config.gradient_checkpointing is True, optimizer_offload=config.optimizer_offload
    )


def _check_adapter(config: TrainConfig) -> None:
    """Raises ConfigError for LoRA and optimizer keys that nobody would read, and sharding keys that say two things."""
    if config.optim != "muon" and not config.optim.startswith("adamw"):
        unread(config, f"optim is {config.optim}", "adam_beta1", "adam_beta2", "adam_epsilon")
    if config.optim in ("adafactor", "muon") and config.fsdp_sharding_strategy == "full_shard":
        raise ConfigError(
            f"optim: {config.optim} needs whole weights, which are sharded. Set fsdp_sharding_strategy: no_shard"
        )
    check_tuner(config, backend=config.backend, max_steps=config.max_steps)
    if config.tuner_type == "full":
        unread(config, "tuner_type is full", "lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules")
    elif config.tuner_type != "lora":
        unread(config, f"tuner_type is {config.tuner_type}", "lora_rank")
        if config.tuner_type != "adalora":
            unread(config, f"tuner_type is {config.tuner_type}", "lora_alpha", "lora_dropout")
    if not config.load_in_4bit:
        unread(config, "load_in_4bit is false", "bnb_4bit_quant_type", "use_bnb_nested_quant")
    if config.fsdp_sharding_strategy == "no_shard":
        unread(config, "fsdp_sharding_strategy is no_shard", "fsdp_reshard_after_forward")
    if config.fsdp_offload_params and config.fsdp_sharding_strategy == "no_shard":
        raise ConfigError("fsdp_offload_params needs fsdp_sharding_strategy: full_shard")
    if config.fsdp_offload_params:
        unread(config, "fsdp_offload_params keeps the optimizer on the host all the time", "optimizer_offload")


def sequences_per_step(config: TrainConfig, num_shards: int, saved_order: Mapping[str, Any] | None = None) -> int:
    """Sequences that one optimizer step learns from, over all workers. Workers of a shard hold one model together.

    A resumed run (``saved_order``: see ``run.saved_order``) keeps its number with any number of workers, unless the
    configuration sets it directly.
    """
    if config.global_batch_size is not None:
        return config.global_batch_size
    if saved_order and SEQUENCES_PER_STEP in saved_order:
        return int(saved_order[SEQUENCES_PER_STEP])
    return config.per_device_train_batch_size * config.gradient_accumulation_steps * num_shards


def order_of(config: TrainConfig) -> dict[str, Any]:
    """The arguments of ``data.rows.Batches`` that decide the order of the rows."""
    return {"seed": config.seed, "shuffle": config.shuffle_dataset, "drop_last": config.dataloader_drop_last}


def order_of_steps(config: TrainConfig) -> dict[str, Any]:
    """The same, where a batch is an optimizer step: what ``gradient_accumulation_steps`` add up."""
    return order_of(config) | {"num_rounds": config.gradient_accumulation_steps}


def order_by_rows_of(config: TrainConfig) -> dict[str, Any]:
    """What ``data.packs.batches_of`` is told of it, where the lengths of rows are known."""
    return order_of_steps(config) | {"by_length": config.group_by_length}


def total_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run."""
    if config.max_steps > 0:
        return config.max_steps
    return steps_of_epochs(config.num_train_epochs, steps_per_epoch)


def steps_of_epochs(epochs: float, steps_per_epoch: int) -> int:
    """Optimizer steps of so many epochs, a part of a step counted as one, as transformers' Trainer counts them."""
    return max(1, math.ceil(epochs * steps_per_epoch))
