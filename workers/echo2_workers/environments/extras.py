"""Packages that only some environments need: imported where used, named with their pip extra."""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType

from echo2.errors import ConfigError


def require(module: str, *, extra: str, environment: str) -> ModuleType:
    """The imported module. ConfigError with the line that installs it when it is absent."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"environment {environment} needs the package {module.partition('.')[0]}, which "
            f"cannot be imported here ({error}); install it with: pip install 'echo2[{extra}]'"
        ) from error


def versioned(own: str, distribution: str, *, extra: str, environment: str) -> str:
    """An environment's version that tells the package's too: two releases of a generator give
    other tasks, and a worker with another one must be refused."""
    try:
        return f"{own}, {distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"environment {environment} needs the package {distribution}, which is not installed "
            f"here; install it with: pip install 'echo2[{extra}]'"
        ) from None
