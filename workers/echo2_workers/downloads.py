"""Versions and assets on this worker's disk: fetched, kept open while needed, removed after.

One task per manifest; the base of an adapter comes, and stays, with it. A fetch that is
cancelled reports nothing; what it verified stays in the store, so the next one goes on there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog
import zmq.asyncio

from echo2.core import worker_events as events
from echo2.errors import WeightsError
from echo2.net.tasks import OwnedTasks
from echo2.weights.adapter import adapter_base
from echo2.weights.fetch import Fetcher
from echo2.weights.store import ChunkStore, StoredVersion, read_assets
from echo2_workers.identity import Identity

log = structlog.get_logger(__name__)


class Downloads:
    """`post` takes FetchDone and FetchFailed. `assets` is the folder of the run's assets,
    once they are here; `folder` that of the store."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        identity: Identity,
        *,
        bytes_max: int,
        timeout_s: float,
        post: Callable[[events.Event], None],
    ) -> None:
        self.folder = identity.folder / "store"
        self.assets: Path | None = None
        self._assets_folder = identity.folder / "assets"
        self._timeout_s = timeout_s
        self._post = post
        self._store = ChunkStore(self.folder, bytes_max)
        self._fetcher = Fetcher(context, self._store, keys=identity.keys, name=identity.name)
        self._tasks = OwnedTasks("downloads")
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._stored: dict[str, StoredVersion] = {}

    async def wait(self) -> None:
        """Until closed; raises what crashed."""
        await self._tasks.wait()

    def progress(self) -> Iterator[events.FetchProgress]:
        """How far each fetch under way is, once its size is known."""
        for manifest_digest, progress in self._fetcher.progress.items():
            if progress.num_chunks:
                share = progress.num_have / progress.num_chunks
                yield events.FetchProgress(manifest_digest, share)

    def fetch(self, fetch: events.Fetch) -> None:
        digest = fetch.manifest_digest
        coroutine = self._fetch(fetch, self._fetches.get(digest))
        task = self._fetches[digest] = self._tasks.start(coroutine, name="fetch")

        def ended(task: asyncio.Task[None]) -> None:
            if self._fetches.get(digest) is task:
                del self._fetches[digest]

        task.add_done_callback(ended)

    def cancel(self, manifest_digest: str) -> None:
        fetch = self._fetches.get(manifest_digest)
        if fetch is not None:
            fetch.cancel()

    def keep(self, manifest_digests: frozenset[str]) -> None:
        """Close and remove what no install or rollback can need any more."""
        bases = [adapter_base(v.manifest) for d, v in self._stored.items() if d in manifest_digests]
        needed = manifest_digests | {base.manifest_digest for base in bases if base is not None}
        unneeded = [digest for digest in self._stored if digest not in needed]
        for digest in unneeded:
            self._stored.pop(digest).close()
        if unneeded:
            self._tasks.start(self._remove(unneeded), name="remove")

    async def close(self) -> None:
        """End the fetches; what is complete or verified stays on the disk."""
        try:
            await self._tasks.stop()
        finally:
            await self._fetcher.close()
            for stored in self._stored.values():
                stored.close()

    async def _fetch(self, fetch: events.Fetch, before: asyncio.Task[None] | None) -> None:
        """`before` is an earlier one of the same manifest that was cancelled."""
        if before is not None:
            await asyncio.gather(before, return_exceptions=True)
        digest = fetch.manifest_digest
        began = time.monotonic()
        try:
            stored = await self._bring(digest, fetch)
            base = adapter_base(stored.manifest)
            if base is not None and base.manifest_digest not in self._stored:
                await self._bring(base.manifest_digest, fetch)
            if fetch.version is None:
                folder = self._assets_folder / digest[:16]
                await asyncio.to_thread(read_assets, stored, folder)
                self.assets = folder
        except WeightsError as error:
            self._post(events.FetchFailed(digest, str(error)))
        else:
            self._post(events.FetchDone(digest, time.monotonic() - began))

    async def _bring(self, digest: str, fetch: events.Fetch) -> StoredVersion:
        stored = await self._fetcher.fetch(
            digest, fetch.origin, fetch.origin_key, timeout_s=self._timeout_s
        )
        older = self._stored.pop(digest, None)
        if older is not None:
            older.close()
        self._stored[digest] = stored
        return stored

    async def _remove(self, manifest_digests: list[str]) -> None:
        for digest in manifest_digests:
            try:
                await asyncio.to_thread(self._store.remove, digest)
            except WeightsError as error:  # the store evicts it when it needs the room
                log.warning("version_not_removed", manifest_digest=digest, reason=str(error))
