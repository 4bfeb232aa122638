"""GKD's teacher, of role teacher: another model, in transformers or in vLLM, or the student itself.

    teacher = GKDTeacher(config)
    teacher.build(path, tokenizer=student_path)        # a model of its own, built before the student
    teacher.build(path, student=policy)                # the student teaches itself, and is built before
    top = teacher.top_logps(sequences, k, adapter)     # TopLogps: the top-k tokens at each target
    rollouts = teacher.complete(prompts, step)         # seq_kd: one completion per prompt

vLLM (``teacher_engine: vllm``) answers as a backend that only scores would. It is asked for the top-k tokens only, so
there is neither a copy of the model in a training framework nor a gradient.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from rayhelper import ConfigError, DeviceGroups, RayHelper
from trainers.backends.base import Backend
from trainers.backends.device import default_device
from trainers.batch import Prompts, Ragged, Rollouts, Sequences
from trainers.gkd.config import GKDConfig
from trainers.parts.checks import check_can_sleep, check_model_fits, is_on_cpu
from trainers.parts.engine import build_engine, sampling_of, seed_of, vllm_engine
from trainers.parts.frozen import Teacher
from trainers.parts.models import resolve_dtype
from trainers.parts.policy import Model
from trainers.parts.tokenizer import load_tokenizer
from trainers.rollout.base import Engine
from trainers.rollout.choice import vllm_share

# Scores of a prompt are whole rows of the vocabulary, which vLLM does not count among the memory that it needs: this
# many tokens of 150 000 entries are 1.2 GB a copy
TOKENS_AT_ONCE = 2048


@RayHelper.worker(group="teacher")
class GKDTeacher(Teacher):
    """The teacher; ``engine`` completes prompts where it has one (vLLM, or ``seq_kd``)."""

    config: GKDConfig
    engine: Engine

    def __init__(self, config: GKDConfig) -> None:
        kwargs = config.teacher_model_init_kwargs
        super().__init__(config, rests=config.offload_teacher_model, model_init_kwargs=kwargs)

    @RayHelper.function(group="teacher", dispatch="slice", collect="flatten")
    def complete(self, prompts: Prompts, step: int) -> Rollouts:
        """One completion per prompt, in order; ``step`` of the run is a part of the seed."""
        with self.at_hand():
            return self.engine.generate(prompts, sampling_of(self.config), seed=seed_of(self.config.seed, step))

    def new_backend(
        self,
        model: str,
        num_steps: int | None,
        *,
        tokenizer: str | None = None,
        student: Model | None = None,
        **settings: Any,
    ) -> Backend:
        """The model that teaches, and the engine if it completes prompts.

        ``tokenizer``: the model whose tokenizer is the run's. ``student``: it teaches itself, and gets as a teacher the
        slices that it gets where it is trained.
        """
        config = self.config
        if student is not None:
            shard = student.shard
            RayHelper.shard(shard.index, shard.count, leader=shard.leader)
            return student.built
        assert tokenizer is not None, "a separate teacher reads the student's tokens"
        reader = load_tokenizer(config, tokenizer)
        if config.teacher_engine == "vllm":
            hosted = VllmTeacher(config, model, reader, shares_devices=shares_devices())
            self.engine = hosted.engine
            return cast(Backend, hosted)  # nobody asks it for more than it has
        backend = super().new_backend(model, num_steps, **settings)
        if config.seq_kd:
            self.engine = build_engine(config, model, reader, backend)
        return backend


class VllmTeacher:
    """A model in vLLM and its ``engine``, which completes prompts as well.

    ``shares_devices``: this worker trains or generates too.
    """

    def __init__(self, config: GKDConfig, model: str, tokenizer: Any, *, shares_devices: bool) -> None:
        settings = teacher_settings(config, shares_devices=shares_devices)
        size = settings.pop("tensor_parallel_size", 1)
        sleeps = config.offload_teacher_model and default_device().type == "cuda"  # else nothing moves, as with hf
        self.engine = vllm_engine(
            config,
            model,
            tokenizer,
            size,
            sleep_level=1 if sleeps else 0,
            engine_kwargs=settings,
            patches=config.vllm_patches,
            key="teacher_engine_kwargs",
        )

    def top_logps(
        self, sequences: Sequences, k: int, *, micro_batch_size: int, temperature: float = 1.0, adapter: bool = True
    ) -> tuple[Ragged, Ragged]:
        """As ``Backend.top_logps``; vLLM cuts into batches as it sees fit, and there is no adapter."""
        return self.engine.top_logps(sequences, k, temperature=temperature)

    def offload(self) -> None:
        """Frees the KV cache; the weights wait in the memory of the host."""
        self.engine.sleep()

    def reload(self) -> None:
        """Brings back what ``offload`` moved."""
        self.engine.wake("weights")
        self.engine.wake("kv_cache")


def shares_devices() -> bool:
    """Whether another role needs memory of the device of this worker of role teacher."""
    worker = RayHelper.current()
    beside = {"train", "rollout"} & {*worker.roles, *worker.neighbours}
    return not worker.roles or bool(beside)  # none: one process is the worker of everything


def teacher_settings(config: GKDConfig, *, shares_devices: bool) -> dict[str, Any]:
    """Fields of vLLM's EngineArgs."""
    assert config.gkd_logits_topk is not None, "checked by the configuration"
    settings: dict[str, Any] = {
        "gpu_memory_utilization": vllm_share(shares_devices=shares_devices),
        "max_logprobs": config.gkd_logits_topk,
        "enable_prefix_caching": config.seq_kd,  # of what is scored nothing is ever taken from a cache
    }
    if default_device().type == "cuda":
        settings["max_num_batched_tokens"] = TOKENS_AT_ONCE  # on a CPU a sequence is scored at once, however long
    if not config.seq_kd:
        settings["enforce_eager"] = True  # graphs make no scored sequence faster
    return settings | config.teacher_engine_kwargs


def check_vllm_teacher(config: GKDConfig, groups: DeviceGroups | None) -> None:
    """Raises ConfigError for a field that vLLM lacks, and for a placement that the teacher's engine cannot work in."""
    if config.teacher_engine == "vllm":
        from trainers.rollout.vllm.settings import check_model_on_cpu, check_sampling_kwargs, checked_engine_kwargs
        from trainers.rollout.vllm.vision.features import check_sees

        if config.teacher_model is not None:
            check_sees(config.teacher_model, "teacher_engine", trust_remote_code=config.trust_remote_code)
            if is_on_cpu(groups, "teacher"):
                told: dict[str, Any] = {"dtype": resolve_dtype(config), "trust_remote_code": config.trust_remote_code}
                check_model_on_cpu(config.teacher_model, key="teacher_engine", **told)
        given = dict(config.teacher_engine_kwargs)
        size = given.pop("tensor_parallel_size", 1)
        checked_engine_kwargs(given, key="teacher_engine_kwargs")
        if config.seq_kd:
            check_sampling_kwargs(sampling_of(config))
        _check_tensor_parallel_size(size, groups)
    is_beside = groups is None or groups.group_of("teacher") == groups.group_of("rollout")
    on_gpu = torch.cuda.is_available() if groups is None else groups.group_of("teacher").device != "CPU"
    if config.rollout_engine == "vllm" and is_beside and on_gpu and (config.teacher_engine == "vllm" or config.seq_kd):
        cause = "teacher_engine: vllm" if config.teacher_engine == "vllm" else "seq_kd"
        raise ConfigError(
            f"{cause} gives role teacher a vLLM engine in the process of the student's engine. On a GPU, two vLLM "
            "engines do not run in one process. Give role teacher its own group. With shares_devices_with, it may use "
            "the same devices."
        )
    if config.rollout_engine == "vllm" and config.seq_kd and config.teacher_engine == "hf":
        check_can_sleep(config, groups, "teacher")


def _check_tensor_parallel_size(size: Any, groups: DeviceGroups | None) -> None:
    told = f"teacher_engine_kwargs: tensor_parallel_size={size}"
    if type(size) is not int or size < 1:
        raise ConfigError(f"{told} is not a number of workers")
    others = [] if groups is None else [groups.group_of("train"), groups.group_of("rollout")]
    if size > 1 and (groups is None or groups.group_of("teacher") in others):
        raise ConfigError(f"{told}: workers with other roles have a slice each. Give role teacher its own group.")
    check_model_fits(told, size, groups, "teacher")
