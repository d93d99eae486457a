"""Weights: model folders, safetensors files, manifests, chunks, versions on the disk."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from bad_input import Bench, Told, a_free_port, case, run
from blake3 import blake3
from cases_folders import NULL, a_dead_pid

from echo2.embedding import _write_snapshot
from echo2.errors import Echo2Error, WeightsError
from echo2.messages import ChunksRefused, ChunksRequest, ManifestRequest, Message
from echo2.types import PeerId, Version
from echo2.weights.serving import ChunkServer
from echo2.weights.snapshot import Manifest, TensorSpec
from echo2.weights.store import ChunkStore, open_version, write_version
from echo2.weights.versions import named_manifest

CHUNK_BYTES = 256


def a_version(bench: Bench, *, num_bytes: int = 1000) -> Manifest:
    content = bytes(index % 251 for index in range(num_bytes))
    manifest = write_version(
        bench.folder / "versions",
        [("weight", "U8", (num_bytes,), content)],
        chunk_bytes=CHUNK_BYTES,
    )
    bench.hide(manifest.manifest_digest[:12], "DIGEST")
    return manifest


def weights_error(bench: Bench, by: str, call: Callable[[], object]) -> Told:
    return bench.raised(by, WeightsError, call)


# ------------------------------------------------------------------- safetensors, publish


def a_safetensors(
    header: dict[str, Any] | bytes, data: bytes = b"", *, says_bytes: int | None = None
) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if says_bytes is None else says_bytes) + encoded + data


def entry(start: int, end: int, *, dtype: str = "U8", shape: list[int] | None = None) -> Any:
    shape = [end - start] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def published(bench: Bench, **files: bytes) -> Told:
    """What echo2 publish says of a model folder with these files."""
    model = bench.folder / "model"
    model.mkdir()
    for name, content in files.items():
        (model / f"{name}.safetensors").write_bytes(content)
    return _publish(bench)


def _publish(bench: Bench, *words: object) -> Told:
    config = bench.config(*NULL)
    return bench.command(
        "publish", bench.folder / "model", config, "--run-dir", bench.run_dir, *words
    )


@case("publish of a folder that is not there")
def _(bench: Bench) -> Told:
    return _publish(bench)


@case("publish of a folder without safetensors")
def _(bench: Bench) -> Told:
    return published(bench)


@case("publish without a run folder or a configuration")
def _(bench: Bench) -> Told:
    return bench.command("publish", bench.folder)


@case("a safetensors file that was cut off")
def _(bench: Bench) -> Told:
    return published(bench, model=a_safetensors({"w": entry(0, 8)}, bytes(5)))


@case("a safetensors file without a header")
def _(bench: Bench) -> Told:
    return published(bench, model=b"\x08")


@case("a safetensors header longer than its file")
def _(bench: Bench) -> Told:
    return published(bench, model=a_safetensors({"w": entry(0, 8)}, bytes(8), says_bytes=1 << 60))


@case("a safetensors header that is no JSON")
def _(bench: Bench) -> Told:
    return published(bench, model=a_safetensors(b"{'w': 1}"))


@case("safetensors in which two tensors overlap")
def _(bench: Bench) -> Told:
    content = a_safetensors({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12))
    return published(bench, model=content)


@case("safetensors with a gap between two tensors")
def _(bench: Bench) -> Told:
    content = a_safetensors({"a": entry(0, 8), "b": entry(12, 16)}, bytes(16))
    return published(bench, model=content)


@case("safetensors with a dtype that is not known")
def _(bench: Bench) -> Told:
    content = a_safetensors({"w": entry(0, 8, dtype="Q4_K")}, bytes(8))
    return published(bench, model=content)


@case("safetensors whose shape does not fit its bytes")
def _(bench: Bench) -> Told:
    content = a_safetensors({"w": entry(0, 8, dtype="F32", shape=[3])}, bytes(8))
    return published(bench, model=content)


@case("one tensor in two safetensors files")
def _(bench: Bench) -> Told:
    content = a_safetensors({"w": entry(0, 8)}, bytes(8))
    return published(bench, one=content, two=content)


@case("an index that names a file elsewhere")
def _(bench: Bench) -> Told:
    model = bench.folder / "model"
    model.mkdir()
    index = {"weight_map": {"w": "../../etc/passwd.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return _publish(bench)


def a_model(bench: Bench) -> None:
    (bench.folder / "model").mkdir()
    path = bench.folder / "model" / "model.safetensors"
    path.write_bytes(a_safetensors({"w": entry(0, 8)}, bytes(8)))


@case("publish to a run that was not started")
def _(bench: Bench) -> Told:
    a_model(bench)
    return _publish(bench)


@case("publish to a run whose coordinator has ended")
def _(bench: Bench) -> Told:
    a_model(bench)
    bench.run_dir.mkdir()
    (bench.run_dir / "coordinator.json").write_text(json.dumps({"pid": a_dead_pid()}))
    return _publish(bench)


@case("publish to another machine from an address on this one")
def _(bench: Bench) -> Told:
    a_model(bench)
    words = ("--coordinator", "tcp://192.0.2.7:5700")
    words += ("--coordinator-rollouts", "tcp://192.0.2.7:5701", "--coordinator-key", "k" * 40)
    return _publish(bench, *words)


@case("publish to a coordinator that does not answer")
def _(bench: Bench) -> Told:
    a_model(bench)
    endpoint = f"tcp://127.0.0.1:{a_free_port()}"
    words = ("--coordinator", endpoint, "--coordinator-rollouts", endpoint)
    words += ("--coordinator-key", "k" * 40, "--set", "net.connect_timeout_s=1")
    return _publish(bench, *words)


@case("an array of a dtype that no version holds")
def _(bench: Bench) -> Told:
    def write() -> None:
        _write_snapshot(bench.folder, {"w": np.zeros(3, np.complex128)}, Version(1, 0))

    return bench.raised("LearnerError", Echo2Error, write)


# --------------------------------------------------------------------- chunks, versions


def refused_chunk(bench: Bench, index: int, payload: bytes) -> Told:
    """What the chunk store says of a chunk; it is as if it had not come."""
    manifest = a_version(bench)
    store = ChunkStore(bench.folder / "store", 1 << 20)
    assembly = store.begin(manifest)
    told = weights_error(
        bench, "fetch: asked of the next source", lambda: assembly.add(index, payload)
    )
    assert assembly.num_have == 0
    assembly.close()
    return told


@case("a chunk with another digest")
def _(bench: Bench) -> Told:
    return refused_chunk(bench, 0, bytes(CHUNK_BYTES))


@case("a chunk of another length")
def _(bench: Bench) -> Told:
    return refused_chunk(bench, 0, bytes(CHUNK_BYTES - 1))


@case("a chunk that the version does not have")
def _(bench: Bench) -> Told:
    return refused_chunk(bench, 99, bytes(CHUNK_BYTES))


def refused_request(bench: Bench, message: Message) -> Told:
    """What an origin or a relay answers."""

    async def scenario() -> Told:
        answered: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        def send(peer: PeerId, reply: Message) -> bool:
            if not answered.done():
                answered.set_result(reply)
            return True

        server = ChunkServer(
            bench.folder / "versions", send=send, credit=lambda _: 1 << 20, credit_bytes=1 << 20
        )
        server.start()
        try:
            server.handle(PeerId("w-1"), message)
            reply = await answered
        finally:
            await server.stop()
        assert isinstance(reply, ChunksRefused)
        return bench.told("`ChunksRefused`", reply.reason)

    return run(scenario())


@case("a request for a chunk that does not exist")
def _(bench: Bench) -> Told:
    manifest = a_version(bench)
    request = ChunksRequest(manifest_digest=manifest.manifest_digest, indexes=(99,))
    return refused_request(bench, request)


@case("a request for a version that is not there")
def _(bench: Bench) -> Told:
    bench.hide("d" * 12, "DIGEST")
    return refused_request(bench, ManifestRequest(manifest_digest="d" * 64))


@case("a version whose file was cut off")
def _(bench: Bench) -> Told:
    manifest = a_version(bench)
    path = bench.folder / "versions" / f"{manifest.manifest_digest}.bin"
    path.write_bytes(path.read_bytes()[:-1])
    return weights_error(bench, "log", lambda: open_version(path.parent, manifest.manifest_digest))


@case("a version with one wrong byte")
def _(bench: Bench) -> Told:
    manifest = a_version(bench)
    path = bench.folder / "versions" / f"{manifest.manifest_digest}.bin"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    bench.hide(blake3(content).hexdigest()[:12], "OTHER")
    bench.hide(manifest.digest[:12], "WHOLE")
    version = open_version(path.parent, manifest.manifest_digest)
    assert version is not None
    with version:
        return weights_error(bench, "log", version.verify)


@case("a version larger than the store")
def _(bench: Bench) -> Told:
    manifest = a_version(bench)
    store = ChunkStore(bench.folder / "store", 100)
    return weights_error(bench, "`install_failed`", lambda: store.begin(manifest))


# ------------------------------------------------------------------------- manifests


def manifest_of(*tensors: TensorSpec, kind: Any = "weights", **changes: Any) -> Manifest:
    num_bytes = max((spec.offset + spec.num_bytes for spec in tensors), default=0)
    fields: dict[str, Any] = {
        "kind": kind,
        "tensors": tensors,
        "chunk_bytes": CHUNK_BYTES,
        "chunk_digests": (b"d" * 32,) * -(-num_bytes // CHUNK_BYTES),
        "num_bytes": num_bytes,
        "digest": "0" * 64,
    }
    return Manifest(**(fields | changes))


@case("a manifest under another name")
def _(bench: Bench) -> Told:
    manifest = a_version(bench)
    bench.hide("f" * 12, "NAME")
    return weights_error(bench, "fetch", lambda: named_manifest(manifest.encode(), "f" * 64))


@case("a manifest that is no manifest")
def _(bench: Bench) -> Told:
    return weights_error(bench, "fetch", lambda: Manifest.decode(b"\x93\x01\x02\x03"))


@case("a manifest of a newer format")
def _(bench: Bench) -> Told:
    newer = a_version(bench).encode().replace(b"\xa6format\x01", b"\xa6format\x02")
    return weights_error(bench, "fetch", lambda: Manifest.decode(newer))


@case("an asset with a path")
def _(bench: Bench) -> Told:
    def made() -> None:
        manifest_of(TensorSpec("../../.ssh/id", "U8", (8,), 0, 8), kind="assets")

    return weights_error(bench, "fetch", made)


@case("a manifest with overlapping tensors")
def _(bench: Bench) -> Told:
    def made() -> None:
        manifest_of(TensorSpec("a", "U8", (100,), 0, 100), TensorSpec("b", "U8", (8,), 64, 8))

    return weights_error(bench, "fetch", made)


@case("a manifest with a gap between tensors")
def _(bench: Bench) -> Told:
    def made() -> None:
        manifest_of(TensorSpec("a", "U8", (8,), 0, 8), TensorSpec("b", "U8", (8,), 512, 8))

    return weights_error(bench, "fetch", made)


@case("a manifest with a tensor of too few bytes")
def _(bench: Bench) -> Told:
    return weights_error(bench, "fetch", lambda: manifest_of(TensorSpec("w", "F32", (8,), 0, 8)))


@case("a manifest with a digest too few")
def _(bench: Bench) -> Told:
    def made() -> None:
        manifest_of(TensorSpec("w", "U8", (600,), 0, 600), chunk_digests=(b"d" * 32,))

    return weights_error(bench, "fetch", made)


@case("a manifest with chunks that are too large")
def _(bench: Bench) -> Told:
    def made() -> None:
        manifest_of(TensorSpec("w", "U8", (8,), 0, 8), chunk_bytes=1 << 30)

    return weights_error(bench, "fetch", made)
