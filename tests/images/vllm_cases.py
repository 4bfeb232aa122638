"""What vLLM makes of prompts with pictures, in a process of its own that can import torchvision.

python -m tests.images.vllm_cases FOLDER       writes FOLDER/found.json
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoTokenizer

from benchmarks.tiny.vision import IN_VLLM, save_vision
from rayhelper import ConfigError
from tests.conftest import without_runtime
from tests.e2e.runs import grpo_config, lines
from tests.images.test_grpo import KEYS, prompts
from tests.images.test_sampling import config as sampling_config
from tests.images.test_sampling import data, found_in
from tests.images.test_sft import transpose_experts
from tests.torchvision_on_cpu import ROOT
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.batch import Prompts, Rollouts, Sequences
from trainers.cli import load_config
from trainers.gkd.config import GKDConfig
from trainers.gkd.trainer import GKDTrainer
from trainers.grpo.config import GRPOConfig
from trainers.grpo.trainer import GRPOTrainer
from trainers.parts import weights
from trainers.rollout.base import Sampling
from trainers.rollout.hf.engine import HfEngine
from trainers.rollout.vllm.engine import VllmEngine
from trainers.sampling import samplers
from trainers.sampling.trainer import SamplingTrainer

FILES = ROOT / "tests" / "e2e" / "ms_swift_ray"
SETTINGS = {"max_model_len": 512, "max_num_seqs": 8, "block_size": 32, "limit_mm_per_prompt": {"image": 2}}
Compared = tuple[list[list[int]], list[list[int]], float]  # completions of both engines, and the largest gap
ONE_PICTURE = ("llava_onevision",)  # vLLM cuts each picture up, transformers only one that is alone
GREEDY = Sampling(max_completion_length=6, temperature=0.0)


def gap(backend: FsdpBackend, asked: Prompts, found: Rollouts, temperature: float = 1.0) -> float:
    """The largest distance of an engine's log-probabilities to the trainer's."""
    samples = dataclasses.replace(found, images=asked.images).samples()
    logps = backend.token_logps(samples, micro_batch_size=2, temperature=temperature)
    return float(np.abs(logps.values - found.rollout_logps.values).max())


def wrong(call: Any) -> str:
    try:
        call()
    except (ConfigError, weights.StaleWeightsError) as error:
        return str(error)
    return ""


def changed(backend: FsdpBackend, seed: int) -> None:
    """All weights, those of the vision tower too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in backend.module.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)


def engines_of(folder: Path, kind: str) -> tuple[str, FsdpBackend, VllmEngine, Prompts, Callable[[], Compared]]:
    """A model's folder, the trainer's model, vLLM's engine, prompts, and what compares it with the hf engine on them.

    Of a kind in ``ONE_PICTURE`` prompts with more are left out of the comparison.
    """
    model = save_vision(folder / "model", kind, **IN_VLLM[kind])
    if kind == "qwen3_vl_moe":
        transpose_experts(model)  # as checkpoints of the hub have them
    tokenizer, backend = AutoTokenizer.from_pretrained(model), FsdpBackend(model)
    asked, hf = prompts(model, folder / "run"), HfEngine(backend.module, tokenizer, vision=backend.vision)
    engine = VllmEngine(model, tokenizer, engine_kwargs=SETTINGS)
    given = asked
    if kind in ONE_PICTURE:
        given = Prompts.concat([asked[k : k + 1] for k in range(len(asked)) if len(asked.images[k]) < 2])

    def compared() -> Compared:
        expected, found = (one.generate(given, GREEDY, seed=0) for one in (hf, engine))
        assert found.prompt_ids == given.prompt_ids
        first, second = ([row.tolist() for row in one.completion_ids] for one in (expected, found))
        return first, second, gap(backend, given, found)

    return model, backend, engine, asked, compared


def kept_of(engine: VllmEngine) -> list[int]:
    """How many pictures vLLM keeps what its tower made of: as its scheduler has it, and as its worker has it."""
    executor: Any = engine.engine.model_executor
    return [
        len(engine.core.scheduler.encoder_cache_manager.cached),
        len(executor.driver_worker.worker.model_runner.encoder_cache),
    ]


def both_engines(folder: Path, kind: str) -> Iterator[tuple[str, Any]]:
    """What both engines complete before and after new weights, and the number of parts whose fingerprints agree."""
    model, backend, engine, asked, compared = engines_of(folder, kind)
    if kind in ONE_PICTURE:
        yield "several", wrong(lambda: engine.generate(asked, GREEDY, seed=0))
    yield "first", compared()
    changed(backend, 1)
    weights.copy(grpo_config(model, folder / "run", rollout_engine="vllm"), backend, engine, 1)
    yield "new", compared()
    yield "parts", len(engine.fingerprints())
    engine.close()


def of_engine(folder: Path) -> Iterator[tuple[str, Any]]:
    model, backend, engine, asked, compared = engines_of(folder, "qwen2_5_vl")
    config = grpo_config(model, folder / "run", rollout_engine="vllm")

    yield "first", compared()
    yield "kept", kept_of(engine)
    engine.sleep_level = 1  # vLLM on a CPU goes through all of it, but frees nothing
    engine.sleep()
    yield "kept asleep", kept_of(engine)
    engine.wake("weights")
    engine.wake("kv_cache")
    changed(backend, 1)
    yield "old", compared()
    yield "kept again", kept_of(engine)
    weights.copy(config, backend, engine, 1)  # compares fingerprints of all parts
    yield "kept after new weights", kept_of(engine)
    yield "new", compared()
    yield "fingerprints", sorted(engine.fingerprints())
    tower = [name for name, _ in backend.named_weights() if "visual" in name]
    changed(backend, 2)
    engine.load_weights(((name, weight) for name, weight in backend.named_weights() if name not in tower), part=True)
    with torch.no_grad():  # the engine's tower is the one before
        before = FsdpBackend(model)
        changed(before, 1)
        for (name, weight), (_, old) in zip(
            backend.module.named_parameters(), before.module.named_parameters(), strict=True
        ):
            if "visual" in name:
                weight.copy_(old)
    yield "frozen tower", compared()

    sent = list(backend.named_weights())
    proof = {name: 0 for name in engine.fingerprints() if "visual.blocks.1" in name}
    yield "stale tower", wrong(lambda: weights.check(engine, proof))
    engine.load_weights(sent)

    with torch.no_grad():  # a head that would rather write pictures
        backend.module.get_output_embeddings().weight[list(backend.vision.processor.image_token_ids)] *= 5
    engine.load_weights(backend.named_weights())
    many = Prompts.concat([asked] * 8)
    drawn = engine.generate(many, Sampling(max_completion_length=6, temperature=0.7), seed=3)
    yield "pictures drawn", int((backend.vision.kinds(drawn.completion_ids.values) > 0).sum())
    yield "drawn", gap(backend, many, drawn, 0.7)
    samples = dataclasses.replace(drawn, images=many.images).samples()
    sequences = Sequences(samples.input_ids, samples.target_mask, images=samples.images)
    for name, answers in (
        ("scores", [one.token_logps(sequences, **told) for one, told in told_of(backend, engine)]),
        ("top scores", [one.top_logps(sequences, 3, **told)[1] for one, told in told_of(backend, engine)]),
    ):
        yield name, float(np.abs(answers[0].values - answers[1].values).max())

    first = asked[:1]
    fewer = dataclasses.replace(first, prompt_ids=type(first.prompt_ids).of([without(first)], np.int64))
    yield "another number of tokens", wrong(lambda: engine.generate(fewer, GREEDY, seed=0))
    seen = first.images[0]
    three = dataclasses.replace(first, images=[seen * 3])
    yield "too many", wrong(lambda: engine.generate(three, GREEDY, seed=0))

    engine.load_weights(FsdpBackend(model).named_weights())
    sampled = []
    with patch.object(samplers, "vllm_engine", lambda *_, **__: engine), without_runtime():
        for name in ("hf", "vllm"):
            given = sampling_config(model, folder / name, dataset=data(folder), sampler_engine=name, prm_threshold=0.0)
            SamplingTrainer.check(given, None)
            SamplingTrainer(given).train()  # closes the engine
            sampled.append(found_in(folder / name))
    yield "sampled", sampled


def told_of(backend: FsdpBackend, engine: VllmEngine) -> list[tuple[Any, dict[str, Any]]]:
    return [(backend, {"micro_batch_size": 2}), (engine, {})]


def without(prompt: Prompts) -> list[int]:
    """The prompt's tokens less one of its picture's."""
    ids = prompt.prompt_ids[0].tolist()
    repeated = next(place for place in range(1, len(ids)) if ids[place] == ids[place - 1])
    return ids[:repeated] + ids[repeated + 1 :]


def of_run(folder: Path) -> Iterator[tuple[str, Any]]:
    """GRPO with a LoRA adapter, which the engine holds apart from the model."""
    model = save_vision(folder / "qwen3_vl", "qwen3_vl", **IN_VLLM["qwen3_vl"])
    keys: dict[str, Any] = {"rollout_engine": "vllm", "tuner_type": "lora", "vllm_enable_lora": True}
    keys |= {"freeze_vit": None, "learning_rate": 0.05, "vllm_max_model_len": 512, "vllm_max_num_seqs": 8}
    keys |= {"rollout_importance_sampling_mode": "token_truncate"}
    config = grpo_config(model, folder / "lora", **KEYS | keys)
    GRPOTrainer.check(config, None)
    with without_runtime():
        trainer = GRPOTrainer(config)
        trainer.train()
        engine: Any = trainer.generator.engine
        yield "adapter", sorted(engine.fingerprints())
        engine.close()
    yield "steps", [line for line in lines(folder / "lora") if "loss" in line]


def of_files(folder: Path) -> Iterator[tuple[str, Any]]:
    """Two of ms-swift's files for Ray, each in this process alone: on megatron, and with no engine in vLLM's place."""
    small = {"use_ray": False, "max_steps": 2, "max_completion_length": 6, "max_length": 512, "global_batch_size": 8}
    small |= {"vllm_max_model_len": 1024, "sleep_level": 0, "dataset_num_proc": 1, "report_to": "none"}
    small |= {"backend": "megatron", "train.tensor_model_parallel_size": 1, "save_strategy": "no"}
    plugins = ["examples/grpo/count_shapes.py", "tests/megatron_on_cpu.py"]

    def ran(name: str, kind: Any, trainer: Any, file: str, **keys: Any) -> Iterator[tuple[str, Any]]:
        words = small | keys | {"output_dir": str(folder / name)}
        told = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in words.items()]
        config = load_config(kind, ["--config", str(FILES / file), *told])
        trainer.check(config, None)
        with without_runtime():
            run = trainer(config)
            run.train()
            run.generator.engine.close()
        yield name, [line for line in lines(folder / name) if "loss" in line]

    model = save_vision(folder / "grpo_model", "qwen2_5_vl", **IN_VLLM["qwen2_5_vl"])
    keys: dict[str, Any] = {"model": model, "dataset": "count_shapes#64", "external_plugins": plugins}
    keys |= {"system": "examples/ms_swift/system.txt", "steps_per_generation": 1, "dtype": "float32"}
    yield from ran("ray_grpo_colocate", GRPOConfig, GRPOTrainer, "grpo/ray_grpo_colocate.yaml", **keys)

    rows = [{"instruction": f"What is {k} and {k}?", "input": "", "output": f"It is {2 * k}."} for k in range(32)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    student, teacher = (save_vision(folder / f"gkd_{seed}", "qwen3_5", seed, **IN_VLLM["qwen3_5"]) for seed in range(2))
    keys = {"model": student, "teacher.model": teacher, "dataset": str(folder / "rows.jsonl"), "dtype": "bfloat16"}
    keys |= {"external_plugins": plugins[1:], "teacher.vllm_max_model_len": 1024}
    yield from ran("standalone", GKDConfig, GKDTrainer, "rollout_colocate_teacher_standalone.yaml", **keys)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    found = dict(of_engine(place)) | dict(of_run(place)) | dict(of_files(place))
    (place / "found.json").write_text(json.dumps(found))
