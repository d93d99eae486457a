"""Which files of a model folder travel with its tensors.

Tensors become a version of kind weights, wherever they lay (`safetensors_file`); tokenizer,
configuration and whatever else is small become a version of kind assets. What says where a
tensor lies is neither: it is not true any more where the model arrives.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from echo2.core.manifest import name_problem
from echo2.types import Version
from echo2.weights.files import disk_errors
from echo2.weights.safetensors_file import INDEX_NAME

MARKER_NAME: Final = "echo2_version.json"
"""In a folder that a worker wrote: which version lies there."""
NOT_ASSETS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Suffixes of files that hold weights."""


def asset_files(folder: Path) -> dict[str, Path]:
    """Name -> path of every file beside the weights; folders and hidden files stay behind."""
    with disk_errors("reading a model folder", folder):
        return {
            path.name: path
            for path in sorted(folder.iterdir())
            if path.is_file()
            and path.suffix not in NOT_ASSETS
            and path.name not in (INDEX_NAME, MARKER_NAME)
            and name_problem("assets", path.name) is None
        }


def marker(version: Version, manifest_digest: str, assets_digest: str) -> bytes:
    """Content of MARKER_NAME."""
    told = {
        "version": str(version),
        "manifest_digest": manifest_digest,
        "assets_digest": assets_digest,
    }
    return (json.dumps(told, indent=2) + "\n").encode()
