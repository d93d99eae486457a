"""Versions and assets on this worker's disk: fetched, kept open while needed, removed after.

One task per manifest; the base of an adapter comes, and stays, with it. A fetch that is
cancelled reports nothing; what it verified stays in the store, so the next one goes on there.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import structlog
import zmq.asyncio

from echo2.core import worker_events as events
from echo2.errors import ConfigError, WeightsError
from echo2.messages import STORED_MAX
from echo2.net.relay import Relay
from echo2.net.tasks import OwnedTasks
from echo2.types import RelayPeer
from echo2.weights.adapter import adapter_base
from echo2.weights.delta import BASE_KEY, apply_delta
from echo2.weights.delta_layout import KINDS as DELTA_KINDS
from echo2.weights.store import ChunkStore, StoredVersion, read_assets
from echo2.weights.threads import in_thread
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
        relay_bind: str,
        uplink_mbit: float,
        post: Callable[[events.Event], None],
    ) -> None:
        self.folder = identity.folder / "store"
        self.assets: Path | None = None
        self._assets_folder = identity.folder / "assets"
        self._timeout_s = timeout_s
        self._post = post
        self._store = ChunkStore(self.folder, bytes_max)
        self._relay = Relay(
            context,
            self._store,
            keys=identity.keys,
            name=identity.name,
            bind=relay_bind,
            uplink_mbit=uplink_mbit,
        )
        self._tasks = OwnedTasks("downloads")
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._stored: dict[str, StoredVersion] = {}
        self._deltas: dict[str, list[str]] = {}
        """Deltas that were fetched for a version, by its manifest."""

    async def start(self) -> str:
        """Where the relay listens now; "" if it does not. ConfigError when it cannot."""
        await self._relay.start()
        self._tasks.start(self._relay.wait(), name="relay")
        return self._relay.endpoint

    async def wait(self) -> None:
        """Until closed; raises what crashed."""
        await self._tasks.wait()

    def stored(self) -> tuple[str, ...]:
        """Manifests of complete versions on the disk that a delta may start from, the last
        used first. Reads the disk."""
        return self._store.complete(DELTA_KINDS, most=STORED_MAX)

    def set_peers(self, peers: Iterable[RelayPeer]) -> None:
        try:
            self._relay.set_peers(peers)
        except ConfigError as error:
            log.warning("relay_peers_ignored", reason=str(error))

    def progress(self) -> Iterator[events.FetchProgress]:
        """How far each fetch under way is, once its size is known."""
        for digest, progress in self._relay.progress.items():
            if progress.num_chunks:
                missing = progress.num_chunks - progress.num_have
                links = self._relay.links(digest)
                yield events.FetchProgress(digest, progress.num_chunks, missing, links)

    def fetch(self, fetch: events.Fetch) -> None:
        digest = fetch.manifest_digest
        self._relay.serve(fetch.serves)
        coroutine = self._fetch(fetch, self._fetches.get(digest))
        task = self._fetches[digest] = self._tasks.start(coroutine, name="fetch")

        def ended(task: asyncio.Task[None]) -> None:
            if self._fetches.get(digest) is task:
                del self._fetches[digest]

        task.add_done_callback(ended)

    async def fetch_assets(self, digest: str, origin: str, origin_key: str) -> StoredVersion:
        """A version of kind assets, kept until `keep` is told that it is needed no more. For
        nodes whose assets change with the version. Raises WeightsError."""
        stored = await self._relay.fetch(digest, origin, origin_key, timeout_s=self._timeout_s)
        return self._keep_open(digest, stored)

    def cancel(self, manifest_digest: str) -> None:
        fetch = self._fetches.get(manifest_digest)
        if fetch is not None:
            fetch.cancel()

    def keep(self, manifest_digests: frozenset[str]) -> None:
        """Close and remove what no install or rollback can need any more."""
        for digest in [target for target in self._deltas if target not in manifest_digests]:
            self._tasks.start(self._remove(self._deltas.pop(digest)), name="remove_deltas")
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
            await self._relay.close()
            for stored in self._stored.values():
                stored.close()

    async def _fetch(self, fetch: events.Fetch, before: asyncio.Task[None] | None) -> None:
        """`before` is an earlier one of the same manifest that was cancelled."""
        if before is not None:
            await asyncio.gather(before, return_exceptions=True)
        digest = fetch.manifest_digest
        began = time.monotonic()
        try:
            stored = await self._bring_by_deltas(fetch) or await self._bring(digest, fetch)
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
            fetched = self._deltas.get(digest, [digest])[-1]
            num_chunks, links = self._num_chunks(fetched), self._relay.links(fetched)
            fetch_s = time.monotonic() - began
            self._post(events.FetchDone(digest, fetch_s, fetched, num_chunks, links))

    def _num_chunks(self, digest: str) -> int:
        manifest = self._store.manifest(digest)
        return 0 if manifest is None else manifest.num_chunks

    async def _bring_by_deltas(self, fetch: events.Fetch) -> StoredVersion | None:
        """The version, made of what is here and the deltas of its path; None when that fails:
        then it is fetched whole. The deltas stay as long as it does: others ask for them."""
        if not fetch.path or self._store.has(fetch.manifest_digest):
            return None
        self._deltas[fetch.manifest_digest] = list(fetch.path)
        stop = threading.Event()
        made: StoredVersion | None = None
        try:
            for digest in fetch.path:
                is_last = digest == fetch.path[-1]
                delta = await self._fetch_artifact(digest, fetch, planned=is_last)
                with delta:
                    step = partial(self._apply, delta, made, stop)
                    made = await in_thread(stop, step)
            assert made is not None
            if made.manifest.manifest_digest != fetch.manifest_digest:
                raise WeightsError(
                    f"the deltas lead to {made.manifest.manifest_digest[:12]}, not to "
                    f"{fetch.manifest_digest[:12]}"
                )
        except WeightsError as error:
            log.warning("delta_failed", manifest_digest=fetch.manifest_digest, reason=str(error))
            if made is not None:
                made.close()
            del self._deltas[fetch.manifest_digest]
            self._tasks.start(self._remove(list(fetch.path)), name="remove_deltas")
            return None
        self._relay.made(fetch.manifest_digest)
        return self._keep_open(fetch.manifest_digest, made)

    def _apply(
        self, delta: StoredVersion, made: StoredVersion | None, stop: threading.Event
    ) -> StoredVersion:
        """What `delta` makes of `made`, or of what is in the store. In a thread."""
        base = made
        digest = delta.manifest.metadata.get(BASE_KEY, "")
        if base is None or base.manifest.manifest_digest != digest:
            base = self._store.open(digest, verify=True, stop=stop)
        if base is None:
            raise WeightsError(f"version {digest[:12]}, which the delta needs, is not here")
        with base:
            return apply_delta(self._store, delta, base, stop=stop)

    async def _bring(self, digest: str, fetch: events.Fetch) -> StoredVersion:
        planned = digest == fetch.manifest_digest and not fetch.path
        return self._keep_open(digest, await self._fetch_artifact(digest, fetch, planned=planned))

    async def _fetch_artifact(
        self, digest: str, fetch: events.Fetch, *, planned: bool
    ) -> StoredVersion:
        return await self._relay.fetch(
            digest,
            fetch.origin,
            fetch.origin_key,
            timeout_s=self._timeout_s,
            stripes=fetch.stripes if planned else (),
            planned_s=fetch.planned_s if planned else 0.0,
        )

    def _keep_open(self, digest: str, stored: StoredVersion) -> StoredVersion:
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
