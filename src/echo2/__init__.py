"""echo2: asynchronous reinforcement learning over cheap, far and unreliable workers.

    import echo2

    config = echo2.load_config("configs/quickstart.toml")
    async with echo2.Coordinator(config) as coordinator:
        ...

Names are imported on first use, so that `import echo2` is light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echo2.config import Config, load_config
    from echo2.learner_client import Batch
    from echo2.service import Coordinator
    from echo2.types import Sampling, Task, Version

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Config",
    "Coordinator",
    "Sampling",
    "Task",
    "Version",
    "__version__",
    "load_config",
]

_HOMES = {
    "Batch": "echo2.learner_client",
    "Config": "echo2.config",
    "Coordinator": "echo2.service",
    "Sampling": "echo2.types",
    "Task": "echo2.types",
    "Version": "echo2.types",
    "load_config": "echo2.config",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'echo2' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(home), name)
