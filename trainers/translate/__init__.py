"""``rayhelper translate``: other systems' commands and files, written in our keys.

command.py    the command line: what is read, what is written, what is told
shell.py      scripts: variables, continued lines, arrays, arithmetic
sources.py    a script, a command or a YAML file -> which system's it is, and its keys
table.py      their keys as they are taken one after the other; ours as they are said
verl.py, siirl.py, roll.py, flat.py (TRL, ms-swift)    what each system's keys mean
writer.py     ours as YAML, with a comment on each line
"""
