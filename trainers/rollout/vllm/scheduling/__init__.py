"""A scheduler for vLLM's ``scheduler_cls`` whose steps that only decode are arrays.

    scheduler.py    the classes that vLLM is given by name
    steps.py        plans a step that only decodes, and takes in what it drew
    rows.py         the requests of such steps: counts and new tokens, a row per request
    single.py       the same for one request at a time, where prompts are among them

``scheduler.py`` imports vLLM as it is imported itself, because vLLM asks for it by name.
"""
