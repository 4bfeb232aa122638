"""The dry run behind ``rayhelper plan``: the GPUs and memory that a configuration needs, found without a cluster.

plan_report.py     the subcommand, its text and its JSON
dry_run.py         groups on nodes, and every mistake with its remedy
plan_roles.py      what each role of a group would do there; role_kinds.py: what its trainer declares of it
memory.py          estimated memory a GPU; model_shape.py: a model's sizes; parallel_sizes.py: which sizes go together
"""
