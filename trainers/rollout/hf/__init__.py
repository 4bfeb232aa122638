"""The ``hf`` rollout engine: completes prompts with a transformers model, the trained module itself where it is here.

engine.py      HfEngine: what other parts of the project call
decoder.py     continuous batching: waiting prompts enter slots, and leave them as completed
requests.py    a prompt on its way
slots.py       one decoding step of all slots, on the device
cache.py       keys and values: one row per slot
attention.py   attention and masks over these rows, through transformers' interfaces
norms.py       RMS norms by one kernel each
decoding_kernels.py  what a step does on a GPU, as Triton kernels
graphs.py      decoding steps as CUDA graphs
draws.py       random numbers by seed and prompt, truncations of the distribution
batches.py     transformers' own ``generate``, for the models and settings that slots do not know
settings.py    checks of keys and prompts
"""
