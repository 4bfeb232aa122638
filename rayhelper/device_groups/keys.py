"""The keys that a configuration of device groups may hold."""

from __future__ import annotations

NODE_KEYS = ("nproc_per_node", "nnodes")
TOP_KEYS = (*NODE_KEYS, "colocate_groups")  # beside the groups, or the sections of roles
DRIVER_KEYS = ("timeout_s",)  # of the section 'driver', of methods of the role 'driver'
SIZE_KEYS = {"gpus": "GPU", "npus": "NPU", "cpus": "CPU"}  # of a role's section, and the device that each means
RANK_KEYS = ("ranks", "device_mapping", "workers")  # of a group
SHARE_KEY = "shares_devices_with"  # of either: another group, or role, on whose devices it has processes of its own
PLACING_KEYS = (*SIZE_KEYS, *RANK_KEYS, SHARE_KEY)  # by which it is known what a section is
OPTION_KEYS = ("timeout_s", "restarts", "max_in_flight", "gpus_per_worker", "env")
GROUP_KEYS = ("device", *RANK_KEYS, SHARE_KEY, *OPTION_KEYS)  # all that a group may hold
SECTION_KEYS = (*SIZE_KEYS, "device", SHARE_KEY, *OPTION_KEYS)  # of a role's; any other is a setting of the role
PARALLEL_SIZES = (  # settings of a role; the product of a line divides its accelerators
    ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    ("vllm_tensor_parallel_size",),
    ("sequence_parallel_size",),
)
