"""What is wrong with something that a user wrote or named, as one error that names the key."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from types import NoneType

from rayhelper import ConfigError


@contextlib.contextmanager
def mistakes_of(key: str) -> Iterator[None]:
    """Inside, what is found wrong with something that the user wrote or named is a ConfigError that names the key.

    An error in the code of a plugin keeps its traceback.
    """
    try:
        yield
    except ConfigError:
        raise
    except SystemExit as error:  # of a plugin as it is imported: the run has not ended well
        if type(error) is not SystemExit:  # a signal ends the run: ``Stopped``
            raise
        raise ConfigError(f"{key}: its code called sys.exit({error.code!r}). Let it raise an error.") from error
    except (ValueError, TypeError, FileNotFoundError, ImportError) as error:
        if isinstance(error, ImportError) and not isinstance(error.__cause__, (ImportError, NoneType)):
            raise
        told = str(error) if str(error).startswith(key) else f"{key}: {error}"
        raise ConfigError("; ".join([told, *getattr(error, "__notes__", [])])) from error
    except Exception as error:
        if not type(error).__module__.startswith("jinja2"):
            raise
        told = f"{key}: the chat template cannot write a conversation: {error}"
        raise ConfigError("; ".join([told, *getattr(error, "__notes__", [])])) from error


WHEELS = "https://download.pytorch.org/whl"  # a folder for each build of torch: cpu, cu130, ...


@contextlib.contextmanager
def packages_fit() -> Iterator[None]:
    """Inside, what comes of a torchvision for another torch is a ConfigError that says so.

    transformers imports an installed torchvision also for a language model, and names only the model that it could not
    import. Other errors stay as they are.
    """
    try:
        yield
    except Exception as error:  # of any kind: transformers wraps what it finds
        if not _is_of_torchvision(error):
            raise
        raise ConfigError(_unfit_torchvision()) from error


def _is_of_torchvision(error: BaseException | None) -> bool:
    """Whether an error, or a cause of it, is of torchvision's kernels: they are not there, or it is only half there."""
    while error is not None:
        if "operator torchvision::" in str(error) or "partially initialized module 'torchvision'" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _unfit_torchvision() -> str:
    """What does not fit, and how to install what does: pip finds it where torch is held."""
    found = version("torch")
    try:
        unfit = f"torchvision {version('torchvision')}"
    except PackageNotFoundError:
        unfit = "the torchvision that is found"
    build = found.partition("+")[2]
    index = f" --index-url {WHEELS}/{build}" if build else ""
    return (
        f"{unfit} does not fit torch {found}. Run pip uninstall -y torchvision; for rows with videos then also pip "
        f"install torchvision torch=={found}{index}"
    )
