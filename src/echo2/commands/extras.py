"""Whether the heavy libraries of a part are installed, asked without importing them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from echo2.config import TrackersTable
from echo2.errors import ConfigError, Echo2Error

_NEEDS = {
    "learner": ("torch", "transformers", "safetensors"),
    "worker": ("torch", "transformers", "safetensors"),
}


def need_extras(part: Literal["learner", "worker"]) -> None:
    """Raises Echo2Error with the pip line that mends it."""
    missing = [name for name in _NEEDS[part] if find_spec(name) is None]
    if missing:
        raise Echo2Error(
            f"the {part} needs {', '.join(missing)}, not installed here; install with: "
            f'pip install "echo2[{part}]" (from a checkout: pip install '
            f"-c constraints-cpu.txt '.[{part}]'; on a machine without a GPU add PyTorch's CPU "
            "wheel index)"
        )


def need_trackers(table: TrackersTable) -> None:
    """ConfigError when a tracker that is asked for is not installed."""
    problems = [
        f"trackers.{name} = true needs the package {name}, which is not installed here: pip "
        f'install "echo2[{name}]", or set it to false'
        for name in ("tensorboard", "wandb")
        if getattr(table, name) and find_spec(name) is None
    ]
    if problems:
        raise ConfigError(problems)
