"""Versions on disk: written once, named by their manifest, read in place.

A version is two files, `<manifest_digest>.bin` (all its bytes) and
`<manifest_digest>.manifest`. It exists when both do: the bytes are on the disk and renamed
before the manifest is, and are removed after it. Nothing ever changes inside a version.

`write_version` streams: it needs no memory beyond the tensor that the caller hands over.
Assembling a version from chunks is `echo2.weights.store`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final

from blake3 import blake3

from echo2.core.manifest import (
    Kind,
    TensorSpec,
    aligned,
    padding_ranges,
    tensor_problem,
)
from echo2.errors import WeightsError
from echo2.messages import MANIFEST_MAX_BYTES
from echo2.weights.files import (
    BIN,
    MANIFEST,
    aside,
    disk_errors,
    flush,
    remove_stale,
    remove_version,
    sync_folder,
    version_files,
    write_whole,
)
from echo2.weights.snapshot import Manifest, hex_digest

Buffer = bytes | bytearray | memoryview | mmap.mmap
NamedTensor = tuple[str, str, tuple[int, ...], Buffer]
"""(name, dtype, shape, bytes): C order, little endian."""

CHUNK_BYTES: Final = 256 << 10
PIECE_BYTES: Final = 8 << 20
"""Bytes hashed or copied in one go, between two looks at whether to stop."""


class TornVersionError(WeightsError):
    """The files of a version are not what its manifest says: remove it, fetch it again."""


def write_version(
    folder: Path,
    tensors: Iterable[NamedTensor],
    *,
    kind: Kind = "weights",
    metadata: Mapping[str, str] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Manifest:
    """Write a version, tensor by tensor, and return its manifest once it is on the disk.

    Each buffer is read once and let go, so a generator may make them one at a time. The
    same tensors and metadata give the same version, whatever was there. WeightsError when
    a buffer does not fit its shape, a name is not allowed or the disk is full; then
    nothing new is there.
    """
    with disk_errors("writing a version", folder), aside(folder) as (path, file):
        writer = _Writer(file, chunk_bytes)
        for name, dtype, shape, buffer in tensors:
            writer.add(kind, name, dtype, tuple(int(size) for size in shape), buffer)
        manifest = writer.manifest(kind, metadata or {})
        flush(file)
        os.replace(path, folder / (manifest.manifest_digest + BIN))
        sync_folder(folder)
        write_whole(folder / (manifest.manifest_digest + MANIFEST), manifest.encode())
    return manifest


def write_assets(folder: Path, files: Mapping[str, Path]) -> Manifest:
    """Write files (tokenizer, model configuration, task data) as a version of kind assets.

    The keys are the plain file names under which `read_assets` gives them back.
    """

    def tensors() -> Iterable[NamedTensor]:
        for name in sorted(files):
            content = files[name].read_bytes()
            yield name, "U8", (len(content),), content

    return write_version(folder, tensors(), kind="assets")


def read_assets(version: StoredVersion, folder: Path) -> list[Path]:
    """Write the files of an assets version into `folder`; each is whole or not there."""
    if version.manifest.kind != "assets":
        raise WeightsError(
            f"version {version.manifest.manifest_digest[:12]} is of kind "
            f"{version.manifest.kind}; only assets are files"
        )
    written = []
    with disk_errors("writing assets", folder):
        for name, (_, _, content) in version.tensors().items():
            write_whole(folder / name, bytes(content))
            written.append(folder / name)
    return written


def open_version(
    folder: Path, manifest_digest: str, *, on_close: Callable[[], None] | None = None
) -> StoredVersion | None:
    """Open a version; None when it is not there. TornVersionError when its files are torn.

    The bytes are not hashed: `StoredVersion.verify` does that. `on_close` is called once,
    when the version is closed.
    """
    path = folder / (manifest_digest + BIN)
    try:
        with disk_errors(f"opening version {manifest_digest[:12]}", folder):
            encoded = read_manifest_file(folder, manifest_digest)
            handle = os.open(path, os.O_RDONLY)
    except WeightsError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    try:
        manifest = named_manifest(encoded, manifest_digest)
        num_bytes = os.fstat(handle).st_size
        if num_bytes != manifest.num_bytes:
            raise WeightsError(
                f"version {manifest_digest[:12]} has {num_bytes} bytes in {folder}; its "
                f"manifest says {manifest.num_bytes}"
            )
    except WeightsError as error:
        os.close(handle)
        raise TornVersionError(f"{error}: remove it and fetch it again") from error
    return StoredVersion(manifest, path, handle, on_close)


def read_manifest_file(folder: Path, manifest_digest: str) -> bytes:
    """The encoded manifest as it is on the disk, unchecked; FileNotFoundError if absent."""
    with open(folder / (manifest_digest + MANIFEST), "rb") as file:
        return file.read(MANIFEST_MAX_BYTES + 1)


def named_manifest(encoded: bytes, manifest_digest: str) -> Manifest:
    """Decode a manifest that must be the one of this name; WeightsError if it is not."""
    actual = hex_digest(encoded)
    if actual != manifest_digest:
        raise WeightsError(
            f"these {len(encoded)} bytes are not manifest {manifest_digest[:12]}: "
            f"their digest is {actual[:12]}"
        )
    return Manifest.decode(encoded)


def prune(folder: Path, keep: set[str]) -> list[str]:
    """Remove every version that is not in `keep` (manifest digests); return those removed.

    Leftovers of killed writers go too.
    """
    with disk_errors("removing old versions", folder):
        remove_stale(folder)
        removed = sorted(version_files(folder).keys() - keep)
        for manifest_digest in removed:
            remove_version(folder, manifest_digest)
    return removed


class StoredVersion:
    """A complete version, open for reading until `close`; safe to use from threads.

    A removal on disk does not disturb it. `path` is the file of all bytes, for processes
    that map it on their own while this one keeps it open.
    """

    def __init__(
        self,
        manifest: Manifest,
        path: Path,
        handle: int,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """Owns `handle`, a file descriptor; `on_close` is called once."""
        self.manifest = manifest
        self.path = path
        self._handle = handle
        self._on_close = on_close
        self._map: memoryview | None = None
        self._lock = threading.Lock()
        self._num_readers = 0
        self._is_closed = False

    def __enter__(self) -> StoredVersion:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...], memoryview]]:
        """name -> (dtype, shape, bytes), in order, without a copy.

        The views are read-only, and aligned for every dtype (torch.frombuffer warns about
        a read-only buffer: copy, or promise not to write). They stay valid after `close`,
        and hold the mapping for as long as they live.
        """
        content = self._mapped()
        return {
            spec.name: (
                spec.dtype,
                spec.shape,
                content[spec.offset : spec.offset + spec.num_bytes],
            )
            for spec in self.manifest.tensors
        }

    def read(self, index: int) -> bytes:
        """One chunk, read from the file (other threads run meanwhile)."""
        start, end = self.manifest.chunk_range(index)
        with self.held() as handle:
            return read_range(handle, start, end)

    def verify(self, *, stop: threading.Event | None = None) -> None:
        """Hash all bytes; TornVersionError when they are not those of the manifest."""
        with self.held() as handle:
            verify_whole(handle, self.manifest, stop=stop)

    @contextlib.contextmanager
    def held(self) -> Iterator[int]:
        """The file descriptor; while it is held, a `close` disturbs no read."""
        with self._lock:
            if not self._num_readers:
                self._check_open()
            self._num_readers += 1
        try:
            yield self._handle
        finally:
            with self._lock:
                self._num_readers -= 1
                self._close_unread()

    def close(self) -> None:
        """Let go of the file, when the last reader has. A second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            # Views in use keep the mapping alive; the last one to go unmaps it.
            self._map = None
            self._close_unread()
        if self._on_close is not None:
            self._on_close()

    def _close_unread(self) -> None:
        if self._is_closed and not self._num_readers and self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _check_open(self) -> None:
        if self._is_closed:
            raise WeightsError(
                f"version {self.manifest.manifest_digest[:12]} was closed: open it again"
            )

    def _mapped(self) -> memoryview:
        with self._lock:
            self._check_open()
            if self._map is None:
                # An empty file cannot be mapped.
                self._map = (
                    memoryview(mmap.mmap(self._handle, 0, access=mmap.ACCESS_READ))
                    if self.manifest.num_bytes
                    else memoryview(b"")
                )
            return self._map


def read_range(handle: int, start: int, end: int) -> bytes:
    """Bytes [start, end) of a file; WeightsError when it is shorter."""
    content = os.pread(handle, end - start, start)
    while len(content) < end - start:
        more = os.pread(handle, end - start - len(content), start + len(content))
        if not more:
            raise TornVersionError(
                f"a version's file ends at {start + len(content)}, in the middle of a chunk; "
                "remove it and fetch it again"
            )
        content += more
    return content


def verify_whole(
    handle: int,
    manifest: Manifest,
    *,
    whole: blake3 | None = None,
    num_hashed: int = 0,
    stop: threading.Event | None = None,
) -> None:
    """Check digest and padding of a whole file; WeightsError says what differs. `whole` has
    hashed the first `num_hashed` bytes already."""
    whole = blake3() if whole is None else whole
    for start in range(num_hashed, manifest.num_bytes, PIECE_BYTES):
        check_stop(stop)
        whole.update(read_range(handle, start, min(start + PIECE_BYTES, manifest.num_bytes)))
    if whole.hexdigest() != manifest.digest:
        raise TornVersionError(
            f"version {manifest.manifest_digest[:12]} has the digest {whole.hexdigest()[:12]} "
            f"as a whole; its manifest says {manifest.digest[:12]}"
        )
    for start, end in padding_ranges(manifest.tensors):
        if any(read_range(handle, start, end)):
            raise TornVersionError(
                f"version {manifest.manifest_digest[:12]} has bytes other than zero between "
                f"two tensors, at {start} to {end}"
            )


def check_stop(stop: threading.Event | None) -> None:
    """Leave long work in a thread when nobody waits for it any more."""
    if stop is not None and stop.is_set():
        raise WeightsError("stopped: nobody waits for this version any more")


class _Writer:
    """Lays out tensors in a file and hashes them on the way: chunks and the whole."""

    def __init__(self, file: BinaryIO, chunk_bytes: int) -> None:
        self._file = file
        self._chunk_bytes = chunk_bytes
        # A publication is waited for by the fleet, so the whole is hashed on all cores.
        self._whole = blake3(max_threads=blake3.AUTO)
        self._chunk = blake3()
        self._chunk_filled = 0
        self._digests: list[bytes] = []
        self._specs: list[TensorSpec] = []
        self._num_bytes = 0

    def add(
        self, kind: Kind, name: str, dtype: str, shape: tuple[int, ...], buffer: Buffer
    ) -> None:
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise WeightsError(f"tensor {name!r} is not contiguous: make a contiguous copy first")
        spec = TensorSpec(name, dtype, shape, aligned(self._num_bytes), view.nbytes)
        problem = tensor_problem(kind, spec)
        if problem is not None:
            raise WeightsError(f"cannot write a version: {problem}")
        self._append(memoryview(bytes(spec.offset - self._num_bytes)))
        self._append(view.cast("B") if view.nbytes else memoryview(b""))
        self._specs.append(spec)

    def manifest(self, kind: Kind, metadata: Mapping[str, str]) -> Manifest:
        if self._chunk_filled:
            self._digests.append(self._chunk.digest())
        return Manifest(
            kind=kind,
            tensors=tuple(self._specs),
            chunk_bytes=self._chunk_bytes,
            chunk_digests=tuple(self._digests),
            num_bytes=self._num_bytes,
            digest=self._whole.hexdigest(),
            metadata=metadata,
        )

    def _append(self, view: memoryview) -> None:
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            self._file.write(piece)
            self._whole.update(piece)
            self._hash_chunks(piece)
        self._num_bytes += len(view)

    def _hash_chunks(self, piece: memoryview) -> None:
        start = 0
        while start < len(piece):
            taken = piece[start : start + self._chunk_bytes - self._chunk_filled]
            self._chunk.update(taken)
            self._chunk_filled += len(taken)
            start += len(taken)
            if self._chunk_filled == self._chunk_bytes:
                self._digests.append(self._chunk.digest())
                self._chunk.reset()
                self._chunk_filled = 0
