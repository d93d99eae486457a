"""A transfer ends complete or with its cause, whatever the line does. No sockets here."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from echo2.errors import WeightsError
from echo2.messages import Chunk, ChunksRefused, ChunksRequest, ManifestReply, Message
from echo2.weights.snapshot import Manifest
from echo2.weights.store import ChunkStore
from echo2.weights.transfer import FetchLimits, Progress, Transfer

WriteSmall = Callable[..., Manifest]
Chunks = Callable[[Path, Manifest], list[bytes]]
DEADLINE_S = 30.0


class FakeLine:
    """A line whose origin is the test: `requests` are what was asked for."""

    origin = "tcp://origin:1"

    def __init__(self) -> None:
        self.is_up = True
        self.reason = ""
        self.num_refused = 0
        self.requests: asyncio.Queue[Message] = asyncio.Queue()

    def send(self, message: Message) -> bool:
        if self.num_refused:
            self.num_refused -= 1
            return False
        self.requests.put_nowait(message)
        return True

    async def next_chunks(self) -> tuple[int, ...]:
        async with asyncio.timeout(DEADLINE_S):
            request = await self.requests.get()
        assert isinstance(request, ChunksRequest), request
        return request.indexes

    async def next_manifest(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            request = await self.requests.get()
        assert not isinstance(request, ChunksRequest), request


class Origin:
    """A published version of four chunks and a transfer of it."""

    def __init__(self, manifest: Manifest, chunks: list[bytes], store: ChunkStore) -> None:
        self.manifest = manifest
        self.name = manifest.manifest_digest
        self.chunks = chunks
        self.store = store
        self.line = FakeLine()

    def transfer(self, **limits: Any) -> Transfer:
        return Transfer(self.name, line=self.line, store=self.store, limits=FetchLimits(**limits))

    def reply(self) -> ManifestReply:
        return ManifestReply(manifest_digest=self.name, manifest=self.manifest.encode())

    def chunk(self, index: int, payload: bytes | None = None) -> Chunk:
        content = self.chunks[index] if payload is None else payload
        return Chunk(manifest_digest=self.name, index=index, payload=content)


@pytest.fixture
def origin(tmp_path: Path, write_small: WriteSmall, chunks_of: Chunks) -> Origin:
    manifest = write_small(tmp_path / "versions")
    chunks = chunks_of(tmp_path / "versions", manifest)
    return Origin(manifest, chunks, ChunkStore(tmp_path / "store", 1 << 20))


async def eventually(condition: Callable[[], object]) -> None:
    """What a thread does, before the deadline."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + DEADLINE_S
    while not condition():
        assert loop.time() < deadline, "waited too long"
        await asyncio.sleep(0.01)


def drive(
    transfer: Transfer, scenario: Callable[[], Coroutine[Any, Any, None]]
) -> asyncio.Task[Any]:
    """Run the transfer beside the scenario; returns the ended task."""

    async def run() -> asyncio.Task[Any]:
        task = asyncio.create_task(transfer.run())
        await scenario()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait({task})
        return task

    return asyncio.run(run())


def test_manifest_then_chunks_then_complete(origin: Origin) -> None:
    async def scenario() -> None:
        transfer = origin.transfer()
        task = asyncio.create_task(transfer.run())
        await origin.line.next_manifest()
        assert transfer.progress == Progress(0, 0)
        assert transfer.status() == "its manifest is not here yet"
        transfer.take(origin.reply())
        assert await origin.line.next_chunks() == (0, 1, 2, 3)
        for index in (2, 0, 3, 1):
            transfer.take(origin.chunk(index))
        with await task as version:
            assert version.path.read_bytes() == b"".join(origin.chunks)
        assert transfer.progress == Progress(4, 4)

    asyncio.run(scenario())


def test_the_window_is_a_credit_in_bytes(origin: Origin) -> None:
    async def scenario() -> None:
        transfer = origin.transfer(window_bytes=2 * 256)
        task = asyncio.create_task(transfer.run())
        await origin.line.next_manifest()
        transfer.take(origin.reply())
        assert await origin.line.next_chunks() == (0, 1)
        transfer.take(origin.chunk(3))  # not asked for
        transfer.take(origin.chunk(1))
        assert await origin.line.next_chunks() == (2,)
        transfer.take(origin.chunk(1))  # a second time
        transfer.take(origin.chunk(0))
        assert await origin.line.next_chunks() == (3,)
        transfer.take(origin.chunk(3))
        transfer.take(origin.chunk(2))
        (await task).close()
        assert transfer.num_unexpected == 2

    asyncio.run(scenario())


def test_after_a_lost_connection_only_the_rest_is_asked_for(origin: Origin) -> None:
    async def scenario() -> None:
        transfer = origin.transfer()
        task = asyncio.create_task(transfer.run())
        await origin.line.next_manifest()
        origin.line.is_up = False
        transfer.line_changed()
        origin.line.is_up = True
        transfer.line_changed()
        await origin.line.next_manifest()
        transfer.take(origin.reply())
        assert await origin.line.next_chunks() == (0, 1, 2, 3)
        transfer.take(origin.chunk(1))
        origin.line.is_up, origin.line.reason = False, "the connection was lost"
        transfer.line_changed()
        await eventually(lambda: transfer.progress.num_have == 1)
        assert transfer.status() == "1 of 4 chunks are here; the connection was lost"
        assert origin.line.requests.empty()
        origin.line.is_up = True
        transfer.line_changed()
        assert await origin.line.next_chunks() == (0, 2, 3)
        for index in (0, 2, 3):
            transfer.take(origin.chunk(index))
        (await task).close()

    asyncio.run(scenario())


def test_a_request_that_the_line_does_not_take_is_made_again(origin: Origin) -> None:
    async def scenario() -> None:
        origin.line.num_refused = 2
        transfer = origin.transfer()
        task = asyncio.create_task(transfer.run())
        await origin.line.next_manifest()
        origin.line.num_refused = 2
        transfer.take(origin.reply())
        assert await origin.line.next_chunks() == (0, 1, 2, 3)
        for index in range(4):
            transfer.take(origin.chunk(index))
        (await task).close()

    asyncio.run(scenario())


def test_a_refusal_is_the_cause(origin: Origin) -> None:
    transfer = origin.transfer()

    async def scenario() -> None:
        await origin.line.next_manifest()
        transfer.take(ChunksRefused(manifest_digest=origin.name, reason="it was removed"))

    task = drive(transfer, scenario)
    with pytest.raises(
        WeightsError, match=r"the origin tcp://origin:1 refuses version .*: it was removed"
    ):
        task.result()


def test_a_broken_line_is_the_cause(origin: Origin) -> None:
    transfer = origin.transfer()

    async def scenario() -> None:
        await origin.line.next_manifest()
        transfer.fail(RuntimeError("our own bug"))

    with pytest.raises(RuntimeError, match="our own bug"):
        drive(transfer, scenario).result()


def test_a_chunk_that_is_wrong_three_times_is_the_cause_and_the_others_stay(
    origin: Origin,
) -> None:
    transfer = origin.transfer()

    async def scenario() -> None:
        await origin.line.next_manifest()
        transfer.take(origin.reply())
        assert await origin.line.next_chunks() == (0, 1, 2, 3)
        transfer.take(origin.chunk(0))
        transfer.take(origin.chunk(2, b"\0" * 256))
        for _ in range(2):
            assert await origin.line.next_chunks() == (2,)
            transfer.take(origin.chunk(2, b"\0" * 256))

    task = drive(transfer, scenario)
    with pytest.raises(WeightsError, match="sent a wrong chunk 3 times: chunk 2 of version"):
        task.result()
    assembly = origin.store.begin(origin.manifest)
    assert assembly.missing() == [1, 2, 3]
    assembly.close()


def test_a_full_disk_is_the_cause(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, start: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    transfer = origin.transfer()

    async def scenario() -> None:
        await origin.line.next_manifest()
        transfer.take(origin.reply())

    with pytest.raises(WeightsError, match=r"reserving 1000 bytes .* is full"):
        drive(transfer, scenario).result()


def test_silence_is_the_cause_in_the_end(origin: Origin) -> None:
    transfer = origin.transfer(stall_timeout_s=0.05)
    origin.line.is_up, origin.line.reason = False, "nothing answers there"

    async def scenario() -> None:
        pass

    with pytest.raises(
        WeightsError,
        match=r"from the origin tcp://origin:1 for 0\.05 s: .* not here yet; nothing answers there",
    ):
        drive(transfer, scenario).result()


@pytest.mark.parametrize("num_arrived", [0, 2])
def test_a_cancelled_transfer_lets_go_and_keeps_its_chunks(
    origin: Origin, num_arrived: int
) -> None:
    async def scenario() -> None:
        transfer = origin.transfer()
        task = asyncio.create_task(transfer.run())
        await origin.line.next_manifest()
        transfer.take(origin.reply())
        await origin.line.next_chunks()
        for index in range(num_arrived):
            transfer.take(origin.chunk(index))
        await eventually(lambda: transfer.progress.num_have == num_arrived)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assembly = origin.store.begin(origin.manifest)
        assert assembly.num_have == num_arrived
        assembly.close()

    asyncio.run(scenario())
