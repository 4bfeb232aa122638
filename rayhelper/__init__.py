"""One plain class, roles on device groups: the public names."""

from rayhelper.channel import Channel, Receipt
from rayhelper.device_groups import DeviceGroup, DeviceGroups
from rayhelper.errors import (
    CallCancelledError,
    ChannelError,
    CollectError,
    ConfigError,
    DeadlineError,
    DecorationError,
    DispatchError,
    PlacementError,
    RayHelperError,
    RoleError,
    ShardError,
    WorkerDiedError,
    WorkerError,
)
from rayhelper.helper import RayHelper
from rayhelper.roles.futures import Future
from rayhelper.roles.runtime import Shard, WorkerInfo

__version__ = "0.1.0"

__all__ = [
    "CallCancelledError",
    "Channel",
    "ChannelError",
    "CollectError",
    "ConfigError",
    "DeadlineError",
    "DecorationError",
    "DeviceGroup",
    "DeviceGroups",
    "DispatchError",
    "Future",
    "PlacementError",
    "RayHelper",
    "RayHelperError",
    "Receipt",
    "RoleError",
    "Shard",
    "ShardError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerInfo",
]
