"""Every exception the distribution layer raises.

Each class is also a standard exception, so that ``except ValueError`` keeps working, and each pickles: it is built
from its message alone. What a user wrote wrongly is a ``ConfigError``, ``DecorationError`` or ``DispatchError``; what
went wrong on another machine is a ``WorkerError``.
"""

from __future__ import annotations

import concurrent.futures


class RayHelperError(Exception):
    """The parent of all errors of this library."""


class ConfigError(RayHelperError, ValueError):
    """The device groups or another setting cannot be used as written. Raised before any process starts."""


class DecorationError(RayHelperError, TypeError):
    """A class or method is decorated in a way that can have no meaning. Raised when the class is defined."""


class RoleError(RayHelperError, RuntimeError):
    """A call was made where its role cannot run."""


class DispatchError(RayHelperError, ValueError):
    """The arguments of a call cannot be divided over the workers as asked."""


class CollectError(RayHelperError, TypeError):
    """The workers' values cannot be joined as asked."""


class ShardError(RayHelperError, ValueError):
    """The workers of a role reported data-parallel coordinates that do not fit together."""


class PlacementError(RayHelperError, RuntimeError):
    """The cluster does not have the resources of the device groups, or did not provide them in time."""


class WorkerError(RayHelperError, RuntimeError):
    """A worker could not do what it was asked; the message names role, group, rank, node and method."""


class WorkerDiedError(WorkerError):
    """The process of a worker ended while it was needed."""


class DeadlineError(WorkerError, TimeoutError):
    """A call did not finish within its own or its group's ``timeout_s``; the message shows where each rank is."""


class CallCancelledError(RayHelperError, concurrent.futures.CancelledError):
    """A call was cancelled by ``Future.cancel``, or because another worker of the call failed."""


class ChannelError(WorkerError):
    """A stream of tensors between two roles broke off: a process ended, failed, or got other bytes than were sent."""
