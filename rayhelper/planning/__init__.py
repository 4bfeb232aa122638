"""The dry run behind ``rayhelper plan``: what a configuration would ask of a cluster, without one.

plan_report.py     the subcommand, its text and its JSON
dry_run.py         groups on nodes, and every mistake with its remedy
plan_roles.py      what each role of a group would do there; role_kinds.py: what its trainer declares of it
memory.py          estimated memory a GPU; model_shape.py: a model's sizes; parallel_sizes.py: which sizes go together
"""
