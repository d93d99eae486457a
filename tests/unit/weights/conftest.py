"""Versions in words: `write_small(folder, num_bytes=...)`."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from echo2.weights.snapshot import Manifest
from echo2.weights.store import StoredVersion, open_version, write_version

WriteSmall = Callable[..., Manifest]
Chunks = Callable[[Path, Manifest], list[bytes]]


@pytest.fixture
def write_small() -> WriteSmall:
    """Writes a version of one U8 tensor with bytes from a seed, in small chunks."""

    def write(
        folder: Path, *, num_bytes: int = 1000, seed: int = 0, chunk_bytes: int = 256
    ) -> Manifest:
        content = random.Random(seed).randbytes(num_bytes)
        return write_version(
            folder,
            [("weight", "U8", (num_bytes,), content)],
            metadata={"seed": str(seed)},
            chunk_bytes=chunk_bytes,
        )

    return write


@pytest.fixture
def chunks_of() -> Chunks:
    """All chunks of a version on disk, in order."""

    def read(folder: Path, manifest: Manifest) -> list[bytes]:
        version = open_version(folder, manifest.manifest_digest)
        assert isinstance(version, StoredVersion)
        with version:
            return [version.read(index) for index in range(manifest.num_chunks)]

    return read
