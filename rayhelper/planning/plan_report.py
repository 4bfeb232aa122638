"""``rayhelper plan``: the GPUs and memory that a configuration needs, as text or JSON.

    rayhelper plan --config x.yaml [--nodes N --gpus-per-node M]

No Ray, no GPU: it starts in a fraction of a second, also for a hundred thousand GPUs. For a vision model it builds the
model without weights, which takes some seconds. What stands in the plan
is found by ``dry_run.py``; here it is written down, short enough to read: ranks and nodes in runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayhelper.device_groups.slots import bundle, resources
from rayhelper.errors import ConfigError
from rayhelper.planning.dry_run import GroupPlan, NodeShare, Plan, make_plan
from rayhelper.planning.memory import GIB, RUNTIME_BYTES, Term
from rayhelper.planning.plan_roles import RolePlan

SHOWN_RUNS = 6  # of ranks or nodes, on one line


def plan(
    config: str,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    model: str | None = None,
    gpu_memory_gib: float = 80.0,
    json: bool = False,
    trainer: str | None = None,
    html: str | None = None,
    shown: str | None = None,
) -> int:
    """Prints the GPUs and memory that a configuration needs; 0: it can run, 1: it breaks rules, 2: it cannot be read.

    Args:
        config: YAML or JSON file: a trainer's whole configuration, or only device groups.
        nodes: of the cluster; null: nnodes of the configuration, or as many as it needs.
        gpus_per_node: accelerators of a node; null: nproc_per_node of the configuration, or 8.
        model: folder or config.json of the model, or its sizes as a mapping.
        gpu_memory_gib: memory of one GPU.
        json: print JSON.
        trainer: whose roles these are: module:Class, file.py:Class or a name of an installed one; null: what a role
            does is read from its name.
        html: also write a picture of the devices to this file, as a page for a browser.
        shown: the name of the configuration in all that is printed; null: its file.
    """
    try:
        made = make_plan(config, nodes, gpus_per_node, model, gpu_memory_gib, trainer)
        made = made if shown is None else replace(made, config=shown)
        if html is not None:
            from rayhelper.planning.plan_page import page

            Path(html).write_text(page(made), encoding="utf-8")
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if json:
        from json import dumps

        print(dumps(as_dict(made), indent=2))
    else:
        lines = [*as_lines(made), *([] if html is None else [f"the picture is in {html}"])]
        print("\n".join(line.replace(config, shown or config) for line in lines))
    return 1 if made.findings.mistakes else 0


# Text


def as_lines(made: Plan) -> Iterator[str]:
    """The plan for people, a line at a time."""
    findings = made.findings
    yield f"{made.config}: {_count(len(made.groups), 'device group')}"
    for planned in made.groups:
        yield ""
        yield from _group_lines(planned, made.gpu_bytes)
    yield ""
    if made.groups and all(planned.group.device == "CPU" for planned in made.groups):
        yield "total: only CPUs, no GPU"
    else:
        yield f"total: {_count(made.num_nodes, 'node')} x {made.gpus_per_node} = {_total_text(made)}"
    if findings.assumed:
        yield f"assumed: {'; '.join(findings.assumed)}"
    if any(planned.peak_bytes is not None for planned in made.groups):
        yield f"memory is an estimate for the fullest GPU; runtime is {_gib(RUNTIME_BYTES)} GiB reserved per process"
    yield from _numbered("warning", findings.warnings)
    yield from _numbered("mistake", [str(mistake) for mistake in findings.mistakes])
    if made.is_partial:
        yield "Groups with a mistake are not shown above."


def _total_text(made: Plan) -> str:
    gpus = _count(made.num_gpus, "GPU")
    if made.fits:
        return f"{gpus}, {made.num_asked:,} used, {made.num_gpus - made.num_asked:,} idle"
    if made.num_asked > made.num_gpus:
        return f"{gpus}: {made.num_asked:,} asked for, {made.num_gpus:,} there"
    return f"{gpus}: {made.num_asked:,} requested, which do not fit the nodes"


def _group_lines(planned: GroupPlan, gpu_bytes: int) -> Iterator[str]:
    group = planned.group
    colocated = " (colocated)" if len(group.roles) > 1 else ""
    shares = f", shares devices with {group.shares_devices_with}" if group.shares_devices_with else ""
    yield f"{group.name}: {group.device}, hosts {', '.join(group.roles)}{colocated}{shares}"
    each = f", {group.gpus_per_worker} {group.device} each" if group.device != "CPU" else ""
    yield f"  workers  {group.num_workers:,}{each}"
    if group.ranks is not None:
        yield f"  ranks    {_few(planned.ranks)}"
        yield f"  nodes    {'; '.join(_share_text(share) for share in planned.shares)}"
    yield f"  bundles  {'; '.join(_bundle_text(planned))}"
    for role in planned.roles:
        yield f"  {role.role}: {_role_text(role, planned)}"
        if role.memory is not None:
            terms = " + ".join(f"{term.name} {_gib(term.num_bytes)}" for term in role.memory.terms)
            apart = ", the optimizer's states apart from activations" if role.memory.resting else ""
            yield f"    memory {terms} = {_gib(role.memory.at_work)} GiB per GPU{apart}"
        elif group.device != "CPU":
            yield f"    memory unknown: {role.unknown}"
    for is_counted, told in ((True, "counted above"), (False, "not counted")):
        if guests := [role for role in planned.guests if (role in planned.counted_guests) is is_counted]:
            yield f"  also     {', '.join(guests)}, which no group names; memory {told}"
    if planned.peak_bytes is not None and group.shares_devices_with is not None:
        yield f"  memory   counted with group {group.shares_devices_with}"
    elif planned.peak_bytes is not None:
        yield f"  memory   peak {_gib(planned.peak_bytes)} of {_gib(gpu_bytes)} GiB per GPU{_peak_text(planned)}"


def _peak_text(planned: GroupPlan) -> str:
    """What the peak is made of, where roles share a GPU."""
    beside = f" with {', '.join(role.role for role in planned.roles_beside)}" if planned.roles_beside else ""
    if any(role.memory is None for role in (*planned.roles, *planned.roles_beside)):
        return f"{beside}, of the roles whose memory is known"
    if planned.awake_bytes == planned.peak_bytes:
        return beside
    if not beside and len(planned.roles) == 1:
        return ""
    return f"{beside} while idle roles sleep or are offloaded, {_gib(planned.awake_bytes or 0)} if none were"


def _role_text(role: RolePlan, planned: GroupPlan) -> str:
    verb = {"train": "trains, ", "generate": "generates", "score": "scores, ", "unknown": ""}[role.does]
    size = "" if role.shape is None else f", {_billions(role.shape.num_parameters)} parameters"
    if role.engine == "vllm":
        cache = "" if role.cache_tokens is None else f", cache of {role.cache_tokens:,} tokens each"
        return f"{verb} by vLLM, {_count(role.sizes.data, 'engine')} of TP {role.engine_tensor}{cache}{size}"
    if role.engine == "hf":
        return f"{verb} by transformers, every worker on its own{size}"
    sizes = role.sizes
    extra = f" ETP {sizes.expert_tensor}" if sizes.expert_tensor != sizes.tensor else ""
    extra += f" VPP {sizes.virtual_pipeline}" if sizes.virtual_pipeline > 1 else ""
    extra += f" Ulysses {sizes.shared_rows}" if sizes.shared_rows > 1 else ""
    divided = "TP x PP x CP" + (" x Ulysses" if sizes.shared_rows > 1 else "")
    if sizes.given_stages and role.shape is not None:
        extra += f" (layers {' + '.join(map(str, sizes.stage_layers(role.shape.num_hidden_layers)))})"
    return (
        f"{verb}TP {sizes.tensor} PP {sizes.pipeline} CP {sizes.context} EP {sizes.expert}{extra} "
        f"DP {sizes.data:,} (= {planned.group.num_workers:,} workers / {divided}){size}"
    )


def _share_text(share: NodeShare) -> str:
    workers = _count(share.num_workers, "worker")
    if share.num_nodes == 1:
        return f"{workers} on node {share.nodes[0]}"
    return f"{workers} on each of {share.num_nodes:,} nodes: {_few(share.nodes)}"


def _bundle_text(planned: GroupPlan) -> Iterator[str]:
    """What is asked of the cluster: bundles of a placement group, node by node."""
    group = planned.group
    if group.shares_devices_with is not None:
        yield f"the devices of {group.shares_devices_with}, {_amounts(resources(group, planned.num_groups))} of each"
        return
    ask = _amounts(bundle(group, planned.num_groups))
    if not planned.shares:
        yield f"{group.num_workers:,} x {ask} where CPUs are free"
    for share in planned.shares:
        place = f"node {share.nodes[0]}" if share.num_nodes == 1 else f"each of {share.num_nodes:,} nodes"
        yield f"{share.num_workers:,} x {ask} on {place}"


def _amounts(resources: Mapping[str, float]) -> str:
    return f"{{{', '.join(f'{name}: {amount:g}' for name, amount in sorted(resources.items(), reverse=True))}}}"


def _numbered(name: str, messages: Sequence[str]) -> Iterator[str]:
    if messages:
        yield ""
        yield f"{_count(len(messages), name)}:"
    for number, message in enumerate(messages, 1):
        yield f"  {number}. {message}"


def _few(texts: Sequence[str]) -> str:
    """Runs as far as a line goes."""
    more = f", ... ({len(texts) - SHOWN_RUNS:,} more)" if len(texts) > SHOWN_RUNS else ""
    return ", ".join(texts[:SHOWN_RUNS]) + more


def _count(count: int, name: str) -> str:
    return f"{count:,} {name}" if count == 1 else f"{count:,} {name}s"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}"


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e8 else f"{count:,}"


# JSON


def as_dict(made: Plan) -> dict[str, Any]:
    """The plan as plain values: the same facts as the text, uncut, memory in bytes."""
    return {
        "config": made.config,
        "groups": [_group_dict(planned) for planned in made.groups],
        "is_partial": made.is_partial,
        "total": {
            "nodes": made.num_nodes,
            "gpus_per_node": made.gpus_per_node,
            "gpus": made.num_gpus,
            "asked": made.num_asked,
            "used": made.num_asked if made.fits else None,
            "idle": made.num_gpus - made.num_asked if made.fits else None,
            "gpu_memory_bytes": made.gpu_bytes,
        },
        "assumed": list(made.findings.assumed),
        "warnings": made.findings.warnings,
        "mistakes": [str(mistake) for mistake in made.findings.mistakes],
    }


def _group_dict(planned: GroupPlan) -> dict[str, Any]:
    group = planned.group
    return {
        "name": group.name,
        "roles": [_role_dict(role) for role in planned.roles],
        "also": list(planned.guests),
        "colocated": len(group.roles) > 1,
        "device": group.device,
        "num_workers": group.num_workers,
        "gpus_per_worker": group.gpus_per_worker,
        "ranks": None if group.ranks is None else list(planned.ranks),
        "nodes": [
            {"nodes": list(share.nodes), "num_nodes": share.num_nodes, "workers_on_each": share.num_workers}
            for share in planned.shares
        ],
        "shares_devices_with": group.shares_devices_with,
        "bundle": None if group.shares_devices_with else bundle(group, planned.num_groups),  # it then has the other's
        "takes": resources(group, planned.num_groups),
        "memory": {
            "is_estimate": True,
            "peak_bytes": planned.peak_bytes,
            "peak_bytes_if_nothing_moves_away": planned.awake_bytes,
            "runtime_bytes": RUNTIME_BYTES,
        },
    }


def _role_dict(role: RolePlan) -> dict[str, Any]:
    sizes = role.sizes
    return {
        "role": role.role,
        "does": role.does,
        "engine": role.engine,
        "parallel_sizes": {
            "tensor": sizes.tensor,
            "pipeline": sizes.pipeline,
            "context": sizes.context,
            "shared_rows": sizes.shared_rows,
            "expert": sizes.expert,
            "expert_tensor": sizes.expert_tensor,
            "virtual_pipeline": sizes.virtual_pipeline,
            "first_stage": sizes.first_stage,
            "last_stage": sizes.last_stage,
            "vllm_tensor": role.engine_tensor,
            "data": sizes.data,
        },
        "cache_tokens": role.cache_tokens,
        "num_parameters": None if role.shape is None else role.shape.num_parameters,
        "memory": None if role.memory is None else [_term_dict(term) for term in role.memory.terms],
        "memory_unknown": role.unknown or None,
    }


def _term_dict(term: Term) -> dict[str, Any]:
    return {
        "name": term.name,
        "bytes": term.num_bytes,
        "is_estimate": term.is_estimate,
        "stays_while_idle": term.stays,
        "freed_by": list(term.freed_by),
    }
