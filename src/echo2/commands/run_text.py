"""The text of a run's tokens: by the tokenizer that its learner published, if it can be had.

Looked for in the run's published assets, then in the model's folder of its resolved
configuration. Without the library `tokenizers`, or without either, tokens are shown by id.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from echo2.commands.run_folder import RunFolder
from echo2.config import load_config
from echo2.errors import ConfigError, WeightsError
from echo2.weights.store import open_version

TOKENIZER = "tokenizer.json"
Decode = Callable[[Sequence[int]], str]


def decoder_of(run_dir: Path) -> tuple[Decode, str]:
    """(token ids -> text with special tokens, why it is only ids or "")."""
    try:
        library = import_module("tokenizers")
    except ImportError:
        return (
            _ids,
            'tokenizers is not installed, so tokens are shown by id: pip install "echo2'
            + ('[openai]"'),
        )
    content = _published(run_dir / "versions") or _of_model(run_dir)
    if content is None:
        return _ids, f"no {TOKENIZER} of this run was found, so tokens are shown by id"
    tokenizer = library.Tokenizer.from_str(content)
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)), ""


def _ids(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def _published(folder: Path) -> str | None:
    """From the newest assets in the folder of versions."""
    manifests = sorted(folder.glob("*.manifest"), key=lambda p: p.stat().st_mtime, reverse=True)
    for path in manifests:
        try:
            stored = open_version(folder, path.stem)
        except WeightsError:
            continue  # a torn one is the learner's to mend
        if stored is None:
            continue
        with stored:
            if stored.manifest.kind == "assets" and TOKENIZER in stored.tensors():
                return bytes(stored.tensors()[TOKENIZER][2]).decode()
    return None


def _of_model(run_dir: Path) -> str | None:
    path = RunFolder(run_dir).resolved_config
    if not path.exists():
        return None
    try:
        folder = import_module("echo2_workers.models").model_folder(load_config(path).model.path)
    except ConfigError:
        return None  # the model lies on another machine
    tokenizer = folder / TOKENIZER
    return tokenizer.read_text(encoding="utf-8") if tokenizer.is_file() else None


def escaped(text: str) -> str:
    """Control characters made visible, so that a rollout cannot command the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: repr(found[0])[1:-1], text)
