"""What is wrong with something that a user wrote or named, as one error that names the key."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
