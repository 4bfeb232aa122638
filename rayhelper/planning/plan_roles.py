"""What a role does with its workers, as far as a configuration says: parallel sizes, model, memory.

    role x group x settings  ->  RolePlan, and findings: mistakes, warnings, what was assumed

What a role does is what its trainer declares, or else what its name says (``role_kinds.py``). A role of which neither
is known is planned without memory, unless its section names a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rayhelper.device_groups import DeviceGroup
from rayhelper.device_groups.mistakes import Mistakes
from rayhelper.device_groups.role_form import check_parallel_sizes
from rayhelper.planning.adapter import ALL, DEFAULT_RANK, adapter_parameters
from rayhelper.planning.memory import (
    FREEING_KEYS,
    GIB,
    LOGITS_ROOM,
    RoleMemory,
    Work,
    cache_bytes_per_token,
    hf_engine,
    scoring,
    training,
    vllm_engine,
)
from rayhelper.planning.model_shape import ModelShape
from rayhelper.planning.parallel_sizes import (
    SEQUENCE_KEY,
    TENSOR_KEY,
    VLLM_KEY,
    ParallelSizes,
    engine_mistakes,
    num_torn,
    size_mistakes,
)
from rayhelper.planning.role_kinds import RoleKind
from rayhelper.planning.vision_parts import beside_tower, frozen_parts, whole_parts, with_tower

LEARNS = ("trains", "values")
MICRO_BATCH_KEYS = ("per_device_train_batch_size", "micro_batch_size")
UTILIZATION_KEY = "vllm_gpu_memory_utilization"
DEFAULT_UTILIZATION = 0.9  # vLLM's
DEFAULT_PROMPT = 512  # tokens

PlannedTo = Literal["train", "generate", "score", "unknown"]


@dataclass
class Findings:
    """What a plan says beside its facts, in the order in which it was found."""

    mistakes: Mistakes = field(default_factory=Mistakes)
    warnings: list[str] = field(default_factory=list)
    assumed: dict[str, None] = field(default_factory=dict)  # each once

    def assume(self, what: str) -> None:
        self.assumed[what] = None


@dataclass(frozen=True)
class PlannedRun:
    """What holds for all roles."""

    shared: Mapping[str, Any]  # the keys beside the device groups
    num_trainers: int  # workers of the trained role
    kinds: Mapping[str, RoleKind]  # of all roles
    gpu_bytes: int
    nproc_per_node: int | None  # rank r lies on node r // nproc_per_node; None: there is one node
    findings: Findings
    shape: ModelShape | None  # of the model that roles share
    unknown: str  # why there is no shape
    engine: str  # that rollout_engine: auto stands for
    guests: Mapping[str, RoleKind] = field(default_factory=dict)  # declared roles that no group names


@dataclass(frozen=True)
class Place:
    """A role on its group, with its section of the configuration."""

    role: str
    group: DeviceGroup
    section: Mapping[str, Any]
    run: PlannedRun

    @property
    def settings(self) -> dict[str, Any]:
        """Keys of the role's section win over shared ones."""
        return {**self.run.shared, **self.section}

    @property
    def kind(self) -> RoleKind:
        return self.run.kinds[self.role]

    @property
    def where(self) -> str:
        return f"role {self.role!r}"


@dataclass(frozen=True)
class RolePlan:
    """What one role does on the workers of its group."""

    role: str
    does: PlannedTo
    sizes: ParallelSizes
    engine: Literal["vllm", "hf"] | None = None
    engine_tensor: int = 1  # accelerators of one engine
    cache_tokens: int | None = None  # that a vLLM engine holds at once
    shape: ModelShape | None = None
    memory: RoleMemory | None = None
    unknown: str = ""  # why there is no memory


def plan_role(place: Place) -> RolePlan:
    """The role's plan; what is wrong with it goes to the findings of the run."""
    engine = _engine(place)
    if engine == "vllm":
        return _plan_vllm(place)
    if engine == "hf":
        return _plan_hf(place)
    return _plan_model(place)


def _plan_model(place: Place) -> RolePlan:
    """A role that trains or scores.

    Parallel sizes beside the device groups are meant for those that train; with ``backend: megatron``, also for those
    that score with it. Those that score share rows as those that train do.
    """
    findings, where = place.run.findings, place.where
    does: PlannedTo = "train" if place.kind.does in LEARNS else "unknown"
    if does == "unknown" and (place.kind.does == "scores" or _own_model(place) is not None):
        does = "score"
    is_megatron = place.kind.does == "scores" and place.settings.get("backend") == "megatron"
    settings = place.settings if does == "train" or is_megatron else place.section
    if place.kind.does == "scores" and SEQUENCE_KEY in place.settings:
        settings = {**settings, SEQUENCE_KEY: place.settings[SEQUENCE_KEY]}
    sizes = ParallelSizes.of(where, settings, place.group.num_workers, findings.mistakes)
    if settings.get("sequence_parallel") and sizes.tensor == 1:  # which whoever reads the file passes over
        findings.warnings.append(f"sequence_parallel of {where} has nothing to divide over: {TENSOR_KEY} is 1.")
        settings = {key: value for key, value in settings.items() if key != "sequence_parallel"}
    _warn_of_torn(place, TENSOR_KEY, sizes.tensor * max(1, place.group.gpus_per_worker))
    _warn_of_torn(place, SEQUENCE_KEY, sizes.shared_rows, "sequence-parallel")
    shape, unknown = _shape(place) if does != "unknown" else (None, "the configuration does not name its model")
    _note(place, size_mistakes(where, sizes, settings, shape))
    memory = None
    if shape is not None and place.group.device != "CPU":
        work = _work(place, sizes)
        if does == "train" and place.settings.get("tuner_type", "full") != "full":
            whole = sum(getattr(shape, part).num_parameters for part in whole_parts(place.settings))
            adapter = _adapter(place.settings, shape) + whole
            work = replace(work, adapter=adapter, whole=whole, bits=_bits(place.settings))
        if does == "train" and shape.tower:
            work = replace(work, frozen=frozen_parts(place.settings, is_megatron=work.backend == "megatron"))
            findings.assume("the vision tower's activations are not counted")
        divided = replace(sizes, data=1) if place.kind.does == "judges" else sizes
        terms = (training if does == "train" else scoring)(shape, divided, work)
        memory = RoleMemory(place.role, terms, _offloads(place.settings))
        if work.backend == "fsdp" and divided.fsdp_ways > 1 and work.bits is None:
            findings.assume("fsdp divides weights, gradients and optimizer states over the data-parallel workers")
    return RolePlan(place.role, does, sizes, None, 1, None, shape, memory, unknown)


def _plan_vllm(place: Place) -> RolePlan:
    """A role that generates with vLLM: an engine on every ``vllm_tensor_parallel_size`` accelerators."""
    settings, mistakes = place.settings, place.run.findings.mistakes
    if VLLM_KEY in settings:
        given = {VLLM_KEY: settings[VLLM_KEY]}
        asked = f"{place.group.size} {place.group.device}"
        check_parallel_sizes(place.where, given, asked, place.group.size, mistakes)
    tensor = _whole(settings, VLLM_KEY) or max(1, place.group.gpus_per_worker)
    _warn_of_torn(place, VLLM_KEY, tensor)
    shape, unknown = _shape(place)
    sizes = ParallelSizes(data=max(1, place.group.size // tensor))
    memory = tokens = None
    if shape is not None:
        _note(place, engine_mistakes(place.where, tensor, shape))
    if shape is not None and place.group.device != "CPU":
        share = _utilization(place)
        terms = vllm_engine(shape, tensor, share, place.run.gpu_bytes)
        weights, cache = (term.num_bytes for term in terms)
        tokens = cache // cache_bytes_per_token(shape, tensor)
        memory = RoleMemory(place.role, terms, _offloads(settings), generates=True)
        if not cache:
            mistakes.note(
                f"the engine of {place.where} has {share:g} of a GPU of {place.run.gpu_bytes / GIB:g} GiB, and "
                f"its weights by themselves take {weights / GIB:.1f} GiB. Raise {UTILIZATION_KEY} or {VLLM_KEY}."
            )
    return RolePlan(place.role, "generate", sizes, "vllm", tensor, tokens, shape, memory, unknown)


def _plan_hf(place: Place) -> RolePlan:
    """A role that generates with transformers, every worker on its own, with a trained role's weights if it can."""
    shape, unknown = _shape(place)
    memory = None
    if shape is not None and place.group.device != "CPU":
        work = _work(place, ParallelSizes())
        shares = any(place.run.kinds[role].does in LEARNS for role in place.group.roles)
        terms = hf_engine(shape, work, _num_sequences(place, work), shares_weights=shares)
        memory = RoleMemory(place.role, terms, _offloads(place.settings), generates=True)
    sizes = ParallelSizes(data=place.group.num_workers)
    return RolePlan(place.role, "generate", sizes, "hf", 1, None, shape, memory, unknown)


def _engine(place: Place) -> Literal["vllm", "hf"] | None:
    """What generates for the role; None: it does not generate."""
    names_vllm = place.kind.does != "scores" and any(str(key).startswith("vllm_") for key in place.section)
    if place.kind.does != "generates" and not names_vllm:
        return None
    settings = place.settings
    uses_vllm = settings.get("use_vllm", any(str(key).startswith("vllm_") for key in settings)) is True
    said = settings.get("rollout_engine", "vllm" if uses_vllm else "hf")
    return "vllm" if (place.run.engine if said == "auto" else said) == "vllm" else "hf"


def _own_model(place: Place) -> Any:
    """The model that the configuration gives to this role alone."""
    keys = (f"{place.role}_model", *place.kind.models)
    named = (place.settings[key] for key in keys if place.settings.get(key))
    return place.section.get("model") or next(named, None)


def _shape(place: Place) -> tuple[ModelShape | None, str]:
    """The shape of the role's model, or why it is not known."""
    model = _own_model(place)
    if model is None:
        return place.run.shape, "" if place.run.shape is not None else place.run.unknown
    return read_shape(
        model, f"model of {place.where}", "give its folder, or its sizes as a mapping", place.run.findings
    )


def read_shape(model: Any, where: str, remedy: str, findings: Findings) -> tuple[ModelShape | None, str]:
    """The shape of a model that the configuration names, or why it is not known."""
    if not isinstance(model, (str, Mapping)):
        return None, remedy
    before = len(findings.mistakes)
    shape = findings.mistakes.attempt(ModelShape.of, model, where)
    if len(findings.mistakes) > before:
        return None, "its shape has a mistake"
    if shape is None:
        return None, f"{model!r} is not a folder here; {remedy}"
    shape, is_whole = with_tower(shape, model)
    if not is_whole:
        findings.assume(f"of {where} the language model alone: its other parts cannot be counted here")
    if not shape.is_exact:
        findings.assume(f"the architecture of {where} is not known and counted as a Llama's")
    return shape, ""


def _work(place: Place, sizes: ParallelSizes) -> Work:
    """What the role does at once; what the configuration leaves out is assumed, and said."""
    settings, findings = place.settings, place.run.findings
    micro_batch = _whole(settings, *MICRO_BATCH_KEYS)
    if micro_batch is None:
        micro_batch = 8
        findings.assume(f"{MICRO_BATCH_KEYS[0]} 8")
    steps = _whole(settings, "gradient_accumulation_steps")
    batch = _whole(settings, "global_batch_size")
    says = settings.get("gradient_checkpointing")
    recomputes = (bool(says) and says != "auto") or settings.get("recompute_granularity") == "full"
    is_megatron = settings.get("backend", "megatron" if sizes.is_divided else "fsdp") == "megatron"
    return Work(
        micro_batch=micro_batch,
        length=_length(settings, findings),
        backend="megatron" if is_megatron else "fsdp",
        compute_bytes=4 if settings.get("dtype") == "float32" or settings.get("bf16") is False else 2,
        checkpointing=recomputes,
        kept_share=_kept_share(place),
        kept_logits=_kept_logits(place, recomputes),
        distributed_optimizer=settings.get("use_distributed_optimizer", True) is not False,
        num_micro_batches=math.ceil(batch / (micro_batch * sizes.data)) if batch else steps,
        has_reference=_has_reference(place),
    )


def _kept_share(place: Place) -> float:
    if place.settings.get("torch_compile") is not True:
        return 1.0
    share = _number(place, "activation_memory_budget", lambda value: 0 <= value <= 1, "lie in [0, 1]")
    return 1.0 if share is None else share


def _kept_logits(place: Place, recomputes: bool) -> int:
    """Bytes that the head of the role may keep; one of values has none."""
    if place.kind.does == "values":
        return 0
    gib = _number(place, "logits_memory_gib", lambda value: 0 <= value < math.inf, "be at least 0")
    if gib is None:
        return 0 if recomputes else LOGITS_ROOM
    return int(gib * GIB)


def _number(place: Place, key: str, fits: Callable[[float], bool], must: str, advice: str = "") -> float | None:
    """The number under the key; None if there is none, or one without a meaning, which is told."""
    value = place.settings.get(key)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and fits(value)):
        return value
    place.run.findings.mistakes.note(f"{key} of {place.where} must {must}, got {value!r}.{advice}")
    return None


def _adapter(settings: Mapping[str, Any], shape: ModelShape) -> int:
    """Parameters of the adapter that these keys describe."""
    targets = settings.get("lora_target_modules", [ALL])
    names = [targets] if isinstance(targets, str) else targets
    said, kwargs = str(settings.get("tuner_type")), settings.get("tuner_kwargs")
    tuner, rank = {"bone": "miss"}.get(said, said), _whole(settings, "lora_rank") or DEFAULT_RANK
    targets = [str(name) for name in names]
    beside = beside_tower(shape, settings, rank, targets, tuner) if shape.tower else 0
    if shape.tower and settings.get("freeze_llm") is True:
        return beside
    kwargs = kwargs if isinstance(kwargs, Mapping) else {}
    return beside + adapter_parameters(shape, rank, targets, tuner=tuner, kwargs=kwargs)


def _bits(settings: Mapping[str, Any]) -> int | None:
    """Of a number of the weights beside an adapter that are quantized; None: they are not."""
    return next((bits for key, bits in (("load_in_4bit", 4), ("load_in_8bit", 8)) if settings.get(key) is True), None)


def _length(settings: Mapping[str, Any], findings: Findings) -> int:
    """Tokens of a sequence: prompt and completion, or ``max_length``."""
    completion, whole = _whole(settings, "max_completion_length"), _whole(settings, "max_length")
    if completion is None:
        if whole is None:
            findings.assume("sequences of 1024 tokens")
        return whole or 1024
    prompt = _whole(settings, "max_prompt_length") or whole
    if prompt is None:
        findings.assume(f"prompts of {DEFAULT_PROMPT} tokens")
    return completion + (prompt or DEFAULT_PROMPT)


def _has_reference(place: Place) -> bool:
    """Whether the trained role's workers also hold the model that it started from.

    A trainer that generates (GRPO) needs it for its KL term; one that does not (DPO, KTO), unless it is left out.
    """
    settings = place.settings
    has_own = any(map(is_reference, place.run.kinds.values()))
    is_policy = place.kind.does == "trains" and not has_own
    if is_adapted(settings):
        return False  # the policy without its adapter
    needs = bool(settings.get("beta")) and bool(settings.get("reward_funcs"))
    return is_policy and (needs or (scores_pairs(place.run) and settings.get("reference_free") is not True))


def scores_pairs(run: PlannedRun) -> bool:
    """Whether a reference that no group names belongs to a trainer that does not generate."""
    roles = [*run.kinds.values(), *run.guests.values()]
    return any(map(is_reference, run.guests.values())) and all(kind.does != "generates" for kind in roles)


def is_adapted(settings: Mapping[str, Any]) -> bool:
    """Whether the reference is the policy without its adapter."""
    return settings.get("tuner_type", "full") != "full" and settings.get("ref_model") is None


def is_reference(kind: RoleKind | None) -> bool:
    return kind is not None and kind.does == "scores" and "ref_model" in kind.models


def _num_sequences(place: Place, work: Work) -> int:
    """Sequences that a worker completes at once: its slice of a generation, unless ``rollout_batch_size`` cuts it."""
    settings = place.settings
    steps = _whole(settings, "steps_per_generation", "gradient_accumulation_steps") or 1
    num_shards = max(1, place.run.num_trainers // (_whole(settings, SEQUENCE_KEY) or 1))
    generation = _whole(settings, "generation_batch_size") or work.micro_batch * steps * num_shards
    own = math.ceil(generation / place.group.num_workers)
    return min(own, _whole(settings, "rollout_batch_size") or own)


def _utilization(place: Place) -> float:
    share = _number(place, UTILIZATION_KEY, lambda value: 0 < value <= 1, "be a share in (0, 1]", " Write e.g. 0.5.")
    if share is not None:
        return share
    place.run.findings.assume(f"{UTILIZATION_KEY} {DEFAULT_UTILIZATION}")
    return DEFAULT_UTILIZATION


def _offloads(settings: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(key for key in FREEING_KEYS if settings.get(key))


def _warn_of_torn(place: Place, key: str, width: int, kind: str = "tensor-parallel") -> None:
    ranks, nproc_per_node = place.group.ranks or (), place.run.nproc_per_node
    if torn := num_torn(ranks, width, nproc_per_node):
        place.run.findings.warnings.append(
            f"{torn} of {len(ranks) // width} {kind} groups of {place.where} are on several nodes ({width} "
            f"{place.group.device} each, {nproc_per_node} per node). So communication is slow. Make {key} a divisor of "
            f"{nproc_per_node}, and let the ranks begin at a multiple of it."
        )


def _note(place: Place, messages: Iterator[str]) -> None:
    for message in messages:
        place.run.findings.mistakes.note(message)


def _whole(settings: Mapping[str, Any], *keys: str) -> int | None:
    """The first of the keys that holds a positive whole number; what else they hold is for others to refuse."""
    for key in keys:
        if type(settings.get(key)) is int and settings[key] > 0:
            return int(settings[key])
    return None
