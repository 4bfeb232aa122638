"""What vLLM warns of that is meant here: such lines are of level INFO, so that warnings on the console say something.

Of vLLM 0.26 to 0.33; a warning that reads otherwise stays one.
"""

from __future__ import annotations

import logging

EXPECTED: dict[str, tuple[str, ...]] = {  # by logger: how the message begins
    "vllm.engine.arg_utils": (
        "The global random seed is set to",  # the generators of the process are put back (start.py)
        "This model does not officially support disabling chunked prefill",
    ),
    "vllm.config.vllm": (
        "Enforce eager set",  # by the key vllm_enforce_eager
        "Inductor compilation was disabled by user settings",
        "Model Runner V2 requires Triton",  # on a CPU
    ),
    "vllm.config.scheduler": ("Using custom scheduler class trainers.",),  # compared with vLLM's own, by version
    "vllm.v1.engine.input_processor": (
        "Passing raw prompts to InputProcessor",
    ),  # of token ids, which need no renderer
    "vllm.renderers.base": ("Using None for EOS token id",),  # stop tokens stand in every request
    "vllm.v1.worker.cpu_worker": (
        "CPU backend doesn't allow to use `torch.set_num_threads`",  # put back too
        *("libtcmalloc is not found", "libiomp is not found"),  # a CPU is for first tests
    ),
    "vllm.platforms.cpu": ("Triton is not installed", "Reset SSM cache type to float32"),
}


class Expected(logging.Filter):
    """Lowers the level of lines that begin so."""

    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self.beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno == logging.WARNING and record.getMessage().startswith(self.beginnings):
            record.levelno, record.levelname = logging.INFO, "INFO"
        return True


def expect() -> None:
    """From now on; asked again, nothing changes."""
    for name, beginnings in EXPECTED.items():
        logger = logging.getLogger(name)
        if not any(isinstance(one, Expected) for one in logger.filters):
            logger.addFilter(Expected(beginnings))
