"""Which part of the driver's environment a worker gets: a declared list, never the whole. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# What workers take over from the driver's environment; nothing else travels.
PASSED_PREFIXES: tuple[str, ...] = ("HF_", "TRANSFORMERS_", "TOKENIZERS_", "NCCL_", "NVSHMEM_", "GLOO_", "TORCH")
PASSED_PREFIXES += ("PYTORCH_", "VLLM_", "RAYHELPER_")
PASSED = frozenset("OMP_NUM_THREADS MKL_NUM_THREADS CUDA_DEVICE_MAX_CONNECTIONS CUBLAS_WORKSPACE_CONFIG".split())
PASSED |= {"PYTHONHASHSEED", "PYTHONBREAKPOINT"}
# What belongs to the machine and the interpreter, and stays in workers that a driver of the same machine starts.
MACHINE_PREFIXES = (
    "LC_",
    "LD_",
    "DYLD_",
    "PYTHON",
    "CONDA",
    "CUDA_",
    "NVIDIA_",
    "ASCEND_",
    "RAY_",
    "SSL_",
    "XDG_",
    "__",
)
MACHINE = frozenset(
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TERM PWD VIRTUAL_ENV HOSTNAME SHLVL _".split()
)


def passed(driver: Mapping[str, str]) -> dict[str, str]:
    """The part of the driver's environment that its workers get."""
    return {name: value for name, value in driver.items() if name in PASSED or name.startswith(PASSED_PREFIXES)}


def forgotten(driver: Iterable[str]) -> list[str]:
    """The names that a worker started by this very driver inherits and must not keep."""
    kept = PASSED | MACHINE
    return [name for name in driver if name not in kept and not name.startswith(PASSED_PREFIXES + MACHINE_PREFIXES)]
