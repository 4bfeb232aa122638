"""What models make of rows with videos, in a process of its own that can import torchvision.

python -m tests.images.video_cases FOLDER       writes FOLDER/found.json
"""

from __future__ import annotations

import dataclasses
import io
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from PIL import Image
from transformers import AutoTokenizer

from benchmarks.tiny.vision import frames, picture, png, save_vision
from rayhelper import ConfigError
from tests.backends import test_megatron_images as megatron_cases
from tests.backends.batches import mean_loss
from tests.backends.test_megatron import PLAIN, PP, SP, TP, Layout
from tests.backends.test_megatron_images import PACKED
from tests.conftest import without_runtime
from tests.e2e.runs import (
    classification_config,
    cpo_config,
    dpo_config,
    gkd_config,
    grpo_config,
    kto_config,
    lines,
    ppo_config,
    reward_config,
    sft_config,
)
from tests.images import test_sft as pictures
from tests.images.test_grpo import NEW_TOKENS, greedy_of_transformers, prompts
from tests.images.test_sft import logps_of, our_gradients, turns, whole_of
from trainers.backends.fsdp.backend import FsdpBackend
from trainers.backends.fsdp.sharding import full
from trainers.batch import Sequences
from trainers.classification.trainer import ClassificationTrainer
from trainers.configuration.vision import vision_settings
from trainers.cpo.trainer import CPOTrainer
from trainers.data.images.processor import ImageReader, load_processor
from trainers.data.images.videos import Video
from trainers.data.rows import pack, tokenize_sft
from trainers.dpo.scores import pair_logps
from trainers.dpo.trainer import DPOTrainer
from trainers.gkd.trainer import GKDTrainer
from trainers.grpo.trainer import GRPOTrainer
from trainers.kto.trainer import KTOTrainer
from trainers.parts.engine import prompts_of
from trainers.ppo.trainer import PPOTrainer
from trainers.reward.trainer import RewardTrainer
from trainers.rollout.base import Sampling
from trainers.rollout.hf.engine import HfEngine
from trainers.sft.trainer import SFTTrainer

MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "internvl", "llava_onevision")
PACKS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "llava_onevision")
ROWS: list[dict[str, Any]] = [
    {"messages": turns("<video>What moves?", "a square"), "videos": [frames(0)], "images": []},
    {"messages": turns("Nothing to see", "none at all"), "videos": [], "images": []},
    {"messages": turns("<image> and <video>?", "both"), "videos": [frames(1)], "images": [png(1)]},
    {"messages": turns("A <video>, a <video>", "two"), "videos": [frames(2), frames(0)], "images": []},
    {"messages": turns("What is it? <image>", "one"), "videos": [], "images": [png(4)]},
]


def opened(files: list[bytes]) -> np.ndarray:
    return np.stack([np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files])


def metadata(count: int, rate: float = 2.0) -> dict[str, Any]:
    return {"total_num_frames": count, "fps": rate, "frames_indices": list(range(count)), "duration": count / rate}


def parts(content: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    while content:
        places = [(content.find(f"<{kind}>"), kind) for kind in ("image", "video") if f"<{kind}>" in content]
        place, kind = min(places, default=(len(content), ""))
        found += [{"type": "text", "text": content[:place]}] if place else []
        found += [{"type": kind}] if kind else []
        content = content[place + (len(kind) + 2 if kind else 0) :]
    return found


def batch_of(processor: Any, row: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The model's arguments, by transformers' own processor."""
    shown = [{**turn, "content": parts(turn["content"])} for turn in row["messages"]]
    given: dict[str, Any] = {}
    if row["images"]:
        given["images"] = [[next(picture(k) for k in range(8) if png(k) == one) for one in row["images"]]]
    if row["videos"]:
        given["videos"] = [opened(video) for video in row["videos"]]
        given["video_metadata"] = [metadata(len(video)) for video in row["videos"]]
        given["do_sample_frames"] = False
    text = processor.tokenizer.apply_chat_template(shown, tokenize=False, **options)
    return dict(processor(text=[text], return_tensors="pt", **given))


def transformers_logps(module: Any, model: str, rows: list[dict[str, Any]]) -> list[torch.Tensor]:
    processor = load_processor(model, videos={})
    return [logps_of(module, batch_of(processor, row)) for row in rows]


def transformers_gradients(model: str, rows: list[dict[str, Any]]) -> tuple[float, dict[str, torch.Tensor]]:
    module = whole_of(model)
    loss = -torch.cat(transformers_logps(module, model, rows)).mean()
    loss.backward()
    return loss.item(), {name: w.grad for name, w in module.named_parameters() if w.grad is not None}


def sequences_of(model: str, rows: list[dict[str, Any]], **options: Any) -> Sequences:
    tokenizer = AutoTokenizer.from_pretrained(model)
    reader = ImageReader(tokenizer, model)
    return tokenize_sft(Dataset.from_list(rows), tokenizer, max_length=None, images=reader, **options)


def gap(ours: tuple[float, dict[str, torch.Tensor]], theirs: tuple[float, dict[str, torch.Tensor]]) -> list[float]:
    """The distances of losses, and of gradients by the largest of them."""
    largest = max(1.0, *(float(gradient.abs().max()) for gradient in theirs[1].values()))
    distances = []
    for name in {**ours[1], **theirs[1]}:
        one, other = (found[1].get(name) for found in (ours, theirs))
        one = torch.zeros_like(other) if one is None else one  # type: ignore[arg-type]
        other = torch.zeros_like(one) if other is None else other
        distances.append(float((one - other).abs().max()) / largest)
    return [abs(ours[0] - theirs[0]), max(distances)]


def of_losses(folder: Path) -> Iterator[tuple[str, Any]]:
    for name in MODELS:
        model = save_vision(folder / name, name)
        theirs = transformers_gradients(model, ROWS)
        batch = sequences_of(model, ROWS)
        yield f"padded {name}", gap(our_gradients(model, batch), theirs)
        if name in PACKS:
            yield f"padding free {name}", gap(our_gradients(model, batch, padding_free=True), theirs)
            packed = pack(batch, max_length=2 * int(batch.input_ids.lengths.max()))
            assert len(packed) < len(ROWS)
            yield f"packed {name}", gap(our_gradients(model, packed), theirs)


def forked(function: Callable[..., Any], *args: Any, folder: Path) -> list[Any]:
    """What two gloo ranks return, forked from here: those of the suite's own server cannot import torchvision.

    They come before all else: this process has computed nothing yet.
    """
    meeting = str(folder / f"meeting_{function.__name__}")
    files = [f"{meeting}_{rank}.pt" for rank in range(2)]
    told = [(rank, meeting, file, function, args) for rank, file in enumerate(files)]
    ranks = [multiprocessing.get_context("fork").Process(target=_rank, args=one) for one in told]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    return [torch.load(file, weights_only=False) for file in files]


def _rank(rank: int, meeting: str, file: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    method, patience = f"file://{meeting}", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2, timeout=patience)
    torch.save(function(rank, *args), file)
    dist.barrier()
    dist.destroy_process_group()


def of_shards(folder: Path) -> Iterator[tuple[str, Any]]:
    """Two ranks, of which one has rows with pictures and videos, and the other has pictures alone, or none."""
    model = save_vision(folder / "sharded", "qwen3_vl")
    batch = sequences_of(model, ROWS)
    thinker = save_vision(folder / "thinker", "qwen2_5_omni")
    seen = pictures.sequences_of(thinker)
    ranks = forked(of_rank, model, batch, folder=folder)
    of_thinker = forked(of_rank, thinker, seen, folder=folder / "thinker")
    theirs = transformers_gradients(model, ROWS)
    yield "sharded", gap((theirs[0], ranks[0]), theirs)
    loss, gradients = pictures.transformers_gradients(thinker)
    named = {f"thinker.{name}": gradient for name, gradient in gradients.items()}
    yield "sharded thinker", gap((loss, of_thinker[0]), (loss, named))


def of_rank(rank: int, model: str, batch: Sequences) -> dict[str, torch.Tensor]:
    backend = FsdpBackend(model, learning_rate=0.0, max_grad_norm=0.0, num_training_steps=2, sharding="full_shard")
    found: dict[str, torch.Tensor] = {}

    def step(*_: Any, **__: Any) -> None:
        weights = [(name, weight.grad) for name, weight in backend.module.named_parameters()]
        found.update({name: full(grad).clone() for name, grad in weights if grad is not None})

    assert backend.optimizer is not None
    backend.optimizer.register_step_pre_hook(step)
    normaliser = float(batch.target_mask.values.sum())
    own = batch[np.array([1, 4] if rank else [0, 2, 3])]
    logps = backend.token_logps(own, micro_batch_size=1)
    assert len(logps) == len(own)
    backend.step(own, lambda *args, **extra: mean_loss(normaliser, *args), micro_batch_size=1)
    return found


LAYOUTS: dict[str, Layout] = {
    "qwen3_vl": {TP: 2} | SP | PLAIN | {PACKED: True},
    "qwen2_5_vl": {PP: 2},
    "qwen3_5": {TP: 2} | SP,
    "internvl": {TP: 2} | PLAIN,
}


def of_megatron(folder: Path) -> Iterator[tuple[str, Any]]:
    """As in ``tests/backends/test_megatron_images.py``, of rows with videos, on two ranks."""
    models = {name: save_vision(folder / f"megatron_{name}", name) for name in LAYOUTS}
    batches = {name: sequences_of(model, ROWS) for name, model in models.items()}
    ranks = forked(of_models, [(models[name], batches[name], LAYOUTS[name]) for name in LAYOUTS], folder=folder)
    for k, name in enumerate(LAYOUTS):
        right, found = megatron_cases.wanted(models[name], batches[name]), [rank[k] for rank in ranks]
        (leader,) = [one for one in found if one["leader"]]
        logps, expected = (np.sort(one["logps"]) for one in (leader, right))
        weights = [one["weights"][key] - weight for one in found for key, weight in right["weights"].items()]
        yield (
            f"megatron {name}",
            {
                "logps": float(np.abs(logps - expected).max()),
                "losses": float(np.abs(np.subtract(leader["losses"], right["losses"])).max()),
                "norms": float(np.abs(np.subtract(leader["norms"], right["norms"])).max()),
                "weights": max(float(weight.abs().max()) for weight in weights),
            },
        )


def of_models(rank: int, given: list[tuple[str, Sequences, Layout]]) -> list[Any]:
    return [megatron_cases.of_layouts(rank, folder, batch, [layout])[0] for folder, batch, layout in given]


PAIRS: list[dict[str, Any]] = [
    {
        "prompt": [{"role": "user", "content": f"<video>What moves? {k}"}],
        "chosen": [{"role": "assistant", "content": "a square"}],
        "rejected": [{"role": "assistant", "content": "nothing at all"}],
        "videos": [frames(k, 4 + 2 * k)],
        "images": [],
    }
    for k in range(2)
]


def of_pairs(folder: Path) -> Iterator[tuple[str, Any]]:
    model = save_vision(folder / "pairs", "qwen2_5_vl")
    keys: dict[str, Any] = {"dataset": PAIRS, "eval_dataset": None, "max_length": None, "max_steps": 1}
    with without_runtime():
        trainer = DPOTrainer(dpo_config(model, folder / "dpo", **keys))
        yield "dpo loss", trainer.train()["loss"]
    found = dict(
        zip(("chosen", "rejected"), pair_logps(FsdpBackend(model), trainer.pairs, micro_batch_size=2), strict=True)
    )
    module = whole_of(model)
    for name in ("chosen", "rejected"):
        rows = [{"messages": row["prompt"] + row[name], **{m: row[m] for m in ("images", "videos")}} for row in PAIRS]
        with torch.no_grad():
            wanted = transformers_logps(module, model, rows)
        sizes = found[name].lengths
        theirs = [float(logps[-size:].sum()) for logps, size in zip(wanted, sizes, strict=True)]
        ours = [float(found[name][k].sum()) for k in range(len(PAIRS))]
        yield f"pairs {name}", max(abs(one - other) for one, other in zip(ours, theirs, strict=True))


def of_trainers(folder: Path) -> Iterator[tuple[str, Any]]:
    """The losses of first steps that see the videos of the rows, and that see others."""
    model, teacher = (save_vision(folder / f"trainers_{seed}", "qwen3_vl", seed) for seed in (0, 1))
    asked = [(row["prompt"], row["chosen"], row["rejected"], row["videos"]) for row in PAIRS]
    kinds: dict[str, tuple[Any, Any, list[dict[str, Any]], dict[str, Any]]] = {
        "cpo": (CPOTrainer, cpo_config, [{"prompt": p, "chosen": c, "rejected": r} for p, c, r, _ in asked], {}),
        "reward": (
            RewardTrainer,
            reward_config,
            [{"prompt": p, "chosen": c, "rejected": r} for p, c, r, _ in asked],
            {},
        ),
        "kto": (
            KTOTrainer,
            kto_config,
            [{"prompt": p, "completion": c, "label": k == 0} for k, (p, c, _, _) in enumerate(asked)],
            {"beta": 5.0},
        ),
        "classification": (
            ClassificationTrainer,
            classification_config,
            [{"messages": p, "label": k} for k, (p, *_) in enumerate(asked)],
            {"num_labels": 2},
        ),
        "gkd": (
            GKDTrainer,
            gkd_config,
            [{"prompt": p, "completion": c} for p, c, _, _ in asked],
            {"lmbda": 0.0, "teacher_model": teacher},
        ),
    }
    shared: dict[str, Any] = {"eval_dataset": None, "max_steps": 1, "warmup_steps": 0, "max_length": None}
    for name, (trainer, config, rows, keys) in kinds.items():
        losses = []
        for place, shift in (("seen", 0), ("others", 3)):
            videos = [[frames(k + shift, 4 + 2 * k)] for k in range(len(rows))]
            dataset = [row | {"videos": video} for row, video in zip(rows, videos, strict=True)]
            settings = shared | keys | {"dataset": dataset, "per_device_train_batch_size": 2, "global_batch_size": 2}
            with without_runtime():
                trainer(config(model, folder / f"{name}_{place}", **settings)).train()
            line = lines(folder / f"{name}_{place}")[0]
            losses.append(line["logps/chosen" if name == "kto" else "loss"])  # whose first loss is the same for all
        yield f"trainer {name}", losses


def of_gemma4(folder: Path) -> Iterator[tuple[str, Any]]:
    """Pictures alone, by a model whose processor cannot be imported without torchvision."""
    model = save_vision(folder / "gemma4", "gemma4")
    tokenizer = AutoTokenizer.from_pretrained(model)
    special = set(tokenizer.all_special_tokens)
    theirs, batch = pictures.transformers_gradients(model), pictures.sequences_of(model)
    for name, settings in (("padded", {}), ("padding free", {"padding_free": True}), ("checkpointed", CHECKPOINTED)):
        yield f"gemma4 {name}", gap(pictures.our_gradients(model, batch, **settings), theirs)
    mixture = save_vision(folder / "gemma4_moe", "gemma4_moe")
    theirs, batch = pictures.transformers_gradients(mixture), pictures.sequences_of(mixture)
    yield "gemma4 mixture", gap(pictures.our_gradients(mixture, batch), theirs)
    backend = FsdpBackend(model, learning_rate=0.1, num_training_steps=1, vision={"frozen": ["vit"]})
    trained = [name for name, weight in backend.module.named_parameters() if weight.requires_grad]
    yield "gemma4 trained", [name for name in trained if "_tower" in name]
    asked = prompts(model, folder)
    engine = HfEngine(backend.module, tokenizer, vision=backend.vision)
    found = engine.generate(asked, Sampling(max_completion_length=NEW_TOKENS, temperature=0.0), seed=0)
    wanted = greedy_of_transformers(model)
    ours = [[row.tolist() for row in rows] for rows in (asked.prompt_ids, found.completion_ids)]
    yield "gemma4 completions", [ours, list(wanted)]
    load_processor(model, tokenizer=tokenizer)
    yield "gemma4 demoted", sorted(special - set(tokenizer.all_special_tokens))


def of_llama4(folder: Path) -> Iterator[tuple[str, Any]]:
    """Pictures alone, of a model whose head is in a part of it."""
    model = save_vision(folder / "llama4", "llama4")
    theirs, batch = pictures.transformers_gradients(model), pictures.sequences_of(model)
    for size in (8, 1):
        yield f"llama4 by {size}", gap(pictures.our_gradients(model, batch, micro_batch_size=size), theirs)


CHECKPOINTED = {"gradient_checkpointing": True}
QUESTIONS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": "<video>What moves?"}], "videos": [frames(0)], "images": []},
    {"prompt": [{"role": "user", "content": "No video"}], "videos": [], "images": []},
    {"prompt": [{"role": "user", "content": "<image><video>?"}], "videos": [frames(1, 6)], "images": [png(1)]},
]


def of_completions(folder: Path) -> Iterator[tuple[str, Any]]:
    for name in MODELS[:4]:
        model = save_vision(folder / f"grpo_{name}", name)
        tokenizer, backend = AutoTokenizer.from_pretrained(model), FsdpBackend(model)
        config = grpo_config(model, folder / "out")
        asked = prompts_of(config, QUESTIONS, tokenizer, ImageReader(tokenizer, model))
        engine = HfEngine(backend.module, tokenizer, vision=backend.vision)
        found = engine.generate(asked, Sampling(max_completion_length=5, temperature=0.0), seed=0)
        module, processor, wanted = whole_of(model), load_processor(model, videos={}), []
        for row in QUESTIONS:
            batch = batch_of(processor, row | {"messages": row["prompt"]}, add_generation_prompt=True)
            options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
            ids = module.generate(**batch, **options, suppress_tokens=processor.seen_token_ids)[0].tolist()
            wanted.append([ids[: batch["input_ids"].shape[1]], ids[batch["input_ids"].shape[1] :]])
        ours = [
            [one.tolist(), other.tolist()] for one, other in zip(asked.prompt_ids, found.completion_ids, strict=True)
        ]
        samples = dataclasses.replace(found, images=asked.images).samples()
        logps = backend.token_logps(samples, micro_batch_size=2)
        yield f"completions {name}", [ours, wanted]
        yield f"logps {name}", float(np.abs(logps.values - found.rollout_logps.values).max())
    keys = {"dataset": QUESTIONS, "eval_dataset": None, "num_generations": 2, "max_prompt_length": None}
    keys |= {"max_completion_length": 5, "max_steps": 2, "warmup_steps": 0, "freeze_vit": False}
    with without_runtime():
        GRPOTrainer(grpo_config(model, folder / "run", **keys)).train()
        keys |= {"num_ppo_epochs": 1, "num_mini_batches": 1, "freeze_vit": True, "max_steps": 1}
        keys = {key: value for key, value in keys.items() if key != "num_generations"}
        PPOTrainer(ppo_config(model, folder / "ppo", **keys)).train()
    yield "grpo", [line["loss"] for line in lines(folder / "run")]
    yield "ppo", [line["loss/value_avg"] for line in lines(folder / "ppo")]


def of_files(folder: Path) -> Iterator[tuple[str, Any]]:
    """A video file, whose frames the model's video processor chooses: by its path and by its bytes."""
    import cv2

    file = folder / "videos" / "a.avi"
    file.parent.mkdir()
    writer = cv2.VideoWriter(str(file), cv2.VideoWriter_fourcc(*"FFV1"), 4.0, (32, 24))  # without loss
    whole = [np.full((24, 32, 3), 20 * k, np.uint8) for k in range(12)]
    for frame in whole:
        writer.write(frame)
    writer.release()
    for name, sampled in (("qwen2_5_vl", {"fps": 2.0, "do_sample_frames": True}), ("qwen3_vl", {})):
        model = save_vision(folder / f"files_{name}", name)
        processor = load_processor(model, videos={})
        shown = np.stack(whole)
        told = {"total_num_frames": 12, "fps": 4.0, "duration": 3.0}
        text = [processor.video_token]
        wanted = processor(text=text, videos=[shown], video_metadata=[told], return_tensors="pt", **sampled)
        (folder / f"{name}.jsonl").write_text(
            json.dumps({"messages": turns("<video>?", "a"), "videos": ["videos/a.avi"]}) + "\n"
        )
        rows = [str(folder / f"{name}.jsonl"), [{"messages": turns("<video>?", "a"), "videos": [file.read_bytes()]}]]
        rows += [[{"messages": turns([{"type": "video", "video": str(file)}, {"type": "text", "text": "?"}], "a")}]]
        for number, source in enumerate(rows):
            keys: dict[str, Any] = {"eval_dataset": None, "max_length": None, "max_steps": 1, "warmup_steps": 0}
            trainer = SFTTrainer(sft_config(model, folder / "file", dataset=source, **keys))
            assert trainer.sequences.images is not None
            seen = FsdpBackend(model).vision.seen(trainer.sequences.images)  # type: ignore[union-attr]
            ids = trainer.sequences.input_ids[0].tolist()
            count = ids.count(processor.video_token_id)
            same = torch.equal(seen["pixel_values_videos"], wanted["pixel_values_videos"])
            yield (
                f"file {name} {number}",
                [same, count, wanted["input_ids"][0].tolist().count(processor.video_token_id)],
            )

    chosen = np.linspace(0, 11, 6).round().astype(int)  # of Qwen3-VL's sampling, where the number of frames is said
    told |= {"frames_indices": chosen.tolist()}
    given: dict[str, Any] = {"videos": [shown[chosen]], "video_metadata": [told], "do_sample_frames": False}
    wanted = processor(text=text, return_tensors="pt", **given)
    vision = FsdpBackend(model, vision={"videos": {"num_frames": 6}}).vision
    seen = vision.seen([(Video(str(file)),)])  # type: ignore[union-attr]
    yield "number of frames", bool(torch.equal(seen["pixel_values_videos"], wanted["pixel_values_videos"]))


def of_rows(folder: Path) -> Iterator[tuple[str, Any]]:
    model = save_vision(folder / "rows", "qwen3_vl")
    for number, file in enumerate(frames(0)):
        (folder / f"{number}.png").write_bytes(file)
    paths = [str(folder / f"{number}.png") for number in range(4)]
    pil = [Image.open(io.BytesIO(file)) for file in frames(0)]
    asked = [{"type": "text", "text": "What?"}]
    forms: dict[str, tuple[Any, Any]] = {
        "bytes": ("<video>What?", [frames(0)]),
        "pil": ("<video>What?", [pil]),
        "paths": ("<video>What?", [paths]),
        "unplaced": ("What?", [paths]),
        "part": ([{"type": "video"}, *asked], [paths]),
        "own": ([{"type": "video", "video": paths}, *asked], None),
        "frames": ([{"type": "video", "frames": paths}, *asked], None),
    }
    keys: dict[str, Any] = {"eval_dataset": None, "max_length": None, "max_steps": 1, "warmup_steps": 0}
    found = {}
    for name, (question, videos) in forms.items():
        row = {"messages": turns(question, "one")} | ({} if videos is None else {"videos": videos})
        trainer = SFTTrainer(sft_config(model, folder / "form", dataset=[row], **keys))
        ((video,),) = trainer.sequences.images or [((),)]  # type: ignore[misc]
        pixels = [one.image().tobytes().hex() for one in video.source]
        found[name] = [trainer.sequences.input_ids[0].tolist(), pixels]
    yield "forms", {name: value == found["bytes"] for name, value in found.items()}
    learned = SFTTrainer(
        sft_config(model, folder / "form", dataset=[ROWS[0] | {"images": None}], assistant_only_loss=True, **keys)
    ).sequences
    tokenizer = AutoTokenizer.from_pretrained(model)
    yield "learned", tokenizer.decode(learned.input_ids.values[learned.target_mask.values])
    sizes = [frames(0)[0], frames(1)[0]]
    broken: dict[str, dict[str, Any]] = {
        "missing": {"videos": [[*paths[:3], "nowhere.png"]]},
        "null": {"videos": [None]},
        "empty": {"videos": [[]]},
        "one frame": {"videos": [paths[:1]]},
        "sizes": {"videos": [sizes]},
        "a picture": {"videos": ["0.png"]},
        "no file": {"videos": ["nowhere.mp4"]},
        "no video": {"videos": [b"words\0"]},
        "address": {"videos": ["https://example.org/a.mp4"]},
        "places": {"messages": turns("<video><video>", "a"), "videos": [paths]},
        "no place": {"messages": turns([{"type": "video"}], "a"), "videos": None},
        "token": {"messages": turns("<|video_pad|>", "a"), "videos": None},
    }
    for name, row in broken.items():
        yield f"broken {name}", wrong(model, folder, {"messages": turns("<video>What?", "one")} | row, **keys)
    keys["max_length"] = 12
    yield "cut", wrong(model, folder, {"messages": turns("<video>What?", "one"), "videos": [paths]}, **keys)
    keys["max_length"] = None
    keys["video_processor_kwargs"] = {"most_frames": 1}
    yield "argument", wrong(model, folder, {"messages": turns("<video>What?", "one"), "videos": [paths]}, **keys)
    keys["video_processor_kwargs"] = {"size": {"shortest_edge": 64, "longest_edge": 8 * 8 * 4}}
    config = sft_config(model, folder, dataset=[{"messages": turns("<video>?", "one"), "videos": [paths]}], **keys)
    small = SFTTrainer(config).sequences
    worker = FsdpBackend(model, vision=vision_settings(config, trains=False))
    assert worker.token_logps(small, micro_batch_size=1).values.all()  # for as many tokens as the driver has made
    yield "small", [int((one == tokenizer.convert_tokens_to_ids("<|video_pad|>")).sum()) for one in small.input_ids]
    stacks = save_vision(folder / "stacks", "llava_onevision")
    batch = sequences_of(stacks, [ROWS[0] | {"videos": [frames(0, count)]} for count in (4, 6)])
    try:
        FsdpBackend(stacks).token_logps(batch, micro_batch_size=2)
    except ConfigError as error:
        yield "stacks", str(error)
    blind = save_vision(folder / "blind", "gemma3")
    yield "gemma3", wrong(blind, folder, {"messages": turns("<video>What?", "one"), "videos": [paths]})
    row = {"messages": turns([{"type": "video", "video": paths}, *asked], "one")}
    yield "gemma3 part", wrong(blind, folder, row)


def wrong(model: str, folder: Path, row: dict[str, Any], **keys: Any) -> str:
    try:
        SFTTrainer(sft_config(model, folder / "wrong", dataset=[row], **keys))
    except ConfigError as error:
        return str(error)
    return ""


CASES = (
    of_shards,
    of_megatron,
    of_losses,
    of_pairs,
    of_trainers,
    of_completions,
    of_files,
    of_rows,
    of_gemma4,
    of_llama4,
)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for case in CASES:
        found.update(case(folder))
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
