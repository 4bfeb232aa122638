"""The device groups of a configuration: which hardware hosts which roles.

    mapping, JSON or YAML  ->  form 1 (groups of ranks) or form 2 (one section a role)  ->  DeviceGroups

groups.py        DeviceGroups: what a configuration comes to; reads it, and compares its groups
rank_form.py     form 1; role_form.py: form 2; section.py: what a section says in either
sharing.py       groups on the devices of another; assignment.py: which ranks every group has
group.py         DeviceGroup; keys.py: what may be written; mistakes.py: what is wrong with it, and how it is told
slots.py         where ranks lie: nodes and the devices of each
"""

from rayhelper.device_groups.group import DRIVER, OWN, DeviceGroup
from rayhelper.device_groups.groups import DeviceGroups, all_roles

__all__ = ["DRIVER", "OWN", "DeviceGroup", "DeviceGroups", "all_roles"]
