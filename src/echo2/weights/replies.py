"""Replies to requests, read where the bytes are: in a version, or in one on its way here.

Promise: a reply is the bytes as they were verified or published, or the reason why there are
none; readings are in one thread, a batch at a time; the RECENT_MAX chunks that came or were
read last are kept, since children of one tree want the same chunk within a moment. To whom
replies go, and when, decides `weights.serving`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from echo2.errors import WeightsError
from echo2.messages import Chunk, ManifestReply
from echo2.weights.assembly import Assembly
from echo2.weights.files import BIN
from echo2.weights.open_versions import OpenVersions
from echo2.weights.snapshot import Manifest

log = structlog.get_logger(__name__)

MANIFEST: Final = -1
"""Stands for the manifest among a version's chunk indexes: before all chunks."""
RECENT_MAX: Final = 32

Key = tuple[str, int]
"""(manifest digest, chunk index)."""
Reply = ManifestReply | Chunk


@dataclass(frozen=True, slots=True)
class Absent:
    """Why there is no reply; whether anything of the version is here."""

    reason: str
    is_known: bool


class Replies:
    """From the versions in `folder`, and from those that `begin` to come."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._versions = OpenVersions(folder)
        self._assemblies: dict[str, Assembly] = {}
        self._recent: OrderedDict[Key, Chunk] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chunks")

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
        self._versions.close()

    def begins(self, assembly: Assembly) -> None:
        self._assemblies[assembly.manifest.manifest_digest] = assembly

    def ends(self, manifest_digest: str) -> None:
        self._assemblies.pop(manifest_digest, None)

    def coming(self, manifest_digest: str) -> Manifest | None:
        """The manifest of a version that is on its way here."""
        assembly = self._assemblies.get(manifest_digest)
        return None if assembly is None else assembly.manifest

    def has(self, manifest_digest: str, index: int) -> bool:
        """False only for what is still on its way."""
        assembly = self._assemblies.get(manifest_digest)
        return assembly is None or index == MANIFEST or assembly.has(index)

    def is_whole(self, manifest_digest: str) -> bool:
        """Is all of the version on the disk?"""
        return (self._folder / f"{manifest_digest}{BIN}").exists()

    def keep(self, chunk: Chunk) -> None:
        """A verified chunk, which somebody will want in a moment."""
        self._recent[chunk.manifest_digest, chunk.index] = chunk
        while len(self._recent) > RECENT_MAX:
            self._recent.popitem(last=False)

    async def find(self, keys: Iterable[Key]) -> dict[Key, Reply | Absent]:
        """To each key the reply; does not wait if all of them are kept."""
        found: dict[Key, Reply | Absent] = {}
        unread = []
        for key in keys:
            if key in self._recent:
                found[key] = self._recent[key]
            else:
                unread.append(key)
        if unread:
            loop = asyncio.get_running_loop()
            replies = await loop.run_in_executor(self._thread, self._read_all, unread)
            for key, reply in zip(unread, replies, strict=True):
                found[key] = reply
                if isinstance(reply, Chunk):
                    self.keep(reply)
        return found

    def sweep(self) -> None:
        """Let go of versions that were removed. May wait for the disk."""
        self._versions.sweep()

    def _read_all(self, keys: list[Key]) -> list[Reply | Absent]:
        """In a thread."""
        return [self._read(manifest_digest, index) for manifest_digest, index in keys]

    def _read(self, manifest_digest: str, index: int) -> Reply | Absent:
        assembly = self._assemblies.get(manifest_digest)
        is_known = False
        try:
            if assembly is not None:
                try:
                    return _reply(assembly.manifest, index, assembly.read)
                except WeightsError:  # it has just become complete, and the file is renamed
                    log.debug("assembly_ended", manifest_digest=manifest_digest)
            with self._versions.use(manifest_digest) as version:
                is_known = True
                return _reply(version.manifest, index, version.read)
        except (WeightsError, OSError) as error:
            return Absent(str(error) or type(error).__name__, is_known)


def _reply(manifest: Manifest, index: int, read: Callable[[int], bytes]) -> Reply:
    digest = manifest.manifest_digest
    if index == MANIFEST:
        return ManifestReply(manifest_digest=digest, manifest=manifest.encode())
    return Chunk(manifest_digest=digest, index=index, payload=read(index))
