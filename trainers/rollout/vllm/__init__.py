"""The ``vllm`` rollout engine. Read ``engine.py`` first.

    engine.py       completions, scores, weights, memory
    core.py         vLLM's own core: its requests, its steps, what it keeps
    running.py      completions while they grow
    scores.py       log-probabilities of given tokens, as steps give them out
    settings.py     our keys as fields of vLLM's EngineArgs and SamplingParams
    start.py        how the engine is built, and what it finds in the environment as it starts
    model.py        what is asked of the model, in whichever process it lies
    adapter.py      a LoRA adapter apart from the model
    processes.py    vLLM's own processes under one engine
    cpu_worker.py   such a process on a CPU
    vision/         the pictures of prompts
    scheduling/     a scheduler whose steps that only decode are arrays
    patches.py      changes to vLLM
    kernel.py       what one of them puts in the place of vLLM's kernel

Two files import vLLM as they are imported: ``cpu_worker.py`` and ``scheduling/scheduler.py``. vLLM asks for both.
"""
