"""How many sequences a worker of verl sees at once."""

from __future__ import annotations

from trainers.translate.table import Ours, Theirs
from trainers.translate.verl_names import ACTOR, ULYSSES


def micro_batch(theirs: Theirs, ours: Ours) -> int | None:
    """Sequences of a micro-batch of one worker; None: nothing says it.

    ``ppo_micro_batch_size`` counts the sequences of all workers that have rows of their own.
    Source: verl/workers/fsdp_workers.py.
    """
    name = f"{ACTOR}.ppo_micro_batch_size"
    whole = theirs.take(name)
    if whole is None:
        found: int | None = theirs.take(f"{name}_per_gpu")
        return found
    if theirs.take(f"{ACTOR}.strategy") not in ("fsdp", "fsdp2"):
        ours.refuse(name, "it counts over all GPUs; write ppo_micro_batch_size_per_gpu")
        return 1
    workers = theirs.take("trainer.nnodes") * theirs.take("trainer.n_gpus_per_node") // theirs.take(ULYSSES, 1)
    if whole < workers:
        ours.refuse(name, f"it is {whole} for {workers} workers: none has a sequence")
    return max(1, int(whole) // int(workers))
