"""Models on the workers of a role: they score, they learn, they save and export, and their weights go elsewhere.

    policy = Policy(config, loss=my_loss)         # role train: one object on the driver and on every worker
    policy.build(path, num_steps)                 # loads the model where the role runs
    logps = policy.logps(samples)                 # Ragged: a log-probability per target token
    metrics = policy.step(samples, numbers)       # one optimizer step over all workers
    policy.save(folder), policy.export(folder)    # a checkpoint; a Hugging Face folder

``Model`` scores, ``Trained`` learns too; their role methods belong to the one role of the class that inherits them.
Models that do not learn are ``frozen.py``. A loss is a function ``loss(config, numbers, ...)`` of what
``LossFunction`` (``backends/base.py``) is given; ``numbers`` are counted over the whole optimizer step: a number, or a
frozen dataclass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch

from rayhelper import Channel, RayHelper, WorkerDiedError
from trainers.backends.base import Backend, TokenFunction
from trainers.batch import Ragged, Sequences, TopLogps
from trainers.configuration.completion import CompletionConfig
from trainers.configuration.shared import TrainConfig
from trainers.metrics import Metrics
from trainers.parts.models import build_backend, num_shards
from trainers.parts.weights import exported, first_of, make_room, send

LOST = "this worker has no {}: build was not called, or the worker replaced a worker that died. Resume the run from a \
checkpoint (resume_from_checkpoint: auto), or let it continue by itself (resume_on_failure: N)."


class ModelLostError(WorkerDiedError):
    """A worker has no model: it replaced a worker that died."""


def token_logps(
    backend: Backend, samples: Sequences, *, micro_batch_size: int, temperature: float, adapter: bool
) -> Ragged:
    """The log-probabilities of every row's targets."""
    return backend.token_logps(samples, micro_batch_size=micro_batch_size, temperature=temperature, adapter=adapter)


class Model:
    """A model on the workers of the one role of the class that inherits this. ``backend`` is None elsewhere.

    ``temperature`` divides logits. None: the temperature of the configuration if it has one, else 1. ``logps`` calls
    ``score``, for batches whose rows are more than a sequence. ``rests``: between calls the model is offloaded to the
    host. ``settings`` are further arguments of the backend.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        temperature: float | None = None,
        score: Callable[..., Any] = token_logps,
        rests: bool = False,
        **settings: Any,
    ) -> None:
        self.config = config
        configured = config.temperature if isinstance(config, CompletionConfig) else 1.0
        self.temperature = configured if temperature is None else temperature
        self.score, self.rests, self.settings = score, rests, settings
        self.backend: Backend | None = None

    @RayHelper.function(group="own")
    def build(self, model: str, num_steps: int | None = None, **settings: Any) -> None:
        """Loads a folder or hub name. ``num_steps``: steps of the optimizer, None for a model that only scores."""
        self.backend = self.new_backend(model, num_steps, **self.settings | settings)
        self.shard = RayHelper.current().shard  # for a model that is to get the same slices
        if self.rests:
            self.backend.offload()

    @RayHelper.function(group="own", dispatch="slice", collect="flatten")
    def logps(self, samples: Any, adapter: bool = True, micro_batch_size: int | None = None) -> Any:
        """``Ragged`` (or what ``score`` gives), float32, the log-probabilities of each row's targets.

        ``adapter`` False: without its LoRA adapter. ``micro_batch_size`` None: ``per_device_train_batch_size``.
        """
        size = micro_batch_size or self.config.per_device_train_batch_size
        with self.at_hand() as backend:
            return self.score(backend, samples, micro_batch_size=size, temperature=self.temperature, adapter=adapter)

    @RayHelper.function(group="own", dispatch="slice", collect="flatten")
    def top_logps(self, sequences: Sequences, k: int, adapter: bool = True) -> TopLogps:
        """The top ``k`` tokens at each target."""
        with self.at_hand() as backend:
            ids, logps = backend.top_logps(
                sequences,
                k,
                micro_batch_size=self.config.per_device_train_batch_size,
                temperature=self.temperature,
                adapter=adapter,
            )
        return TopLogps(*(Ragged(column.values.reshape(-1, k), column.offsets) for column in (ids, logps)))

    @RayHelper.function(group="own")
    def save(self, folder: Path) -> None:
        """Writes the worker's part of a checkpoint."""
        self.built.save(folder)

    @RayHelper.function(group="own")
    def load(self, folder: Path) -> None:
        """Restores what ``save`` wrote."""
        self.built.load(folder)

    # On a worker of the role

    def new_backend(self, model: str, num_steps: int | None, **settings: Any) -> Backend:
        """The backend that ``build`` keeps. Subclasses that host something else override it."""
        return build_backend(self.config, model, num_training_steps=num_steps, **settings)

    @property
    def built(self) -> Backend:
        """The backend. Raises ModelLostError if there is none."""
        if self.backend is None:
            raise ModelLostError(LOST.format(type(self).__name__.lower()))
        return self.backend

    @contextlib.contextmanager
    def at_hand(self) -> Iterator[Backend]:
        """A context in which the model is on its device."""
        backend = self.built
        if not self.rests:
            yield backend
            return
        backend.reload()
        try:
            yield backend
        finally:
            backend.offload()


class Trained(Model):
    """A model that learns.

    ``measure(backend, config, samples, numbers)`` gives the metrics of a worker's slice without learning.
    ``token_function`` gives the loss more numbers for each target.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        loss: Callable[..., torch.Tensor],
        measure: Callable[..., Metrics] | None = None,
        token_function: TokenFunction | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(config, **settings)
        self.loss, self.evaluation, self.token_function = loss, measure, token_function

    @RayHelper.function(group="own", execute="first")
    def num_shards(self) -> int:
        """Data-parallel shards of the role, whether the model is built or not."""
        return num_shards(self.config)

    @RayHelper.function(group="own", dispatch=RayHelper.balanced(), collect=Metrics.merge)
    def step(self, samples: Any, numbers: Any, entropy_gradient: bool = False) -> Metrics:
        """One optimizer step over all workers."""
        metrics = self.built.step(
            samples,
            partial(self.loss, self.config, numbers),
            micro_batch_size=self.config.per_device_train_batch_size,
            temperature=self.temperature,
            entropy_gradient=entropy_gradient,
            token_function=self.token_function,
        )
        return self.reported(metrics)

    @RayHelper.function(group="own", dispatch="slice", collect=Metrics.merge)
    def measure(self, samples: Any, numbers: Any = None) -> Metrics:
        """The metrics of samples without learning."""
        assert self.evaluation is not None, "the part was built without measure="
        return self.evaluation(self.built, self.config, samples, numbers)

    @RayHelper.function(group="own", collect=first_of)
    def weights(self) -> dict[str, torch.Tensor]:
        """All weights by their Hugging Face names, on the CPU, for a model that follows this one."""
        return exported(self.built)

    @RayHelper.function(group="own")
    def export(self, folder: Path) -> None:
        """Writes only the model, as a Hugging Face folder."""
        self.built.export(folder)

    def reported(self, metrics: Metrics) -> Metrics:
        """The metrics of a step on a worker. Subclasses that report something else override it."""
        return metrics


@RayHelper.worker(group="train")
class Policy(Trained):
    """The policy, of role train. A ``Generator`` calls the last three methods. They need a ``CompletionConfig``."""

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def scores(self, samples: Sequences) -> tuple[Ragged, Ragged]:
        """float32, log-probabilities and entropies (nats) at each row's targets."""
        return self.built.token_scores(
            samples, micro_batch_size=self.config.per_device_train_batch_size, temperature=self.temperature
        )

    @RayHelper.function(group="train", dispatch=RayHelper.balanced(), collect="flatten")
    def values(self, samples: Any, micro_batch_size: int | None = None, as_in_step: bool = False) -> Ragged:
        """float32, the outputs of a model without a language head at the targets of each row's sequences.

        ``micro_batch_size`` None: the same as in ``step``. ``as_in_step``: the values of the next ``step`` with these
        samples, with its dropout.
        """
        size = micro_batch_size or self.config.per_device_train_batch_size
        found: Ragged = cast(Any, self.built).token_values(samples, micro_batch_size=size, as_in_step=as_in_step)
        return found

    @RayHelper.function(group="train")
    def send(self, channel: Channel, version: int) -> None:
        """Worker 0 sends the weights to the engines. The other workers help to gather them."""
        send(self.completion_config, self.built, channel, version)

    @RayHelper.function(group="train")
    def make_room(self, part: Literal["weights", "kv_cache"]) -> None:
        """Offloads the parts of the policy whose memory an engine on the same devices needs."""
        make_room(self.completion_config, self.built, part)

    @RayHelper.function(group="train")
    def reload(self) -> None:
        """Loads the parts again that ``make_room`` offloaded."""
        self.built.reload()

    @property
    def completion_config(self) -> CompletionConfig:
        return cast(CompletionConfig, self.config)


@RayHelper.worker(group="default")
class DefaultPolicy(Trained):
    """The policy where its role is ``default``."""


@RayHelper.worker(group="critic")
class Critic(Trained):
    """A value model that learns together with a policy, of role critic. It gives one number per target, from the
    position before it."""

    def __init__(self, config: TrainConfig, policy: Model, **settings: Any) -> None:
        super().__init__(config, head="value", values_at="predicting", **settings)
        self.policy = policy

    @RayHelper.function(group="critic", dispatch="slice", collect="flatten")
    def values(self, states: Sequences) -> Ragged:
        """float32, the values at each row's targets."""
        return self.built.token_values(states, micro_batch_size=self.config.per_device_train_batch_size)

    def reported(self, metrics: Metrics) -> Metrics:
        """The metrics under the critic's own names, without metrics that the policy already reports."""
        own = ("grad_norm", "learning_rate", "moe_aux_loss", "moe_z_loss")  # losses add up
        metrics = metrics.renamed({name: f"critic/{name}" for name in own}).without("update_tokens")
        return metrics if self.policy.backend is None else metrics.without("update_peak_flops")
