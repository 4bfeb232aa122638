"""One device group, and the words for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Device = Literal["GPU", "NPU", "CPU"]

DRIVER = "driver"  # reserved: the role of methods that only the driver runs
OWN = "own"  # reserved: the one role of the class that inherits a method
CALL_S = 7200.0  # that a call may take where the group does not say: longer than any call of a run that works
CONSTRUCTION_S = 900.0  # and a construction, unless the group's timeout_s is longer


@dataclass(frozen=True)
class DeviceGroup:
    """Named hardware: its workers are processes, each of which hosts all the group's roles.

    With ``restarts``, a worker that dies or exceeds ``timeout_s`` is replaced, and its part of a call runs again. If
    workers share a process group, answered parts of other workers run again too, with their side effects. They do not
    if it is known that they ran without a collective.
    """

    name: str
    roles: tuple[str, ...]
    device: Device
    ranks: tuple[int, ...] | None  # rising global accelerator indices, num_workers * gpus_per_worker; None on CPU
    num_workers: int
    gpus_per_worker: int = 1  # accelerators of one worker, whatever their make; 0 on CPU
    timeout_s: float | None = None  # that a call may take; None: CALL_S
    restarts: int = 0  # how many workers are replaced, in all
    max_in_flight: int | None = None  # deferred calls not answered, beyond which the next waits; None: by their bytes
    env: tuple[tuple[str, str], ...] = ()  # pairs, as dict() takes them
    shares_devices_with: str | None = None  # the group whose ranks it has, in processes of its own

    @property
    def size(self) -> int:
        """The number of accelerators, or of workers on CPU, in the group."""
        return self.num_workers * max(1, self.gpus_per_worker)

    @property
    def devices_of(self) -> str:
        """The name of the group that owns the devices. It is the same for groups that share devices."""
        return self.shares_devices_with or self.name
