"""The chunk store: versions assembled from verified chunks, bounded, and crash-proof.

No byte enters a version unless its chunk has the digest that the manifest names, and no
version is complete unless the digest of the whole is right too. What was verified survives
the process: a later `begin` of the same manifest goes on from there.

    begin -> Assembly: add ... add -> finish -> StoredVersion      (.partial -> .bin)
                          `-- close (kept, resumed by the next begin)

On disk a version is `<manifest_digest>.manifest` with `.bin`, or while incomplete with
`.partial` (full size, reserved at the start) and `.have` (a bit per chunk; only a hint,
since a power cut may tear either, so `begin` hashes again what it claims).

Everything here may be called from threads; what touches many bytes should be. The files
are written with pwrite and not through a mapping: a full disk is then an error and not a
SIGBUS. Processes must not share a store's folder for writing, readers may.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import structlog

from echo2.errors import WeightsError
from echo2.weights.assembly import Assembly, WrongChunkError
from echo2.weights.files import (
    BIN,
    MANIFEST,
    PARTIAL,
    disk_errors,
    remove_stale,
    remove_version,
    version_files,
    write_whole,
)
from echo2.weights.safetensors_file import read_safetensors_folder, write_safetensors
from echo2.weights.snapshot import Manifest
from echo2.weights.versions import (
    StoredVersion,
    TornVersionError,
    named_manifest,
    open_version,
    prune,
    read_assets,
    read_manifest_file,
    write_assets,
    write_version,
)

__all__ = [
    "Assembly",
    "ChunkStore",
    "StoredVersion",
    "TornVersionError",
    "WrongChunkError",
    "open_version",
    "prune",
    "read_assets",
    "read_safetensors_folder",
    "write_assets",
    "write_safetensors",
    "write_version",
]

log = structlog.get_logger(__name__)


class ChunkStore:
    """Versions in `folder`, at most `bytes_max` bytes of them (partial ones count whole).

    To make room, the version that was not opened for the longest time goes first, after
    partial ones that nobody works on; an open version is never evicted.
    """

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self.folder = folder
        self.bytes_max = bytes_max
        self._lock = threading.RLock()
        self._open: Counter[str] = Counter()
        self._assembling: dict[str, int] = {}
        self._verified: set[str] = set()
        with disk_errors("opening a chunk store", folder):
            folder.mkdir(parents=True, exist_ok=True)
            remove_stale(folder)
            for manifest_digest, suffixes in version_files(folder).items():
                if MANIFEST not in suffixes or not suffixes & {BIN, PARTIAL}:
                    remove_version(folder, manifest_digest)

    @property
    def bytes_used(self) -> int:
        with self._lock:
            return sum(self._sizes().values())

    def manifest(self, manifest_digest: str) -> Manifest | None:
        """The manifest of a complete or partial version; None when none or a torn one is here."""
        try:
            return named_manifest(read_manifest_file(self.folder, manifest_digest), manifest_digest)
        except FileNotFoundError:
            return None
        except WeightsError as error:
            log.warning("manifest_ignored", manifest_digest=manifest_digest, reason=str(error))
            return None

    def open(
        self, manifest_digest: str, *, verify: bool = False, stop: threading.Event | None = None
    ) -> StoredVersion | None:
        """Open a complete version; None when it is not here. It is not evicted while open.

        With `verify`, one that this process has not verified yet is hashed first. A torn
        one is removed, and counts as not here. `stop` ends the hashing with a WeightsError.
        """
        try:
            version = self._open_counted(manifest_digest)
            if version is None:
                return None
            try:
                if verify and manifest_digest not in self._verified:
                    version.verify(stop=stop)
                    self._verified.add(manifest_digest)
                with disk_errors("opening a version", self.folder):
                    os.utime(version.path)  # the last opened is the last evicted
            except BaseException:
                version.close()
                raise
        except TornVersionError as error:
            log.warning("version_removed", manifest_digest=manifest_digest, reason=str(error))
            self._remove(manifest_digest)
            return None
        return version

    def has(self, manifest_digest: str) -> bool:
        """Whether a complete version is here; it may still turn out to be torn."""
        return self._path(manifest_digest, BIN).exists()

    def complete(self, kinds: Collection[str], *, most: int) -> tuple[str, ...]:
        """At most so many complete versions of these kinds, the last opened first. Their
        bytes are not verified yet."""
        found: list[str] = []
        names = [d for d, suffixes in version_files(self.folder).items() if BIN in suffixes]
        for digest in sorted(names, key=self._last_opened, reverse=True):
            manifest = self.manifest(digest) if len(found) < most else None
            if manifest is not None and manifest.kind in kinds:
                found.append(digest)
        return tuple(found)

    def begin(self, manifest: Manifest, *, stop: threading.Event | None = None) -> Assembly:
        """Start or resume the assembly of a version that is not here; one at a time each.

        Makes room and reserves the disk first: WeightsError when either is not possible.
        Hashes what an earlier process claims to have; `stop` ends that with a WeightsError.
        """
        name = manifest.manifest_digest
        with self._lock:
            if name in self._assembling:
                raise WeightsError(
                    f"version {name[:12]} is being assembled already: wait for that, or close it"
                )
            if self._path(name, BIN).exists():
                if self.manifest(name) is not None:
                    raise WeightsError(f"version {name[:12]} is complete: open it")
                self._remove(name)
            self._make_room(manifest)
            self._assembling[name] = manifest.num_bytes
        try:
            with disk_errors(
                f"reserving {manifest.num_bytes} bytes for version {name[:12]}", self.folder
            ):
                if self.manifest(name) is None:
                    write_whole(self._path(name, MANIFEST), manifest.encode())
                return Assembly(
                    self.folder,
                    manifest,
                    on_close=lambda: self._end_assembly(name),
                    on_finish=lambda: self._open_finished(name),
                    stop=stop,
                )
        except BaseException:
            self._end_assembly(name)
            raise

    def remove(self, manifest_digest: str) -> None:
        """Remove a version that is neither open nor being assembled; WeightsError if it is."""
        with self._lock:
            if self._in_use(manifest_digest):
                raise WeightsError(f"version {manifest_digest[:12]} is in use: close it first")
            self._remove(manifest_digest)

    def evict(self, bytes_needed: int, *, keep: Collection[str] = ()) -> list[str]:
        """Remove versions that are not in use until `bytes_needed` fit; return those removed.

        It may not be enough: compare `bytes_used` with `bytes_max`.
        """
        evicted = []
        with self._lock:
            sizes = self._sizes()
            for manifest_digest in sorted(sizes, key=self._last_opened):
                if sum(sizes.values()) + bytes_needed <= self.bytes_max:
                    break
                if manifest_digest in keep or self._in_use(manifest_digest):
                    continue
                self._remove(manifest_digest)
                del sizes[manifest_digest]
                evicted.append(manifest_digest)
        if evicted:
            log.info("versions_evicted", manifest_digests=evicted, bytes_needed=bytes_needed)
        return evicted

    def _make_room(self, manifest: Manifest) -> None:
        name = manifest.manifest_digest
        more = manifest.num_bytes - self._sizes().get(name, 0)
        self.evict(more, keep=(name,))
        used = self.bytes_used
        if used + more > self.bytes_max:
            raise WeightsError(
                f"version {name[:12]} needs {more} more bytes; the store may hold "
                f"{self.bytes_max}, and {used} are in use: raise worker.store_bytes_max"
            )

    def _sizes(self) -> dict[str, int]:
        """manifest_digest -> bytes on disk or reserved, without the small files."""
        sizes = dict(self._assembling)
        for manifest_digest, suffixes in version_files(self.folder).items():
            for suffix in suffixes & {BIN, PARTIAL}:
                with contextlib.suppress(FileNotFoundError):  # renamed just now
                    size = self._path(manifest_digest, suffix).stat().st_size
                    sizes[manifest_digest] = max(size, sizes.get(manifest_digest, 0))
        return sizes

    def _last_opened(self, manifest_digest: str) -> int:
        """Partial ones come before all others: nobody can use them as they are."""
        with contextlib.suppress(FileNotFoundError):
            return self._path(manifest_digest, BIN).stat().st_mtime_ns
        return 0

    def _in_use(self, manifest_digest: str) -> bool:
        return manifest_digest in self._assembling or self._open[manifest_digest] > 0

    def _remove(self, manifest_digest: str) -> None:
        self._verified.discard(manifest_digest)
        with disk_errors("removing a version", self.folder):
            remove_version(self.folder, manifest_digest)

    def _open_counted(self, manifest_digest: str) -> StoredVersion | None:
        """Counted before the files are looked at, so that they are not evicted meanwhile."""
        with self._lock:
            self._open[manifest_digest] += 1
        version = None
        try:
            version = open_version(
                self.folder, manifest_digest, on_close=lambda: self._uncount(manifest_digest)
            )
        finally:
            if version is None:
                self._uncount(manifest_digest)
        return version

    def _uncount(self, manifest_digest: str) -> None:
        with self._lock:
            self._open[manifest_digest] -= 1
            if not self._open[manifest_digest]:
                del self._open[manifest_digest]

    def _open_finished(self, manifest_digest: str) -> StoredVersion:
        self._verified.add(manifest_digest)
        version = self._open_counted(manifest_digest)
        if version is None:
            raise WeightsError(
                f"version {manifest_digest[:12]} vanished from {self.folder} as it was completed: "
                "nobody else may write there"
            )
        return version

    def _end_assembly(self, manifest_digest: str) -> None:
        with self._lock:
            self._assembling.pop(manifest_digest, None)

    def _path(self, manifest_digest: str, suffix: str) -> Path:
        return self.folder / (manifest_digest + suffix)
