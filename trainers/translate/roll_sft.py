"""ROLL's configuration of fine-tuning in ours: one section, ``sft_train``, and the columns of the rows.

Units are ours: rows of a data-parallel rank, optimizer steps. Read from roll/pipeline/sft (sft_config.py,
sft_pipeline.py, sft_worker.py), roll/configs and roll/distributed/strategy.
"""

from __future__ import annotations

from trainers.run.trackers import BUILT_IN
from trainers.translate.roll_strategies import own_devices, strategies, training_arguments
from trainers.translate.table import Ours, Theirs

SECTION = "sft_train"
DATA = "actor_train.data_args"
ALPACA = {"instruction": "prompt_key", "input": "query_key", "output": "response_key"}
DEFAULTS = {"prompt_key": "instruction", "query_key": None, "response_key": "output"}


def translate(theirs: Theirs, ours: Ours) -> None:
    """Fills ``ours`` from the keys of ROLL's SFT pipeline. Its section is read as ROLL's other ones of training are."""
    theirs.rename({SECTION: "actor_train"})
    ours.trainer = "sft"
    ours.say("model", theirs.take("pretrain"), theirs, "pretrain")
    _rows(theirs, ours)
    ours.say("max_length", theirs.take("sequence_length"), theirs, "sequence_length")
    ours.without["sequence_length"] = "ROLL pads to it and cuts nothing. RayHelper cuts the end of a longer row"
    ours.add("loss_scale", "default", "only the answer is learned, with its end")
    ours.without["the end of an answer"] = (
        "ROLL takes off the line break that a template may write after it. Here all that the template writes there is "
        "learned"
    )
    training_arguments(theirs, ours)
    ours.say("max_grad_norm", theirs.take("max_grad_norm", 1.0), theirs, "max_grad_norm")
    if (size := theirs.take("actor_train.infer_batch_size")) is not None:
        ours.say("per_device_eval_batch_size", size, theirs, "actor_train.infer_batch_size")
    strategies(theirs, ours)
    ours.say("nproc_per_node", theirs.take("num_gpus_per_node", 8), theirs, "num_gpus_per_node")
    own_devices(theirs, ours)
    ours.add("use_ray", True, "ROLL runs on Ray")
    packs = theirs.take("actor_train.use_sequence_packing", False)
    if not any(line.key == "backend" and line.value == "megatron" for line in ours.lines):
        note = "rows of a micro-batch stand beside each other without padding"
        ours.say("padding_free", bool(packs), theirs, "actor_train.use_sequence_packing", note=note)
    _run(theirs, ours)


def _rows(theirs: Theirs, ours: Ours) -> None:
    files = theirs.take(f"{DATA}.file_name")
    if files is None:
        ours.refuse(f"{SECTION}.data_args.file_name", "there is none: where do the rows come from?")
    ours.say("dataset", files[0] if isinstance(files, list) and len(files) == 1 else files, theirs, f"{DATA}.file_name")
    held_out = theirs.take("validation.data_args.file_name")
    if held_out is not None:
        file = held_out[0] if isinstance(held_out, list) and len(held_out) == 1 else held_out
        ours.say("eval_dataset", file, theirs, "validation.data_args.file_name")
    names = {column: theirs.take(key, DEFAULTS[key]) for column, key in ALPACA.items()}
    system = theirs.take("system_key")
    if names["input"] is None:
        columns = {names["instruction"]: "query", names["output"]: "response", **({system: "system"} if system else {})}
        ours.say("columns", columns, theirs, "prompt_key", "response_key")
    elif any(name != column for column, name in names.items()) or system not in (None, "system"):
        ours.refuse(
            "query_key",
            "RayHelper joins question and query only in the columns instruction, input and output, with system beside "
            f"them. The rows have {', '.join(map(str, names.values()))}. Rename them in the data",
        )
    ours.add("shuffle_dataset", False, "ROLL reads the rows in their order")
    ours.add("dataloader_drop_last", True, "ROLL leaves out the rows of an epoch that fill no batch")


def _run(theirs: Theirs, ours: Ours) -> None:
    for name, default in (("save_steps", 50), ("logging_steps", 1)):
        ours.say(name, theirs.take(name, default), theirs, name)
    if any(line.key == "eval_dataset" for line in ours.lines):
        ours.say("eval_steps", theirs.take("eval_steps"), theirs, "eval_steps")
    ours.drop(theirs, ["eval_steps"], "there is no validation")
    ours.drop(theirs, ["max_steps"], "ROLL's SFT counts epochs, and does not read it")
    ours.say("output_dir", theirs.take("output_dir", "outputs"), theirs, "output_dir")
    ours.say("seed", theirs.take("seed", 42), theirs, "seed")
    if resume := theirs.take("resume_from_checkpoint", False):
        ours.say("resume_from_checkpoint", resume, theirs, "resume_from_checkpoint")
    tracker = theirs.take("track_with")
    ours.say("report_to", [tracker if tracker in BUILT_IN else "none"], theirs, "track_with")
    if tracker not in (None, "none", *BUILT_IN):
        ours.without["track_with"] = f"{tracker} is not built (known: {', '.join(BUILT_IN)})"
