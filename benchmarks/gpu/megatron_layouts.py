"""Does a model in parts on GPUs, over NCCL, compute and learn what it does in one process on the CPU?

    python -m benchmarks.gpu.megatron_layouts [--ranks 2] [--only WORD ...] [--transformer_impl local] [--json FILE]
    python -m benchmarks.gpu.megatron_layouts --fp8 tensorwise      # products in fp8, by TransformerEngine

Small Qwen3 models, dense and of experts, with and without LoRA, in every layout that so many GPUs allow; some go on
from a checkpoint of another layout after half of the steps, some wait in the memory of the host in between. Beside
each, the same from transformers on one CPU (backend ``fsdp``, float32): the largest differences of log-probabilities
before training, losses and norms of the gradients of four steps (norms: relative), and weights after them. float32 has
to agree to 1e-4, bfloat16 to its rounding (0.3: a token may go to another expert), or the run fails. Where
TransformerEngine is installed layers are its own, but for those with LoRA, and float32 products those of TF32 (5e-3).
``--fp8``: the cases in bfloat16 without LoRA, by that recipe; log-probabilities have to differ from those in bfloat16
too, or it was no fp8.
Speed is not measured here. Without GPUs, gloo and the CPU take their place.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.parts import run_limited
from benchmarks.gpu.steps import ON_GPU
from benchmarks.origin import origin
from tests.backends.batches import samples_of, weighted_loss

STEPS, MICRO = 4, 2
TRAINING = {
    "learning_rate": 1e-2,
    "num_training_steps": 10,
    "weight_decay": 0.1,
    "adam_epsilon": 1e-3,  # weights without a gradient to speak of do not move by the sign of a rounding
    "max_grad_norm": 0.5,
}
SHAPE = {
    "vocab_size": 1001,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", SHAPE),
    "experts": ("qwen3_moe", SHAPE | EXPERTS | {"decoder_sparse_step": 1}),
}
OF_EXPERTS = ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA: dict[str, dict[str, Any]] = {
    "dense": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "experts": {"r": 4, "lora_alpha": 8, "target_modules": OF_EXPERTS},
}
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.3}
TF32 = 5e-3  # the accuracy of TransformerEngine's products of float32
FP8 = {"logps": 1.0, "losses": 0.2, "norms": 0.3, "weights": 0.1}  # at most
ROUNDED = 2e-2  # the least that log-probabilities in fp8 are from those in bfloat16 of the same model
SHORT = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "virtual_pipeline_model_parallel_size": "VPP",
    "context_parallel_size": "CP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
}
TOLD_BY_VALUE = ("recompute_granularity", "recompute_modules", "moe_token_dispatcher_type")
LONG = {short: key for key, short in SHORT.items()}

Layout = dict[str, Any]


def cut(**sizes: int) -> Layout:
    """``cut(TP=2)``: the keys of a layout."""
    return {LONG[short]: size for short, size in sizes.items()}


GROUPED: Layout = {"moe_grouped_gemm": True}
OVERLAP: Layout = {"overlap_grad_reduce": True, "overlap_param_gather": True}
PLAIN: Layout = {"use_distributed_optimizer": False}
FULL: Layout = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MOE_ACT: Layout = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
AWAY: Layout = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}


@dataclass(frozen=True)
class Case:
    """A model in a layout; after half of the steps it goes on in another one, or comes back from the host's memory."""

    model: str
    layout: Layout
    lora: bool = False
    then: Layout | None = None
    offloads: bool = False
    async_save: bool = False
    dtype: str = "float32"

    @property
    def right(self) -> str:
        return f"{self.model} LoRA" if self.lora else self.model

    def __str__(self) -> str:
        words = [self.right, told(self.layout)]
        words += [] if self.then is None else ["saved in the background," if self.async_save else "saved,", "then"]
        words += [] if self.then is None else [told(self.then)]
        return " ".join([*words, *(["to the host and back"] if self.offloads else []), self.dtype])


def told(layout: Layout) -> str:
    """The layout in a word for each key that matters, such as TP2 or moe_grouped_gemm."""
    words = [f"{SHORT[key]}{value}" for key, value in layout.items() if key in SHORT]
    words += [key for key, value in layout.items() if value is True]
    words += [f"no {key}" for key, value in layout.items() if value is False]
    words += [str(layout[key]) for key in TOLD_BY_VALUE if key in layout]
    return ", ".join(words) or "as it is"


def cases(ranks: int) -> list[Case]:
    """Those of so many GPUs."""
    if ranks == 1:
        dense: list[Layout] = [{}, FULL | AWAY]
        experts: list[Layout] = [{}, GROUPED, GROUPED | MOE_ACT]
        lora, lora_experts = [Layout()], [Layout(), GROUPED]
        resumed = [("dense", False, {}, PLAIN), ("experts", False, {}, GROUPED), ("experts", True, GROUPED, {})]
    else:
        n = ranks
        dense = [{}, OVERLAP, PLAIN, AWAY, cut(TP=n), cut(TP=n) | {"sequence_parallel": False}, cut(TP=n) | FULL]
        dense += [cut(PP=n), cut(PP=n, VPP=4 // n), cut(CP=n), cut(CP=n) | OVERLAP]
        experts = [GROUPED, cut(EP=n), cut(EP=n) | GROUPED, cut(EP=n) | GROUPED | MOE_ACT | OVERLAP, cut(TP=n)]
        experts += [cut(TP=n) | GROUPED, cut(TP=n, EP=n, ETP=1) | GROUPED, cut(PP=n) | GROUPED, cut(CP=n) | GROUPED]
        experts += [cut(EP=n) | {"moe_token_dispatcher_type": "allgather"}]
        lora = [OVERLAP, cut(TP=n), cut(PP=n), cut(CP=n)]
        lora_experts = [cut(EP=n), cut(EP=n) | GROUPED, cut(TP=n) | GROUPED, cut(TP=n, EP=n, ETP=1) | GROUPED]
        if n == 4:
            dense += [cut(TP=2, PP=2), cut(TP=2, CP=2), cut(TP=2) | OVERLAP, cut(PP=2, VPP=2) | OVERLAP]
            experts += [cut(TP=2, EP=2, ETP=2) | GROUPED, cut(EP=2) | GROUPED | OVERLAP, cut(PP=2, EP=2) | GROUPED]
        resumed = [("dense", False, cut(TP=n), cut(PP=n)), ("dense", False, cut(PP=n), OVERLAP)]
        resumed += [("experts", False, cut(EP=n) | GROUPED, cut(TP=n)), ("dense", True, cut(TP=n), cut(PP=n))]
        resumed += [("experts", True, cut(EP=n) | GROUPED, cut(TP=n) | GROUPED)]
    found = [Case("dense", layout) for layout in dense] + [Case("experts", layout) for layout in experts]
    found += [Case("dense", layout, lora=True) for layout in lora]
    found += [Case("experts", layout, lora=True) for layout in lora_experts]
    found += [
        Case(model, layout, lora=with_lora, then=then, async_save=not with_lora)
        for model, with_lora, layout, then in resumed
    ]
    found += [Case("dense", dense[-1], offloads=True), Case("experts", experts[1], lora=True, offloads=True)]
    half = [Case("dense", layout, dtype="bfloat16") for layout in dense]
    half += [Case("experts", layout, dtype="bfloat16") for layout in experts]
    half += [Case("experts", layout, lora=True, dtype="bfloat16") for layout in lora_experts]
    return found + half


def save(folder: Path) -> None:
    """The models, and what one CPU makes of each, with an adapter to begin with where there is one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainers.backends.fsdp.backend import FsdpBackend

    for name, (family, fields) in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields), dtype=torch.float32)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.05 * torch.randn_like(weight))  # norms tell something too
        model.save_pretrained(folder / name)
        for lora in (None, LORA[name]):
            backend = FsdpBackend(folder / name, lora=lora, device="cpu", **TRAINING)
            if lora is not None:
                with torch.no_grad():
                    for one, weight in backend.module.named_parameters():
                        if ".lora_B." in one:
                            weight.add_(0.1 * torch.randn_like(weight))
                backend.save(folder / f"{name} start")
            logps = backend.token_logps(samples_of(), micro_batch_size=3).values
            steps = [step(backend, samples_of()) for _ in range(STEPS)]
            right = {
                "logps": torch.from_numpy(logps),
                "losses": torch.tensor([one["loss"] for one in steps]),
                "norms": torch.tensor([one["grad_norm"] for one in steps]),
                "weights": {one: weight.clone() for one, weight in backend.named_weights()},
            }
            torch.save(right, folder / f"{name}{'' if lora is None else ' LoRA'}.pt")


def step(backend: Any, samples: Any) -> dict[str, float]:
    total = float(samples_of().target_mask.values.sum())
    found: dict[str, float] = backend.step(samples, partial(weighted_loss, total), micro_batch_size=MICRO).values()
    return found


def differences(case: Case, folder: Path, transformer: dict[str, Any]) -> dict[str, float]:
    """How far this is from the one process; the same on every rank."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from trainers.backends.megatron.backend import MegatronBackend
    from trainers.backends.megatron.settings import MegatronSettings

    def built(layout: Layout, transformer: dict[str, Any] = transformer) -> Any:
        return MegatronBackend(
            folder / case.model,
            settings=MegatronSettings(**layout, transformer=transformer),
            lora=LORA[case.model] if case.lora else None,
            dtype=case.dtype,
            async_save=case.async_save,
            **TRAINING,
        )

    def own(backend: Any) -> Any:
        index, count, _ = backend.shard
        return samples_of()[np.array_split(np.arange(len(samples_of())), count)[index]]

    in_bfloat16 = None
    if "fp8" in transformer:
        backend = built(case.layout, {})
        in_bfloat16 = backend.token_logps(own(backend), micro_batch_size=3).values
        parallel_state.destroy_model_parallel()
    backend = built(case.layout)
    if case.lora:
        backend.load_adapter(folder / f"{case.model} start")
    logps = backend.token_logps(own(backend), micro_batch_size=3).values
    found: dict[str, Any] = {"logps": (*backend.shard, logps)}
    found["rounded"] = 0.0 if in_bfloat16 is None else float(np.abs(logps - in_bfloat16).max())
    half = STEPS // 2
    steps = [(backend.shard, step(backend, own(backend))) for _ in range(half)]
    if case.then is not None:
        kept = folder / f"{case} checkpoint"
        backend.save(kept)
        backend.writer.wait()
        parallel_state.destroy_model_parallel()
        backend = built(case.then)
        backend.load(kept)
    if case.offloads:
        backend.offload()
        backend.reload()
    steps += [(backend.shard, step(backend, own(backend))) for _ in range(STEPS - half)]
    found["losses"] = [one["loss"] if leader else 0.0 for (_, _, leader), one in steps]
    found["norms"] = [one["grad_norm"] for _, one in steps]
    right = torch.load(folder / f"{case.right}.pt")
    weights = {name: weight.float().cpu() for name, weight in backend.named_weights()}
    if weights.keys() != right["weights"].keys():
        raise RuntimeError(f"names differ: {sorted(weights.keys() ^ right['weights'].keys())[:4]}")
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    parallel_state.destroy_model_parallel()
    leaders = sorted((one["logps"] for one in ranks if one["logps"][2]), key=lambda one: one[0])
    logps = np.concatenate([values for *_, values in leaders])
    losses, norms = np.sum([one["losses"] for one in ranks], 0), np.array(ranks[0]["norms"])
    return {
        "logps": float(np.abs(logps - right["logps"].numpy()).max()),
        "losses": float(np.abs(losses - right["losses"].numpy()).max()),
        "norms": float(np.abs(norms / right["norms"].numpy() - 1).max()),
        "rounded": max(one["rounded"] for one in ranks),
        "weights": float(np.max([(weight - right["weights"][name]).abs().max() for name, weight in weights.items()])),
    }


def rank(options: argparse.Namespace, folder: Path) -> None:
    """One process of those that torchrun started: each case that nobody has tried. It ends with one that fails."""
    import torch.distributed as dist

    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        from tests import megatron_on_cpu

        megatron_on_cpu.install()
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    transformer = {} if options.transformer_impl is None else {"transformer_impl": options.transformer_impl}
    transformer |= {"fp8": "hybrid", "fp8_recipe": options.fp8} if options.fp8 else {}
    for k, case in chosen(options):
        file = folder / f"{k}.json"
        if file.exists():
            continue
        began = time.perf_counter()
        try:
            found: dict[str, Any] = differences(case, folder, transformer)
        except Exception:
            file.write_text(json.dumps({"failed": traceback.format_exc()[-3000:]}))
            os._exit(1)  # the others may wait for this one
        dist.barrier()
        if dist.get_rank() == 0:
            file.write_text(json.dumps(found | {"seconds": time.perf_counter() - began}))
        dist.barrier()


def chosen(options: argparse.Namespace) -> list[tuple[int, Case]]:
    found = list(enumerate(cases(options.ranks)))
    wanted = [(k, case) for k, case in found if all(word in str(case) for word in options.only)]
    wanted = [(k, case) for k, case in wanted if not any(word in str(case) for word in options.without)]
    return [(k, case) for k, case in wanted if not options.fp8 or (case.dtype == "bfloat16" and not case.lora)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=[1, 2, 4], default=max(1, torch.cuda.device_count()))
    parser.add_argument("--only", nargs="*", default=[], help="words that a case has to have")
    parser.add_argument("--without", nargs="*", default=[], help="words that it may not have")
    parser.add_argument("--transformer_impl", choices=["local", "transformer_engine"])
    parser.add_argument("--fp8", metavar="RECIPE", help="fp8_recipe; needs TransformerEngine")
    parser.add_argument("--limit_s", type=float, default=120, help="seconds that a start of the ranks may take")
    parser.add_argument("--tries", type=int, default=4, help="starts: a case that fails ends the ranks")
    parser.add_argument("--json", help="file to write; default: in the folder OUT, if that is set")
    parser.add_argument("--rank_in", help=argparse.SUPPRESS)
    parser.add_argument("--right_in", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.right_in:
        save(Path(options.right_in))
        return
    if options.rank_in:
        rank(options, Path(options.rank_in))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        module = [sys.executable, "-m", "benchmarks.gpu.megatron_layouts"]
        hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        subprocess.run([*module, "--right_in", name], env=hidden, check=True)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
        command = [*launch, *module[1:], *sys.argv[1:], "--ranks", str(options.ranks), "--rank_in", name]
        wanted = dict(chosen(options))
        if not wanted:
            parser.error(f"no case has the words {options.only} and none of {options.without}")
        for _ in range(options.tries):
            if any(not (folder / f"{k}.json").exists() for k in wanted):
                run_limited(command, options.limit_s)
        found = {str(case): answer(folder / f"{k}.json") for k, case in wanted.items()}
    sys.exit(report(options, found))


def answer(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {"failed": "it was not reached"}
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def agrees(case: str, number: str, value: float, options: argparse.Namespace) -> bool:
    if number == "rounded":
        return value >= ROUNDED
    if options.fp8:
        return value <= FP8[number]
    return value <= limit(case, options)


def limit(case: str, options: argparse.Namespace) -> float:
    has_engine = options.transformer_impl != "local" and importlib.util.find_spec("transformer_engine") is not None
    dtype = case.split()[-1]
    return TF32 if has_engine and dtype == "float32" and "LoRA" not in case else TOLERANCE[dtype]


def report(options: argparse.Namespace, found: dict[str, dict[str, Any]]) -> str | None:
    """What did not agree, in words; None if all did."""
    target = options.json or (Path(os.environ["OUT"]) / "megatron_layouts.json" if "OUT" in os.environ else None)
    if target:
        Path(target).write_text(json.dumps({**origin(), "options": vars(options), "cases": found}, indent=1))
    numbers = ["logps", "losses", "norms", "weights", *(["rounded"] if options.fp8 else [])]
    wrong = []
    print(f"{'':<100}" + "".join(f"{name:>10}" for name in numbers))
    for name, one in found.items():
        if "failed" in one:
            print(f"{name}: failed\n{one['failed']}")
            wrong.append(name)
            continue
        print(f"{name:<100}" + "".join(f"{one[number]:>10.1e}" for number in numbers))
        if not all(agrees(name, number, one[number], options) for number in numbers):
            wrong.append(name)
    return f"not as on one CPU: {'; '.join(wrong)}" if wrong else None


if __name__ == "__main__":
    main()
