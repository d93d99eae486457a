"""What one relay forwards on one machine: Gbit/s to three children, loop lag, memory.

    python benchmarks/relay_cpu.py [--mb 1000] [--children 3] [--out FILE]

A relay (in this process) holds a version and serves it over loopback to children that ask for
chunks in a window and drop what comes (in a process of their own, so that their work is not
counted). Plain and with CURVE. Beside the rates: the largest and the 99th percentile of the
event loop's lag while the bytes pass, how much the process's memory grew meanwhile, and its
processor seconds per gigabyte. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import resource
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Final

import uvloop
import zmq

from echo2 import wire
from echo2.messages import CHUNK_MAX_BYTES, ChunksRequest, Lane, Role
from echo2.net.keys import KeyPair
from echo2.net.relay import Relay
from echo2.net.sockets import close_context, dealer_socket, make_context
from echo2.types import RelayPeer
from echo2.weights.store import ChunkStore, write_version

WINDOW: Final = 32
TENSOR_BYTES: Final = 64 << 20
LAG_INTERVAL_S: Final = 0.005


def random_tensors(num_bytes: int) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
    for index, start in enumerate(range(0, num_bytes, TENSOR_BYTES)):
        size = min(TENSOR_BYTES, num_bytes - start)
        yield f"t{index}", "U8", (size,), os.urandom(size)


async def relay(folder: Path, num_mb: int, children: int, *, curve: bool) -> dict[str, Any]:
    store = ChunkStore(folder, 1 << 40)
    manifest = write_version(folder, random_tensors(num_mb * 10**6))
    keys = {f"child-{n}": KeyPair.generate() for n in range(children)}
    own = KeyPair.generate()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    context = make_context()
    lags: list[float] = []
    sizes: list[float] = []
    async with Relay(
        context, store, keys=own if curve else None, name="relay", bind="tcp://127.0.0.1:0"
    ) as serving:
        if curve:
            serving.set_peers([RelayPeer(n, "", pair.public) for n, pair in keys.items()])
        process = multiprocessing.get_context("spawn").Process(
            target=sink,
            args=(
                theirs,
                serving.endpoint,
                own.public if curve else "",
                {n: (p.public, p.secret) for n, p in keys.items()}
                if curve
                else dict.fromkeys(keys),
                manifest.manifest_digest,
                manifest.num_chunks,
            ),
        )
        process.start()
        lag = asyncio.create_task(measure(lags, sizes))
        while not ours.poll():  # noqa: ASYNC110  another process owes it
            await asyncio.sleep(0.05)
        assert ours.recv() == "ready"
        lags.clear()
        sizes[:] = [resident_mb()]
        cpu = time.process_time()
        ours.send("go")
        while not ours.poll():  # noqa: ASYNC110  another process owes it
            await asyncio.sleep(0.05)
        seconds = ours.recv()
        cpu = time.process_time() - cpu
        lag.cancel()
        await asyncio.gather(lag, return_exceptions=True)
        await asyncio.to_thread(process.join)
    await close_context(context)
    gigabytes = children * manifest.num_bytes / 1e9
    lags.sort()
    return {
        "gbit_per_s": round(8 * gigabytes / seconds, 2),
        "seconds": round(seconds, 2),
        "cpu_s_per_gb": round(cpu / gigabytes, 2),
        "lag_p99_ms": round(1e3 * lags[int(0.99 * len(lags))], 2),
        "lag_max_ms": round(1e3 * lags[-1], 2),
        "memory_grew_mb": round(max(sizes) - sizes[0], 1),
    }


async def measure(lags: list[float], sizes: list[float]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        lags.append(max(0.0, loop.time() - due))
        sizes.append(resident_mb())


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 1e6


def sink(
    pipe: Pipe, endpoint: str, server_key: str, keys: dict[str, Any], digest: str, num_chunks: int
) -> None:
    """The children, in a process of their own: they ask, count what comes, and drop it."""
    context = make_context()
    sockets = []
    for name, pair in keys.items():
        socket = dealer_socket(
            context,
            lane=Lane.CHUNKS,
            role=Role.WORKER,
            keys=None if pair is None else KeyPair(*pair),
            server_key=server_key,
            endpoint=endpoint,
            name=name,
        )
        socket.connect(endpoint)
        sockets.append(socket)
    poller = zmq.Poller()
    for socket in sockets:
        assert socket.poll(30_000, zmq.POLLOUT), "no connection"
        poller.register(socket, zmq.POLLIN)
    pipe.send("ready")
    pipe.recv()
    began = time.perf_counter()
    asked = dict.fromkeys(sockets, 0)
    arrived = dict.fromkeys(sockets, 0)
    while min(arrived.values()) < num_chunks:
        for socket in sockets:
            if asked[socket] < num_chunks and asked[socket] - arrived[socket] <= WINDOW // 2:
                part = tuple(range(asked[socket], min(asked[socket] + WINDOW, num_chunks)))
                request = ChunksRequest(manifest_digest=digest, indexes=part)
                socket.send_multipart(wire.encode(request))
                asked[socket] += len(part)
        for socket, _ in poller.poll():
            frames = socket.recv_multipart(copy=False)
            arrived[socket] += len(frames) == 2  # a sign of life has one
    pipe.send(time.perf_counter() - began)
    for socket in sockets:
        socket.close(linger=0)
    context.destroy(linger=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--children", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = {}
    for name, curve in (("plain", False), ("curve", True)):
        with tempfile.TemporaryDirectory(prefix="relay-cpu-") as folder:
            found[name] = uvloop.run(relay(Path(folder), options.mb, options.children, curve=curve))
    report = {
        "benchmark": "relay_cpu",
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "mb": options.mb,
        "children": options.children,
        "chunk_bytes": CHUNK_MAX_BYTES,
        **found,
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
