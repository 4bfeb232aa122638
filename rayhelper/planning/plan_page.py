"""``rayhelper plan --html FILE``: the devices of a plan as a picture, one static page without a script.

A box per device: its groups, its roles, and how full its memory is. Nodes that look alike are drawn once, so that a
plan of 100,000 GPUs is as short as one of eight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from string import Template

from rayhelper.planning.dry_run import GroupPlan, Plan
from rayhelper.planning.memory import GIB
from rayhelper.ranks import runs

COLOURS = ("#4269d0", "#c2410c", "#15803d", "#a21caf", "#0e7490", "#a16207", "#be123c", "#4d7c0f")  # on white, on black
SHOWN_RUNS = 6  # of nodes, in a heading

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>Plan of $config</title>
<style>
:root { color-scheme: light dark; --back: #fff; --text: #1b1f24; --quiet: #5d6670; --line: #d9dee3; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14171a; --text: #e4e8ec; --quiet: #97a1ab; --line: #343a40; }
}
body { margin: 1rem auto; padding: 0 1rem; max-width: 72rem; background: var(--back); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin: 1.4rem 0 .4rem; } p { margin: .3rem 0; }
.node { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); gap: .5rem; list-style: none;
  padding: 0; margin: 0; }
.node li { border: 1px solid var(--line); border-top: .4rem solid var(--group); border-radius: .3rem; padding: .4rem; }
.node .idle { border-style: dashed; color: var(--quiet); }
.quiet { color: var(--quiet); font-size: .85rem; }
.bar { display: block; height: .5rem; background: var(--line); border-radius: .25rem; overflow: hidden; }
.bar i { display: block; height: 100%; background: var(--group); }
.full i { background: #dc2626; }
</style>
</head>
<body>
<h1>$config</h1>
<p>$total</p>
$problems
$nodes
<h2>Device groups</h2>
<ul>
$groups
</ul>
<p class="quiet">Memory is an estimate, of the fullest device of each group.</p>
</body>
</html>
""")


def page(made: Plan) -> str:
    """The page of a plan: it needs no network, and shows text of the configuration as text."""
    idle = f", {made.num_gpus - made.num_asked:,} idle" if made.fits else ", which is not enough"
    total = f"{made.num_nodes:,} nodes x {made.gpus_per_node} = {made.num_gpus:,} GPUs, {made.num_asked:,} used{idle}"
    return PAGE.substitute(
        config=escape(made.config),
        total=total,
        problems="\n".join(_problems(made)),
        nodes="\n".join(_nodes(made)),
        groups="\n".join(_groups(made)),
    )


def _problems(made: Plan) -> Iterator[str]:
    found = (("Mistakes", list(map(str, made.findings.mistakes))), ("Warnings", made.findings.warnings))
    for title, lines in found:
        if lines:
            yield f"<h2>{title}</h2>\n<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _nodes(made: Plan) -> Iterator[str]:
    """A grid for each kind of node."""
    kinds: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    hosted = _hosted(made)
    num_places = dict.fromkeys((node for node, _ in hosted), made.gpus_per_node)
    for node, place in hosted:
        num_places[node] = max(num_places[node], place + 1)  # more than there are, where the plan has a mistake
    for node in sorted(num_places):
        devices = tuple(hosted.get((node, place), ()) for place in range(num_places[node]))
        kinds.setdefault(devices, []).append(node)
    planned = {one.group.name: one for one in made.groups}
    colours = {name: COLOURS[k % len(COLOURS)] for k, name in enumerate(planned)}
    for devices, nodes in kinds.items():
        named = runs(nodes)
        more = f", ... ({len(named) - SHOWN_RUNS:,} more)" if len(named) > SHOWN_RUNS else ""
        alike = f", {len(nodes):,} alike" if len(nodes) > 1 else ""
        boxes = [_box(k, [planned[name] for name in names], colours, made) for k, names in enumerate(devices)]
        yield f"<h2>Node {', '.join(named[:SHOWN_RUNS])}{more}{alike}</h2>"
        yield f'<ul class="node">\n{"".join(boxes)}</ul>'
    if num_places and len(num_places) < made.num_nodes:
        yield f"<p>Idle nodes: {made.num_nodes - len(num_places):,}</p>"


def _hosted(made: Plan) -> dict[tuple[int, int], tuple[str, ...]]:
    """The groups of each device that is used, by node and place on it."""
    hosted: dict[tuple[int, int], tuple[str, ...]] = {}
    for planned in made.groups:
        for rank in planned.group.ranks or ():
            at = (0, rank) if made.ranks_per_node is None else divmod(rank, made.ranks_per_node)
            hosted[at] = (*hosted.get(at, ()), planned.group.name)
    return hosted


def _box(place: int, groups: Sequence[GroupPlan], colours: dict[str, str], made: Plan) -> str:
    """One device."""
    if not groups:
        return f'<li class="idle">{place}<br>idle</li>\n'
    names = " + ".join(escape(one.group.name) for one in groups)
    roles = ", ".join(escape(role) for one in groups for role in one.group.roles)
    peaks = [one.peak_bytes for one in groups if one.peak_bytes is not None]
    memory = '<span class="quiet">memory unknown</span>'
    if peaks:
        share = 100 * max(peaks) / made.gpu_bytes
        full = " full" if share > 100 else ""
        memory = (
            f'<span class="bar{full}"><i style="width:{min(share, 100):.0f}%"></i></span>'
            f'<span class="quiet">{max(peaks) / GIB:.1f} of {made.gpu_bytes / GIB:g} GiB</span>'
        )
    colour = colours[groups[0].group.name]
    return f'<li style="--group:{colour}">{place} <b>{names}</b><br>{roles}<br>{memory}</li>\n'


def _groups(made: Plan) -> Iterator[str]:
    """A line for each group, also for groups of CPUs, which have no box."""
    for planned in made.groups:
        group = planned.group
        terms = [
            f"{role.role}: {', '.join(f'{term.name} {term.num_bytes / GIB:.1f}' for term in role.memory.terms)} GiB"
            for role in planned.roles
            if role.memory is not None
        ]
        ranks = f", ranks {', '.join(planned.ranks[:SHOWN_RUNS])}" if planned.ranks else ""
        told = f"{group.num_workers:,} {group.device}{ranks}, hosts {', '.join(group.roles)}"
        detail = f'<br><span class="quiet">{escape("; ".join(terms))}</span>' if terms else ""
        yield f"<li><b>{escape(group.name)}</b>: {escape(told)}{detail}</li>"
