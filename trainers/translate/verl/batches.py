"""How many prompts a generation and an optimizer step of verl have, and how many sequences a worker sees at once."""

from __future__ import annotations

from trainers.translate.table import Ours, Theirs
from trainers.translate.verl.names import ACTOR, ROLLOUT, ULYSSES


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


def prompts_of_batches(theirs: Theirs, ours: Ours) -> tuple[int, int] | None:
    """Prompts of a generation and of an optimizer step; None: they were refused."""
    prompts, mini = theirs.take("data.train_batch_size"), theirs.take(f"{ACTOR}.ppo_mini_batch_size")
    if not all(type(one) is int for one in (prompts, mini)) or prompts % mini:
        ours.refuse(f"{ACTOR}.ppo_mini_batch_size", f"{mini} does not divide data.train_batch_size, {prompts} prompts")
        return None
    return prompts, mini


def mini_batches(theirs: Theirs) -> int:
    """Optimizer steps of a generation, each of its own completions."""
    prompts, mini = theirs.take("data.train_batch_size"), theirs.take(f"{ACTOR}.ppo_mini_batch_size")
    return max(1, -(-int(prompts) // int(mini)))


def generations(theirs: Theirs) -> tuple[int, int]:
    """Optimizer steps of a generation, and completions of a prompt."""
    return mini_batches(theirs) * int(theirs.take(f"{ACTOR}.ppo_epochs")), int(theirs.take(f"{ROLLOUT}.n"))


def micro_batches(theirs: Theirs, ours: Ours) -> None:
    """Sequences or tokens of a micro-batch."""
    micro = micro_batch(theirs, ours)
    if theirs.take(f"{ACTOR}.use_dynamic_bsz"):
        name, ranks = f"{ACTOR}.ppo_max_token_len_per_gpu", theirs.values.get(ULYSSES, 1)
        names = (name, ULYSSES) if ranks > 1 else (name,)
        ours.say("token_budget", theirs.take(name) * ranks, theirs, *names, note="tokens of a micro-batch")
        ours.drop(theirs, [f"{ACTOR}.ppo_micro_batch_size_per_gpu"], "use_dynamic_bsz counts tokens instead")
    elif micro is None:
        ours.refuse(
            f"{ACTOR}.ppo_micro_batch_size_per_gpu", "neither it nor use_dynamic_bsz is given, which verl needs"
        )
    else:
        name = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
        ours.say("per_device_train_batch_size", micro, theirs, name, note="sequences, as there")
        ours.drop(theirs, [f"{ACTOR}.ppo_max_token_len_per_gpu"], "use_dynamic_bsz is off")
    ours.drop(theirs, [f"{ACTOR}.shuffle", f"{ACTOR}.data_loader_seed"], "a generation is divided in a random order")
