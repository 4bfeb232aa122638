"""verl's optimizer and schedule, the length of a run and what happens when, in ours."""

from __future__ import annotations

from trainers.configuration.reading.given_keys import plain
from trainers.run.trackers import BUILT_IN
from trainers.translate.table import Ours, Theirs
from trainers.translate.verl.batches import generations
from trainers.translate.verl.names import ACTOR, SCHEDULES

UNREAD_BY_MEGATRON = [
    f"{ACTOR}.{name}"
    for name in (
        *("grad_clip", "optim.betas", "optim.lr_scheduler_type", "optim.warmup_style", "optim.min_lr_ratio"),
        "optim.num_cycles",
    )
]


def of_megatron(theirs: Theirs, ours: Ours, style: str = "constant") -> None:
    """Leaves out what the optimizer of Megatron does not read. ``style``: the system's default of lr_decay_style."""
    ours.drop(theirs, UNREAD_BY_MEGATRON, "the strategy megatron reads optim.clip_grad, lr_decay_style and min_lr")
    theirs.values = {name: value for name, value in theirs.values.items() if name not in UNREAD_BY_MEGATRON}
    optim = f"{ACTOR}.optim"
    theirs.defaults = {**theirs.defaults, f"{optim}.clip_grad": 1.0, f"{optim}.lr_decay_style": style}


def optimizer(theirs: Theirs, ours: Ours, optim: str = f"{ACTOR}.optim", steps: int | None = None) -> None:
    """The optimizer and its schedule. ``steps``: optimizer steps that a warm-up step counts. None: a generation's."""
    ours.say("learning_rate", theirs.take(f"{optim}.lr"), theirs, f"{optim}.lr")
    ours.say("weight_decay", theirs.take(f"{optim}.weight_decay"), theirs, f"{optim}.weight_decay")
    betas = theirs.take(f"{optim}.betas")
    ours.say("adam_beta1", betas[0], theirs, f"{optim}.betas")
    ours.say("adam_beta2", betas[1], theirs, f"{optim}.betas")
    is_own = f"{optim}.clip_grad" in theirs or f"{optim}.clip_grad" in theirs.defaults
    clip = f"{optim}.clip_grad" if is_own else f"{ACTOR}.grad_clip"
    ours.say("max_grad_norm", theirs.take(clip), theirs, clip)
    theirs.taken |= {f"{optim}.clip_grad", f"{ACTOR}.grad_clip"}
    styles = [f"{optim}.{name}" for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style")]
    default = next((name for name in reversed(styles) if name in theirs.defaults), styles[0])
    style = next((name for name in reversed(styles) if theirs.values.get(name) is not None), default)
    kind = theirs.take(style)
    theirs.taken |= set(styles)
    floor = theirs.take(f"{optim}.min_lr_ratio")
    if kind not in SCHEDULES:
        ours.refuse(style, f"{kind} is not translated (known: {', '.join(SCHEDULES)})")
        return
    if kind == "cosine" and (least := theirs.take(f"{optim}.min_lr")):
        ours.say("lr_scheduler_type", "cosine_with_min_lr", theirs, style, f"{optim}.min_lr")
        ours.say("lr_scheduler_kwargs", {"min_lr": least}, theirs, f"{optim}.min_lr")
    elif kind == "linear" and (least := theirs.take(f"{optim}.min_lr")):
        ours.say("lr_scheduler_type", "polynomial", theirs, style, f"{optim}.min_lr", note="of power 1: a line")
        ours.say("lr_scheduler_kwargs", {"lr_end": least, "power": 1.0}, theirs, f"{optim}.min_lr")
    elif kind == "cosine" and floor:
        ours.say("lr_scheduler_type", "cosine_with_min_lr", theirs, style, f"{optim}.min_lr_ratio")
        ours.say("lr_scheduler_kwargs", {"min_lr_rate": floor}, theirs, f"{optim}.min_lr_ratio")
    else:
        ours.say("lr_scheduler_type", SCHEDULES[kind], theirs, style)
    ours.drop(theirs, [f"{optim}.min_lr"], "this schedule has no lowest rate")
    note = "" if steps else "generations of {} optimizer steps"
    steps = steps or generations(theirs)[0]
    warmup, ratio = theirs.take(f"{optim}.lr_warmup_steps"), theirs.take(f"{optim}.lr_warmup_steps_ratio")
    if warmup is not None and warmup > 0:
        note = f"{warmup} {note.format(steps)}" if note else ""
        ours.say("warmup_steps", warmup * steps, theirs, f"{optim}.lr_warmup_steps", note=note)
    elif ratio:
        ours.say("warmup_ratio", ratio, theirs, f"{optim}.lr_warmup_steps_ratio")
    ours.drop(theirs, [f"{optim}.total_training_steps"], "the schedule ends with the run")
    if theirs.take(f"{optim}.num_cycles", 0.5) != 0.5 and kind == "cosine":
        ours.refuse(f"{optim}.num_cycles", "a cosine falls once, for half a cycle. Write 0.5")
    if theirs.take(f"{optim}.optimizer", "AdamW").lower() not in ("adam", "adamw"):
        ours.refuse(f"{optim}.optimizer", "only AdamW is translated; write optim")
    theirs.taken.add(f"{optim}.optimizer_impl")


def run(theirs: Theirs, ours: Ours) -> None:
    """How long a run is; what is evaluated, saved and logged when."""
    steps, _ = generations(theirs)
    each = f"generations of {steps} optimizer steps"
    total = theirs.take("trainer.total_training_steps")
    epochs = theirs.take("trainer.total_epochs")
    if total is not None:
        ours.say("max_steps", total * steps, theirs, "trainer.total_training_steps", note=f"{total} {each}")
        ours.drop(theirs, ["trainer.total_epochs"], "total_training_steps says it")
    else:
        ours.say("num_train_epochs", epochs, theirs, "trainer.total_epochs")
    save, test = theirs.take("trainer.save_freq"), theirs.take("trainer.test_freq")
    note = f"{save} {each}" if save > 0 else "the final model alone"
    ours.say("save_steps", max(0, save) * steps, theirs, "trainer.save_freq", note=note)
    evaluates = any(line.key == "eval_dataset" for line in ours.lines)
    before = bool(theirs.take("trainer.val_before_train")) and evaluates
    if evaluates and test > 0:
        ours.say("eval_steps", test * steps, theirs, "trainer.test_freq", note=f"{test} {each}")
    elif before:
        ours.without["trainer.test_freq"] = (
            "verl evaluates only before the first step, RayHelper also after the last one"
        )
    elif evaluates:
        ours.lines = [line for line in ours.lines if line.key != "eval_dataset"]
        ours.without["data.val_files"] = "trainer.test_freq switches evaluation off"
    ours.say("val_before_train", before, theirs, "trainer.val_before_train")
    if theirs.take("trainer.val_only"):
        ours.refuse("trainer.val_only", "a run trains; rayhelper sample only completes")
    keep = theirs.take("trainer.max_actor_ckpt_to_keep")
    if keep is not None:
        ours.say("save_total_limit", keep, theirs, "trainer.max_actor_ckpt_to_keep")
    theirs.taken.add("trainer.max_critic_ckpt_to_keep")
    records(theirs, ours)
    ours.add("logging_steps", steps, "a line for each generation, as in verl")


def records(theirs: Theirs, ours: Ours) -> None:
    """Where a run writes, which checkpoint it continues from, and who shows its metrics."""
    project, name = theirs.take("trainer.project_name"), theirs.take("trainer.experiment_name")
    folder = theirs.take("trainer.default_local_dir")
    if folder is None:
        parts = ("trainer.project_name", "trainer.experiment_name")
        ours.say("output_dir", f"checkpoints/{project}/{name}", theirs, *parts)
    else:
        ours.say("output_dir", str(folder), theirs, "trainer.default_local_dir")
    mode, path = theirs.take("trainer.resume_mode"), theirs.take("trainer.resume_from_path")
    if mode == "resume_path" or (path and isinstance(path, str)):
        ours.say("resume_from_checkpoint", path, theirs, "trainer.resume_from_path")
    elif mode == "auto":
        ours.say("resume_from_checkpoint", "auto", theirs, "trainer.resume_mode")
    loggers = plain(theirs.take("trainer.logger"))
    loggers = loggers if isinstance(loggers, list) else [loggers]
    known = [one for one in loggers if one in BUILT_IN]
    ours.say("report_to", known or ["none"], theirs, "trainer.logger")
    for one in loggers:
        if one not in (*BUILT_IN, "console"):
            ours.without[f"trainer.logger: {one}"] = f"report_to is {', '.join(BUILT_IN)} or none"
    if "wandb" in known:
        ours.say("run_name", str(name), theirs, "trainer.experiment_name")
        ours.say("env", {"WANDB_PROJECT": str(project)}, theirs, "trainer.project_name")
