"""The manifest of a version: names every tensor, every chunk's digest and the whole.

A manifest that exists is valid: it is checked when it is made and when it is decoded, with
the reason in the error, before anything is allocated for it. Its encoding is canonical
(one object, one byte string), so `manifest_digest`, the BLAKE3 of these bytes, names the
version for fetchers and stores. Two versions with the same bytes and different metadata
share `digest` and differ in `manifest_digest`.

The rules of the layout are in `echo2.core.manifest`, the files in `echo2.weights.store`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from blake3 import blake3

from echo2 import wire
from echo2.core.manifest import (
    CHUNK_MIN_BYTES,
    DTYPE_BYTES,
    NUM_BYTES_MAX,
    Kind,
    TensorSpec,
    chunk_range,
    layout_problem,
)
from echo2.errors import Echo2Error, WeightsError
from echo2.messages import CHUNK_MAX_BYTES, MANIFEST_MAX_BYTES

__all__ = ["DIGEST_BYTES", "DTYPE_BYTES", "FORMAT", "Kind", "Manifest", "TensorSpec", "hex_digest"]

FORMAT: Final = 1
DIGEST_BYTES: Final = 32
METADATA_MAX: Final = 256
METADATA_KEY_MAX_CHARACTERS: Final = 256
METADATA_VALUE_MAX_CHARACTERS: Final = 65536

_FIELDS: Final = (
    "format",
    "kind",
    "tensors",
    "chunk_bytes",
    "chunk_digests",
    "num_bytes",
    "digest",
    "metadata",
)


def hex_digest(content: bytes | memoryview) -> str:
    """BLAKE3 in lower-case hexadecimal, as messages and file names carry it."""
    return blake3(content).hexdigest()


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a version is, checked as a whole; WeightsError says what is wrong with it.

    `chunk_digests` holds BLAKE3 digests of 32 bytes, one per chunk of `chunk_bytes` (the
    last one may be shorter). `digest` is the BLAKE3 of all `num_bytes` bytes, padding
    included. `metadata` is for people and engines (version, model type); nothing here
    reads it.
    """

    kind: Kind
    tensors: tuple[TensorSpec, ...]
    chunk_bytes: int
    chunk_digests: tuple[bytes, ...] = field(repr=False)
    num_bytes: int
    digest: str
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)
    manifest_digest: str = field(init=False, compare=False)
    """BLAKE3 of the encoded manifest: the name of the version."""

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise WeightsError(f"not a manifest: {problem}")
        object.__setattr__(self, "metadata", dict(sorted(self.metadata.items())))
        object.__setattr__(self, "manifest_digest", hex_digest(self.encode()))

    @property
    def num_chunks(self) -> int:
        return len(self.chunk_digests)

    def chunk_range(self, index: int) -> tuple[int, int]:
        """[start, end) of a chunk; WeightsError when there is no such chunk."""
        if not 0 <= index < self.num_chunks:
            raise WeightsError(
                f"there is no chunk {index}; version {self.manifest_digest[:12]} has chunks "
                f"0 to {self.num_chunks - 1}"
            )
        return chunk_range(index, num_bytes=self.num_bytes, chunk_bytes=self.chunk_bytes)

    def encode(self) -> bytes:
        """The one byte string of this manifest; at most MANIFEST_MAX_BYTES."""
        encoded = wire.pack(
            {
                "format": FORMAT,
                "kind": self.kind,
                "tensors": [
                    [spec.name, spec.dtype, list(spec.shape), spec.offset, spec.num_bytes]
                    for spec in self.tensors
                ],
                "chunk_bytes": self.chunk_bytes,
                "chunk_digests": b"".join(self.chunk_digests),
                "num_bytes": self.num_bytes,
                "digest": self.digest,
                "metadata": dict(self.metadata),
            }
        )
        if len(encoded) > MANIFEST_MAX_BYTES:
            raise WeightsError(
                f"the manifest of {len(self.tensors)} tensors and {self.num_chunks} chunks has "
                f"{len(encoded)} bytes; at most {MANIFEST_MAX_BYTES} are allowed: use larger "
                "chunks"
            )
        return encoded

    @classmethod
    def decode(cls, encoded: bytes) -> Manifest:
        """Read what `encode` wrote; WeightsError for anything else, down to the byte."""
        if len(encoded) > MANIFEST_MAX_BYTES:
            raise WeightsError(
                f"not a manifest: it has {len(encoded)} bytes; at most {MANIFEST_MAX_BYTES} "
                "are allowed"
            )
        try:
            plain = wire.unpack(encoded, max_bytes=MANIFEST_MAX_BYTES)
        except (Echo2Error, ValueError) as error:
            raise WeightsError(f"not a manifest: {error}") from error
        manifest = _from_plain(plain)
        if manifest.manifest_digest != hex_digest(encoded):
            raise WeightsError("not a manifest: its bytes are not in canonical form")
        return manifest

    def _problem(self) -> str | None:
        problem = self._type_problem()
        if problem is not None:
            return problem
        if not CHUNK_MIN_BYTES <= self.chunk_bytes <= CHUNK_MAX_BYTES:
            return (
                f"chunk_bytes is {self.chunk_bytes}; allowed are {CHUNK_MIN_BYTES} to "
                f"{CHUNK_MAX_BYTES}"
            )
        if not 0 <= self.num_bytes <= NUM_BYTES_MAX:
            return f"num_bytes is {self.num_bytes}; allowed are 0 to {NUM_BYTES_MAX}"
        if any(len(digest) != DIGEST_BYTES for digest in self.chunk_digests):
            return f"a chunk digest does not have {DIGEST_BYTES} bytes"
        if len(self.digest) != 2 * DIGEST_BYTES or set(self.digest) - set("0123456789abcdef"):
            return f"digest {self.digest[:80]!r} is not {2 * DIGEST_BYTES} hexadecimal digits"
        if len(self.metadata) > METADATA_MAX:
            return f"metadata has {len(self.metadata)} entries; at most {METADATA_MAX} are allowed"
        for key, value in self.metadata.items():
            if len(key) > METADATA_KEY_MAX_CHARACTERS or len(value) > METADATA_VALUE_MAX_CHARACTERS:
                return f"metadata entry {key[:64]!r} is too long"
            if not (_encodes(key) and _encodes(value)):
                return f"metadata entry {key[:64]!a} is not Unicode text"
        return layout_problem(
            self.kind,
            self.tensors,
            num_bytes=self.num_bytes,
            chunk_bytes=self.chunk_bytes,
            num_digests=len(self.chunk_digests),
        )

    def _type_problem(self) -> str | None:
        # What was decoded may hold any type, and True equals 1.
        if type(self.chunk_bytes) is not int or type(self.num_bytes) is not int:
            return "chunk_bytes and num_bytes must be integers"
        if not isinstance(self.digest, str) or not isinstance(self.kind, str):
            return "digest and kind must be text"
        if not all(isinstance(digest, bytes) for digest in self.chunk_digests):
            return "a chunk digest is not bytes"
        for pair in self.metadata.items():
            if not all(isinstance(text, str) for text in pair):
                return "metadata must map text to text"
        for spec in self.tensors:
            if not isinstance(spec.name, str) or not isinstance(spec.dtype, str):
                return "a tensor's name and dtype must be text"
            if any(type(n) is not int for n in (*spec.shape, spec.offset, spec.num_bytes)):
                return f"tensor {spec.name[:64]!r}: shape, offset and num_bytes must be integers"
        return None


def _from_plain(plain: Any) -> Manifest:
    """Shape what was unpacked; what it says is checked by the class."""
    if not isinstance(plain, dict) or tuple(plain) != _FIELDS:
        raise WeightsError(f"not a manifest: its fields must be {', '.join(_FIELDS)}")
    if type(plain["format"]) is not int or plain["format"] != FORMAT:
        raise WeightsError(
            f"not a manifest: format {plain['format']!r} is unknown; this echo2 reads {FORMAT}"
        )
    rows, blob, metadata = plain["tensors"], plain["chunk_digests"], plain["metadata"]
    if not isinstance(rows, list) or not isinstance(blob, bytes) or not isinstance(metadata, dict):
        raise WeightsError(
            "not a manifest: tensors must be a list, chunk_digests bytes, metadata a map"
        )
    if len(blob) % DIGEST_BYTES:
        raise WeightsError(
            f"not a manifest: chunk_digests has {len(blob)} bytes; "
            f"{DIGEST_BYTES} are needed for each chunk"
        )
    specs = []
    for row in rows:
        if not isinstance(row, list) or len(row) != 5 or not isinstance(row[2], list):
            raise WeightsError(
                "not a manifest: a tensor must be name, dtype, shape, offset and num_bytes"
            )
        name, dtype, shape, offset, num_bytes = row
        specs.append(TensorSpec(name, dtype, tuple(shape), offset, num_bytes))
    return Manifest(
        kind=plain["kind"],
        tensors=tuple(specs),
        chunk_bytes=plain["chunk_bytes"],
        chunk_digests=tuple(
            blob[start : start + DIGEST_BYTES] for start in range(0, len(blob), DIGEST_BYTES)
        ),
        num_bytes=plain["num_bytes"],
        digest=plain["digest"],
        metadata=metadata,
    )


def _encodes(text: str) -> bool:
    """Whether UTF-8 can carry it (a lone surrogate cannot be sent)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
