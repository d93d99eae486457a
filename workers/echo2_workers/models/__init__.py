"""Models that are shipped: small, warm-started, for the quickstart and for tests.

Each folder here is a Hugging Face folder (config.json, model.safetensors, tokenizer);
`learner/echo2_learner/warm_start.py` made it. Imports nothing heavy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from echo2.errors import ConfigError

BUILTIN: Final = "builtin:"


def builtin_models() -> list[str]:
    """Names of the shipped models, sorted."""
    folders = Path(__file__).parent.iterdir()
    return sorted(folder.name for folder in folders if (folder / "config.json").is_file())


def model_folder(path: str) -> Path:
    """The folder of `model.path`: "builtin:NAME" or a folder with a config.json.

    Raises ConfigError when there is no such model.
    """
    if path.startswith(BUILTIN):
        name = path.removeprefix(BUILTIN)
        if name not in builtin_models():
            raise ConfigError(
                f"model.path is {path!r}; shipped are "
                f"{', '.join(BUILTIN + known for known in builtin_models())}"
            )
        return Path(__file__).parent / name
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path is {path!r}, which holds no config.json; give a Hugging Face folder "
            f"(config.json, *.safetensors, tokenizer) or one of "
            f"{', '.join(BUILTIN + known for known in builtin_models())}"
        )
    return folder
