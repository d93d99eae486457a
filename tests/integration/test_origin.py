"""A real origin, real sockets, CURVE: versions arrive bit-identical, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from echo2.config import Config, NetTable
from echo2.errors import WeightsError
from echo2.messages import (
    Chunk,
    ChunksRefused,
    ChunksRequest,
    Lane,
    ManifestReply,
    Message,
    Role,
)
from echo2.net.auth import AllowList, Authenticator, KeyPair, load_or_create_key
from echo2.net.relay import Relay
from echo2.net.router import Router
from echo2.net.sockets import close_context, make_context
from echo2.net.version_fetch import FetchLimits
from echo2.types import PeerId
from echo2.weights.origin import Origin
from echo2.weights.snapshot import Manifest
from echo2.weights.store import ChunkStore, open_version, prune, write_version

DEADLINE_S = 60.0
CHUNK_BYTES = 1 << 14
NUM_CHUNKS = 40
STORE_BYTES_MAX = 1 << 30

CHILD = """
import asyncio, sys
from pathlib import Path
from echo2.net.auth import load_or_create_key
from echo2.net.sockets import make_context
from echo2.net.relay import Relay
from echo2.weights.store import ChunkStore

async def main(store, key, digest, origin, origin_key):
    keys = load_or_create_key(Path(key))
    store = ChunkStore(Path(store), 1 << 30)
    async with Relay(make_context(), store, keys=keys, name="w-1") as relay:
        await relay.fetch(digest, origin, origin_key, timeout_s=600)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder in which w-1 is allowed."""
    folder = tmp_path / "run"
    worker = load_or_create_key(tmp_path / "w-1.key")
    AllowList(folder / "keys" / "authorized").authorize("w-1", worker.public)
    return folder


@pytest.fixture
def worker_keys(tmp_path: Path, run_dir: Path) -> KeyPair:
    return load_or_create_key(tmp_path / "w-1.key")


@pytest.fixture
def version(run_dir: Path) -> Manifest:
    content = random.Random(1).randbytes(NUM_CHUNKS * CHUNK_BYTES - 100)
    return write_version(
        run_dir / "versions",
        [("weight", "U8", (len(content),), content)],
        metadata={"version": "1.0"},
        chunk_bytes=CHUNK_BYTES,
    )


@pytest.fixture
def store(tmp_path: Path) -> ChunkStore:
    return ChunkStore(tmp_path / "store", STORE_BYTES_MAX)


@contextlib.contextmanager
def origin_process(run_dir: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    config = tmp_path / "config.toml"
    config.write_text('[net]\nhost = "127.0.0.1"\n')
    command = [sys.executable, "-m", "echo2.weights.origin", str(config), "--run-dir", str(run_dir)]
    with open(tmp_path / "origin.log", "ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=DEADLINE_S)


@contextlib.contextmanager
def fetching_process(
    folder: Path, manifest_digest: str, origin: ScriptedOrigin
) -> Iterator[subprocess.Popen[bytes]]:
    """Fetches into folder/store with the key of w-1 until it is killed."""
    arguments = [str(folder / "store"), str(folder / "w-1.key"), manifest_digest]
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments, origin.endpoint, origin.public_key]
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=DEADLINE_S)


def open_files(pid: int) -> list[str]:
    folder = f"/proc/{pid}/fd"
    return [os.readlink(f"{folder}/{name}") for name in os.listdir(folder)]


async def until(condition: Callable[[], Any], what: str) -> Any:
    """What another process must do before the deadline."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while not (value := condition()):
        assert asyncio.get_running_loop().time() < deadline, f"waited too long for: {what}"
        await asyncio.sleep(0.02)
    return value


async def record_of(process: subprocess.Popen[bytes], run_dir: Path) -> dict[str, Any]:
    """What the origin writes when it listens."""

    def read() -> dict[str, Any] | None:
        assert process.poll() is None, "the origin ended"
        with contextlib.suppress(FileNotFoundError):
            record: dict[str, Any] = json.loads((run_dir / "origin.json").read_text())
            return record if record["pid"] == process.pid else None
        return None

    return await until(read, "origin.json")  # type: ignore[no-any-return]


@contextlib.asynccontextmanager
async def a_context() -> AsyncIterator[zmq.asyncio.Context]:
    context = make_context()
    try:
        yield context
    finally:
        await close_context(context)


@contextlib.asynccontextmanager
async def a_fetcher(store: ChunkStore, keys: KeyPair | None, **limits: Any) -> AsyncIterator[Relay]:
    async with (
        a_context() as context,
        Relay(context, store, keys=keys, name="w-1", limits=FetchLimits(**limits)) as fetcher,
    ):
        yield fetcher


class ScriptedOrigin:
    """An origin in this process whose replies a test may change; counts what it is asked."""

    def __init__(self, folder: Path, change: Callable[[Message], Message | None]) -> None:
        self.folder = folder
        self.change = change
        self.asked: Counter[int] = Counter()
        self.num_manifests_asked = 0
        self.router: Router
        self.public_key = ""

    @property
    def endpoint(self) -> str:
        return self.router.endpoint

    def handle(self, peer: PeerId, message: Message) -> None:
        digest: str = message.manifest_digest  # type: ignore[attr-defined]
        stored = open_version(self.folder, digest)
        if stored is None:
            self._reply(peer, ChunksRefused(manifest_digest=digest, reason="not here"))
            return
        with stored:
            if isinstance(message, ChunksRequest):
                for index in message.indexes:
                    self.asked[index] += 1
                    payload = stored.read(index)
                    chunk = Chunk(manifest_digest=digest, index=index, payload=payload)
                    self._reply(peer, chunk)
            else:
                self.num_manifests_asked += 1
                encoded = stored.manifest.encode()
                self._reply(peer, ManifestReply(manifest_digest=digest, manifest=encoded))

    def _reply(self, peer: PeerId, message: Message) -> None:
        changed = self.change(message)
        if changed is not None:
            assert self.router.send(peer, changed)


@contextlib.asynccontextmanager
async def a_scripted_origin(
    run_dir: Path, change: Callable[[Message], Message | None] = lambda message: message
) -> AsyncIterator[ScriptedOrigin]:
    keys = load_or_create_key(run_dir / "keys" / "origin.key")
    origin = ScriptedOrigin(run_dir / "versions", change)
    origin.public_key = keys.public
    async with a_context() as context:
        authenticator = Authenticator(context, AllowList(run_dir / "keys" / "authorized"))
        await authenticator.start()
        origin.router = Router(
            context,
            lane=Lane.CHUNKS,
            role=Role.ORIGIN,
            bind="tcp://127.0.0.1:*",
            keys=keys,
            on_message=origin.handle,
        )
        await origin.router.start()
        try:
            yield origin
        finally:
            await origin.router.stop(flush_s=0.0)
            await authenticator.stop()


def same_bytes(run_dir: Path, store: ChunkStore, manifest: Manifest) -> bool:
    name = f"{manifest.manifest_digest}.bin"
    return (run_dir / "versions" / name).read_bytes() == (store.folder / name).read_bytes()


def test_a_version_comes_bit_identical_from_an_origin_process(
    run_dir: Path, tmp_path: Path, version: Manifest, store: ChunkStore, worker_keys: KeyPair
) -> None:
    async def scenario(process: subprocess.Popen[bytes]) -> None:
        origin = await record_of(process, run_dir)
        assert origin["public_key"] == load_or_create_key(run_dir / "keys" / "origin.key").public
        async with a_fetcher(store, worker_keys) as fetcher:
            fetched = await fetcher.fetch(
                version.manifest_digest,
                origin["endpoint"],
                origin["public_key"],
                timeout_s=DEADLINE_S,
            )
            with fetched:
                assert fetched.manifest == version
                assert same_bytes(run_dir, store, version)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, DEADLINE_S) == 0
            # It is here now, so the origin is not needed.
            again = await fetcher.fetch(
                version.manifest_digest, origin["endpoint"], origin["public_key"], timeout_s=5.0
            )
            again.close()
            assert fetcher.progress == {}

    with origin_process(run_dir, tmp_path) as process:
        asyncio.run(scenario(process))


def test_a_fetch_goes_on_when_its_origin_is_killed_and_started_again(
    run_dir: Path, tmp_path: Path, version: Manifest, store: ChunkStore, worker_keys: KeyPair
) -> None:
    async def scenario() -> None:
        with origin_process(run_dir, tmp_path) as first:
            before = await record_of(first, run_dir)
            first.send_signal(signal.SIGSTOP)
            async with a_fetcher(store, worker_keys) as fetcher:
                fetching = asyncio.create_task(
                    fetcher.fetch(
                        version.manifest_digest,
                        before["endpoint"],
                        before["public_key"],
                        timeout_s=DEADLINE_S,
                    )
                )
                await until(lambda: version.manifest_digest in fetcher.progress, "the fetch")
                first.kill()
                await asyncio.to_thread(first.wait, DEADLINE_S)
                with origin_process(run_dir, tmp_path) as second:
                    after = await record_of(second, run_dir)
                    assert after["endpoint"] == before["endpoint"]
                    assert after["public_key"] == before["public_key"]
                    (await fetching).close()
        assert same_bytes(run_dir, store, version)

    asyncio.run(scenario())


@pytest.mark.parametrize("curve", [True, False])
def test_an_origin_can_be_embedded_in_a_process_that_has_an_authenticator(
    run_dir: Path, version: Manifest, store: ChunkStore, worker_keys: KeyPair, curve: bool
) -> None:
    async def scenario() -> None:
        async with a_context() as context:
            authenticator = Authenticator(context, AllowList(run_dir / "keys" / "authorized"))
            await authenticator.start()
            origin = Origin(context, Config(net=NetTable(curve=curve)), run_dir)
            await origin.start()
            try:
                async with a_fetcher(store, worker_keys if curve else None) as fetcher:
                    fetched = await fetcher.fetch(
                        version.manifest_digest,
                        origin.endpoint,
                        origin.public_key,
                        timeout_s=DEADLINE_S,
                    )
                    fetched.close()
            finally:
                await origin.stop()
            assert Authenticator.of(context) is authenticator
            await authenticator.stop()
        assert same_bytes(run_dir, store, version)

    asyncio.run(scenario())


def test_an_origin_whose_old_port_is_taken_listens_on_another(
    run_dir: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with a_scripted_origin(run_dir) as other:
            (run_dir / "origin.json").write_text(
                json.dumps({"endpoint": other.endpoint, "public_key": "", "pid": 0})
            )
            with origin_process(run_dir, tmp_path) as process:
                record = await record_of(process, run_dir)
                assert record["endpoint"] != other.endpoint

    asyncio.run(scenario())


def test_a_removed_version_is_refused_and_its_disk_space_is_free(
    run_dir: Path, tmp_path: Path, version: Manifest, store: ChunkStore, worker_keys: KeyPair
) -> None:
    async def scenario() -> None:
        with origin_process(run_dir, tmp_path) as process:
            origin = await record_of(process, run_dir)
            async with a_fetcher(store, worker_keys) as fetcher:

                async def fetch() -> None:
                    fetched = await fetcher.fetch(
                        version.manifest_digest,
                        origin["endpoint"],
                        origin["public_key"],
                        timeout_s=DEADLINE_S,
                    )
                    fetched.close()

                await fetch()
                store.remove(version.manifest_digest)
                prune(run_dir / "versions", keep=set())
                with pytest.raises(WeightsError, match=r"refuses version .* not here \(any more\)"):
                    await fetch()
            if sys.platform == "linux":
                assert not any(".bin" in target for target in open_files(process.pid))

    asyncio.run(scenario())


def test_a_killed_fetch_resumes_and_asks_only_for_what_is_missing(
    run_dir: Path, tmp_path: Path, version: Manifest, worker_keys: KeyPair
) -> None:
    num_before = 15
    num_sent = 0

    def some(message: Message) -> Message | None:
        nonlocal num_sent
        if isinstance(message, Chunk):
            num_sent += 1
        return message if num_sent <= num_before else None

    def num_here() -> int:
        bitmap = tmp_path / "store" / f"{version.manifest_digest}.have"
        return sum(map(int.bit_count, bitmap.read_bytes())) if bitmap.exists() else 0

    async def scenario() -> None:
        async with a_scripted_origin(run_dir, some) as origin:
            with fetching_process(tmp_path, version.manifest_digest, origin):
                await until(lambda: num_here() == num_before, "half of the chunks")
            origin.asked.clear()
            origin.num_manifests_asked = 0
            origin.change = lambda message: message
            store = ChunkStore(tmp_path / "store", STORE_BYTES_MAX)
            async with a_fetcher(store, worker_keys) as fetcher:
                fetched = await fetcher.fetch(
                    version.manifest_digest,
                    origin.endpoint,
                    origin.public_key,
                    timeout_s=DEADLINE_S,
                )
                fetched.close()
            assert same_bytes(run_dir, store, version)
            assert origin.num_manifests_asked == 0
            assert len(origin.asked) == NUM_CHUNKS - num_before
            assert set(origin.asked.values()) == {1}

    asyncio.run(scenario())


def test_a_cancelled_fetch_keeps_what_it_verified(
    run_dir: Path, version: Manifest, store: ChunkStore, worker_keys: KeyPair
) -> None:
    async def scenario() -> None:
        def first_ten(message: Message) -> Message | None:
            return message if not isinstance(message, Chunk) or message.index < 10 else None

        async with a_scripted_origin(run_dir, first_ten) as origin:
            async with a_fetcher(store, worker_keys) as fetcher:
                fetching = asyncio.create_task(
                    fetcher.fetch(
                        version.manifest_digest,
                        origin.endpoint,
                        origin.public_key,
                        timeout_s=DEADLINE_S,
                    )
                )

                def num_have() -> int:
                    progress = fetcher.progress.get(version.manifest_digest)
                    return progress.num_have if progress is not None else 0

                await until(lambda: num_have() == 10, "ten chunks")
                fetching.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await fetching
                assert fetcher.progress == {}
                # Nothing holds it any more.
                assembly = store.begin(version)
                assert assembly.missing() == list(range(10, NUM_CHUNKS))
                assembly.close()

                origin.asked.clear()
                origin.change = lambda message: message
                (
                    await fetcher.fetch(
                        version.manifest_digest,
                        origin.endpoint,
                        origin.public_key,
                        timeout_s=DEADLINE_S,
                    )
                ).close()
            assert sorted(origin.asked) == list(range(10, NUM_CHUNKS))

    asyncio.run(scenario())


def test_two_versions_come_over_one_connection_at_once(
    run_dir: Path, version: Manifest, store: ChunkStore, worker_keys: KeyPair
) -> None:
    other = write_version(run_dir / "versions", [("t", "U8", (9,), b"different")])

    async def scenario() -> None:
        async with (
            a_scripted_origin(run_dir) as origin,
            a_fetcher(store, worker_keys) as fetcher,
        ):
            fetched = await asyncio.gather(
                *(
                    fetcher.fetch(
                        manifest.manifest_digest,
                        origin.endpoint,
                        origin.public_key,
                        timeout_s=DEADLINE_S,
                    )
                    for manifest in (version, other)
                )
            )
            for one in fetched:
                one.close()
            assert len(origin.router.peers()) == 1
        assert same_bytes(run_dir, store, version)
        assert same_bytes(run_dir, store, other)

    asyncio.run(scenario())


def test_a_chunk_that_is_wrong_once_is_asked_for_again(
    run_dir: Path, version: Manifest, store: ChunkStore, worker_keys: KeyPair
) -> None:
    lied = False

    def lie_once(message: Message) -> Message | None:
        nonlocal lied
        if isinstance(message, Chunk) and message.index == 7 and not lied:
            lied = True
            return Chunk(
                manifest_digest=message.manifest_digest,
                index=7,
                payload=b"\0" + message.payload[1:],
            )
        return message

    async def scenario() -> None:
        async with (
            a_scripted_origin(run_dir, lie_once) as origin,
            a_fetcher(store, worker_keys) as fetcher,
        ):
            fetched = await fetcher.fetch(
                version.manifest_digest, origin.endpoint, origin.public_key, timeout_s=DEADLINE_S
            )
            fetched.close()
            assert origin.asked[7] == 2
        assert same_bytes(run_dir, store, version)

    asyncio.run(scenario())


def swapped(message: Message) -> Message | None:
    """The bytes of one chunk under the index of another."""
    if isinstance(message, Chunk) and message.index < 2:
        return Chunk(
            manifest_digest=message.manifest_digest,
            index=1 - message.index,
            payload=message.payload,
        )
    return message


def cut(message: Message) -> Message | None:
    if isinstance(message, Chunk) and message.index == 3:
        return Chunk(manifest_digest=message.manifest_digest, index=3, payload=message.payload[:-1])
    return message


def other_manifest(message: Message) -> Message | None:
    if isinstance(message, ManifestReply):
        return ManifestReply(
            manifest_digest=message.manifest_digest, manifest=message.manifest[:-1] + b"!"
        )
    return message


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (swapped, r"sent a wrong chunk 3 times: chunk [01] .* does not have the digest"),
        (cut, r"sent a wrong chunk 3 times: chunk 3 .* has 16383 bytes"),
        (other_manifest, r"sent a wrong manifest .* 3 times"),
    ],
)
def test_an_origin_that_goes_on_lying_is_named_and_nothing_is_installed(
    run_dir: Path,
    version: Manifest,
    store: ChunkStore,
    worker_keys: KeyPair,
    lie: Callable[[Message], Message | None],
    reason: str,
) -> None:
    async def scenario() -> None:
        async with (
            a_scripted_origin(run_dir, lie) as origin,
            a_fetcher(store, worker_keys) as fetcher,
        ):
            with pytest.raises(WeightsError, match=reason) as error:
                await fetcher.fetch(
                    version.manifest_digest,
                    origin.endpoint,
                    origin.public_key,
                    timeout_s=DEADLINE_S,
                )
            assert origin.endpoint in str(error.value)
        assert store.open(version.manifest_digest) is None

    asyncio.run(scenario())


def test_lost_chunks_are_asked_for_again(
    run_dir: Path, version: Manifest, store: ChunkStore, worker_keys: KeyPair
) -> None:
    lost: set[int] = set()

    def lose_some(message: Message) -> Message | None:
        if isinstance(message, Chunk) and message.index % 5 == 0 and message.index not in lost:
            lost.add(message.index)
            return None
        return message

    async def scenario() -> None:
        async with (
            a_scripted_origin(run_dir, lose_some) as origin,
            a_fetcher(
                store,
                worker_keys,
                request_timeout_s=0.2,
                silence_s=0.2,
                window_bytes=4 * CHUNK_BYTES,
            ) as fetcher,
        ):
            fetched = await fetcher.fetch(
                version.manifest_digest, origin.endpoint, origin.public_key, timeout_s=DEADLINE_S
            )
            fetched.close()
        assert len(lost) == NUM_CHUNKS // 5
        assert same_bytes(run_dir, store, version)

    asyncio.run(scenario())


def test_an_origin_that_falls_silent_ends_the_fetch_with_the_cause(
    run_dir: Path, version: Manifest, store: ChunkStore, worker_keys: KeyPair
) -> None:
    def only_five(message: Message) -> Message | None:
        return message if not isinstance(message, Chunk) or message.index < 5 else None

    async def scenario() -> None:
        async with a_scripted_origin(run_dir, only_five) as origin:
            async with a_fetcher(store, worker_keys, stall_timeout_s=3.0) as fetcher:
                with pytest.raises(
                    WeightsError, match=rf"from the origin .* for 3 s: 5 of {NUM_CHUNKS} chunks"
                ):
                    await fetcher.fetch(
                        version.manifest_digest,
                        origin.endpoint,
                        origin.public_key,
                        timeout_s=DEADLINE_S,
                    )
            async with a_fetcher(store, worker_keys) as fetcher:
                with pytest.raises(
                    WeightsError,
                    match=rf"did not arrive .* within 3 s: 5 of {NUM_CHUNKS} chunks are here",
                ):
                    await fetcher.fetch(
                        version.manifest_digest,
                        origin.endpoint,
                        origin.public_key,
                        timeout_s=3.0,
                    )

    asyncio.run(scenario())


def test_a_stranger_gets_nothing_and_is_told_why(
    run_dir: Path, tmp_path: Path, version: Manifest, store: ChunkStore
) -> None:
    async def scenario() -> None:
        stranger = load_or_create_key(tmp_path / "stranger.key")
        with origin_process(run_dir, tmp_path) as process:
            origin = await record_of(process, run_dir)
            async with a_fetcher(store, stranger, stall_timeout_s=3.0) as fetcher:
                with pytest.raises(WeightsError, match="is not in its allow-list"):
                    await fetcher.fetch(
                        version.manifest_digest,
                        origin["endpoint"],
                        origin["public_key"],
                        timeout_s=DEADLINE_S,
                    )
        assert store.manifest(version.manifest_digest) is None
        assert store.bytes_used == 0

    asyncio.run(scenario())


def test_an_impostor_with_another_key_is_not_believed(
    run_dir: Path, tmp_path: Path, version: Manifest, store: ChunkStore, worker_keys: KeyPair
) -> None:
    async def scenario() -> None:
        expected = load_or_create_key(tmp_path / "the real origin.key")
        async with (
            a_scripted_origin(run_dir) as impostor,
            a_fetcher(store, worker_keys, stall_timeout_s=1.0) as fetcher,
        ):
            with pytest.raises(WeightsError, match="no new chunk"):
                await fetcher.fetch(
                    version.manifest_digest,
                    impostor.endpoint,
                    expected.public,
                    timeout_s=DEADLINE_S,
                )
            assert not impostor.asked

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("endpoint", "key"), [("tcp://127.0.0.1", "x" * 40), ("tcp://127.0.0.1:1", "short")]
)
def test_an_origin_that_cannot_be_is_refused_at_once(
    version: Manifest, store: ChunkStore, worker_keys: KeyPair, endpoint: str, key: str
) -> None:
    async def scenario() -> None:
        async with a_fetcher(store, worker_keys) as fetcher:
            with pytest.raises(WeightsError, match="cannot be reached"):
                await fetcher.fetch(version.manifest_digest, endpoint, key, timeout_s=DEADLINE_S)

    asyncio.run(scenario())
