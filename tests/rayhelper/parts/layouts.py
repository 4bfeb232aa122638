"""Where the roles of the stories run: how many groups, how many workers, and which roles live together.

one           [train rollout judge]
pair          [train rollout judge] x 2
two           [train judge] x 2, [rollout]
three         [train rollout], [judge] x 2
shared        [train], [rollout judge] on the same device
overlapping   [train] x 2, [rollout judge], whose process is also one of train: torchrun with groups of CPUs
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ROLES = ("train", "rollout", "judge")


@dataclass(frozen=True)
class Group:
    ranks: tuple[int, ...]
    roles: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """Which groups there are, and which of the roles each hosts."""

    name: str
    groups: dict[str, Group]
    on_shared_devices: bool = False

    def group(self, role: str) -> str:
        """The name of the group that hosts the role."""
        return next(name for name, group in self.groups.items() if role in group.roles)

    def size(self, role: str) -> int:
        """The number of workers of the role."""
        return len(self.groups[self.group(role)].ranks)

    def together(self, *roles: str) -> bool:
        """Whether one group hosts all of these roles."""
        return len({self.group(role) for role in roles}) == 1

    def in_one_process(self, *roles: str) -> bool:
        """Whether every process of the last role also is a worker of the others, if processes are shared."""
        *others, last = (set(self.groups[self.group(role)].ranks) for role in roles)
        return all(last <= ranks for ranks in others)

    def device_groups(self, runtime: str, **options: Any) -> dict[str, Any]:
        """The configuration; ``options`` go to every group. Torchrun knows ranks of GPUs only, which are invented."""
        if self.on_shared_devices:
            (first, group), (second, other) = self.groups.items()
            return {
                first: {"device": "GPU", "ranks": len(group.ranks), "workers": list(group.roles), **options},
                second: {"shares_devices_with": first, "workers": list(other.roles), **options},
            }
        own_ranks = runtime == "torchrun" and self.name != "overlapping"
        return {
            name: {
                "device": "GPU" if own_ranks else "CPU",
                "ranks": list(group.ranks) if own_ranks else len(group.ranks),
                "workers": list(group.roles),
                **options,
            }
            for name, group in self.groups.items()
        }


OFF = Layout("off", {"off": Group((0,), ROLES)})
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("one", {"everyone": Group((0,), ROLES)}),
        Layout("pair", {"everyone": Group((0, 1), ROLES)}),
        Layout("two", {"learners": Group((0, 1), ("train", "judge")), "samplers": Group((2,), ("rollout",))}),
        Layout("three", {"learners": Group((0,), ("train", "rollout")), "judges": Group((1, 2), ("judge",))}),
        Layout(
            "shared",
            {"learners": Group((0,), ("train",)), "engines": Group((0,), ("rollout", "judge"))},
            on_shared_devices=True,
        ),
        Layout("overlapping", {"learners": Group((0, 1), ("train",)), "others": Group((0,), ("rollout", "judge"))}),
    )
}
LAUNCHES = {3: ("three",), 2: ("pair", "overlapping")}  # torchrun: processes, and the layouts they play
# Every layout is played in one process, where it costs little. On Ray and under torchrun: groups of one and of two
# workers, roles together and apart, and futures from two workers to one and from one to two.
LAYOUTS_OF = {
    "off": (),
    "inprocess": ("one", "pair", "two", "three", "shared"),
    "strict": ("one", "pair", "two", "three", "shared"),
    "torchrun": ("pair", "three", "overlapping"),  # "three": a group of two without process 0
    "ray": ("pair", "two", "shared"),
}
