"""How the policy's weights get to the engines that generate with them. The driver's side is ``generator.py``.

    shared   the engine runs the very module that is trained: nothing to do
    copied   one process has both: weight after weight, gathered where it lies in shards
    sent     other processes: through a channel (rayhelper/channel), bucket after bucket; train worker 0 sends

Before the first weight comes the version of the policy: the optimizer steps that it has made. Weights travel in the
dtype that engines keep. Behind the last one comes what they add up to, so that every engine finds out whether it now
holds what the trainer has (``fingerprints.py``). Of a model under a LoRA adapter an engine that has all weights gets
those that the adapter changes; what the others add up to is remembered from when they were sent. ``exported`` is for
models that follow a policy now and then, such as references.

An engine on the devices of the policy makes room for it, and it for the engine, in one process or in two.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch

from rayhelper import Channel, ChannelError, RayHelper, Receipt
from trainers.backends.base import Backend, SentWeights
from trainers.configuration.completion import CompletionConfig
from trainers.parts.fingerprints import added_up, fingerprint, rows_of
from trainers.parts.models import resolve_dtype
from trainers.rollout.base import Engine

PROOF = "fingerprints of the weights"  # names that no weight has
HEAD = "version of the policy, and whether all other weights are as they were"


Way = Literal["shared", "copied", "beside", "sent"]  # beside: sent to processes on the devices of the policy


def way_of(engine: Engine, backend: Backend | None) -> Way:
    """How weights get to the engine of this worker; ``backend``: the policy, if this worker trains it as well."""
    if backend is None:
        return "beside" if is_beside("train") else "sent"
    return "shared" if engine.shares_weights else "copied"


def is_beside(role: str) -> bool:
    """Whether another process has the role on the devices of this worker."""
    return role in RayHelper.current().neighbours


class StaleWeightsError(RuntimeError):
    """An engine does not hold the weights that the trainer has."""


class EngineLostError(RuntimeError):
    """A worker has no engine, or not the policy beside it: it replaced a worker that died."""


def send(config: CompletionConfig, backend: Backend, channel: Channel, version: int) -> Receipt | None:
    """Sends the weights; every worker that trains calls it, and worker 0 sends and has the receipt.

    Over a channel all weights go once, and then those that training can change.
    """
    forgets = is_beside("rollout") and config.sleep_level == 2
    is_part = _may_be_part(config, backend) and backend.sent.to == channel.identity and not forgets
    weights = _weights(config, backend, is_part=is_part)
    receipt = None
    if RayHelper.current().rank == 0:
        stream = _with_proof(weights, _prints(backend, is_part)) if config.weight_checksum else weights
        receipt = channel.send(_with_head(stream, version, is_part))
    else:
        for _ in weights:  # gathers with worker 0
            pass
    backend.sent.to = channel.identity
    return receipt


def receive(engine: Engine, channel: Channel, unless: int | None = None) -> None:
    """Loads what worker 0 sends into the engine, which is awake then; every worker of the role calls it.

    On the devices of the policy it has no KV cache yet: that one makes room first. Nothing is done if the engine has
    weights of version ``unless`` or later: they came in the middle of a generation.

    Raises:
        StaleWeightsError: afterwards the engine holds other weights than were sent.
    """
    if unless is not None and engine.version is not None and engine.version >= unless:
        return
    proof: dict[str, int] = {}
    engine.wake("weights")
    stream = iter(channel.receive(copy=False))
    version, is_part = _read_head(next(stream))
    engine.load_weights(_without_proof(stream, proof), part=is_part, version=version)
    check(engine, proof)
    if not is_beside("train"):
        engine.wake("kv_cache")


def arrivals(engine: Any, channel: Channel | None, interval: int | None) -> dict[str, Any]:
    """Arguments of ``generate`` by which a continuous engine takes the weights that a channel offers meanwhile.

    It looks for them every ``interval`` steps; all workers that hold one model together take them after the same one.
    If weights do not arrive whole, EngineLostError is raised: the engine is to get all of them anew, and then completes
    its prompts once more.
    """
    if channel is None or interval is None:
        return {}

    def is_offered() -> bool:
        try:
            return channel.is_offered()
        except ChannelError:  # the driver has closed it: the engine gets the weights after this generation
            return False

    def take() -> None:
        if not engine.all_agree(is_offered()):
            return
        try:
            receive(engine, channel)
        except ChannelError as error:
            raise EngineLostError(
                f"new weights did not arrive completely in the middle of a generation: {error}"
            ) from error

    return {"between": take, "interval": interval}


def copy(config: CompletionConfig, backend: Backend, engine: Engine, version: int) -> None:
    """Loads the policy's weights into an engine of the same process, which is awake then but for its KV cache; every
    worker calls it.

    Raises:
        StaleWeightsError: afterwards the engine holds other weights than the policy.
    """
    proof: dict[str, int] = {}
    engine.wake("weights")
    is_part = _may_be_part(config, backend) and backend.sent.to is engine and engine.has_weights
    weights = _weights(config, backend, is_part=is_part)
    if config.weight_checksum:
        weights = _without_proof(_with_proof(weights, _prints(backend, is_part)), proof)
    engine.load_weights(weights, part=is_part, version=version)
    backend.sent.to = engine
    check(engine, proof)


def make_room(config: CompletionConfig, backend: Backend, part: Literal["weights", "kv_cache"]) -> None:
    """Moves away what is not needed any more, if the configuration says so: the optimizer for the engine's weights, and
    then the policy for its KV cache. Every worker that trains calls it; ``backend.reload`` brings both back.
    """
    if part == "weights":
        backend.offload(model=False, optimizer=config.offload_optimizer)
    else:
        backend.offload(model=config.offload_model, optimizer=False)


def rest(engine: Engine) -> None:
    """Gives what the engine can do without to the training beside it; every worker of the role calls it."""
    engine.sleep()
    torch.cuda.empty_cache()


def check(engine: Engine, proof: dict[str, int]) -> None:
    """Raises StaleWeightsError, naming layers, if the engine's weights add up to something else than ``proof``."""
    if not proof:
        return
    found = engine.fingerprints()
    if not found:
        return
    wrong = [layer for layer in proof if found.get(layer) != proof[layer]]
    if wrong:
        raise StaleWeightsError(
            f"{len(wrong)} of {len(proof)} parts of the engine's model differ from the trainer's, among them "
            f"{wrong[:3]}. If the engine changes weights as it loads them, set weight_checksum: false."
        )


def exported(backend: Backend) -> dict[str, torch.Tensor]:
    """All weights by their Hugging Face names, on the CPU, where ``first_of`` takes them from; elsewhere nothing.

    Every worker of the role calls it, and gathers with the others.
    """
    shard = RayHelper.current().shard
    is_first = shard.index == 0 and shard.leader
    weights = {}
    for name, weight in backend.named_weights():
        if is_first:
            weights[name] = weight.detach().cpu()
    return weights


def first_of(values: list[Any]) -> Any:
    """A ``collect``: the value of the first shard's leader, which with pipeline parallelism is not worker 0."""
    return values[0]


def _may_be_part(config: CompletionConfig, backend: Backend) -> bool:
    """Whether an engine that has all weights needs only some of them; an adapter that stays apart is always whole."""
    return backend.trains_part and not config.vllm_enable_lora


def _weights(config: CompletionConfig, backend: Backend, *, is_part: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """In the dtype that engines keep; ``is_part``: those that training can change."""
    dtype = getattr(torch, resolve_dtype(config))
    apart = config.vllm_enable_lora
    for name, weight in backend.adapter_weights() if apart else backend.named_weights(trained_only=is_part):
        yield name, weight.to(dtype) if weight.is_floating_point() else weight


def _prints(backend: Backend, is_part: bool) -> dict[str, torch.Tensor]:
    """Where the fingerprints of the backend's weights are kept: all of an earlier round if this one brings a part."""
    if not is_part:
        backend.sent = SentWeights()
    return backend.sent.prints


def _with_proof(
    weights: Iterable[tuple[str, torch.Tensor]], prints: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, and behind them the fingerprints of the whole model as text.

    ``prints``: of all weights when they were last seen; those of the given ones are put there.
    """
    for name, weight in weights:
        prints[name] = fingerprint(rows_of(name, weight))
        yield name, weight
    # of one length whatever the numbers are: 64 bits have at most 19 digits and a sign
    text = json.dumps({layer: f"{value:+020d}" for layer, value in added_up(prints.items()).items()}).encode()
    device = next(iter(prints.values())).device
    yield PROOF, torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


def _with_head(
    stream: Iterable[tuple[str, torch.Tensor]], version: int, is_part: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    for k, (name, tensor) in enumerate(stream):
        if k == 0:
            yield HEAD, torch.tensor([version, is_part], dtype=torch.int64, device=tensor.device)
        yield name, tensor


def _read_head(first: tuple[str, torch.Tensor]) -> tuple[int, bool]:
    name, tensor = first
    assert name == HEAD, "a round begins with its head"
    version, is_part = tensor.tolist()
    return version, bool(is_part)


def _without_proof(
    stream: Iterable[tuple[str, torch.Tensor]], proof: dict[str, int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a stream; what came behind them is put into ``proof``."""
    for name, tensor in stream:
        if name == PROOF:
            proof |= {layer: int(value) for layer, value in json.loads(bytes(tensor.cpu().numpy())).items()}
        else:
            yield name, tensor
