"""How fast versions are written, verified and assembled, against hashing alone.

    python benchmarks/chunk_store.py [--mebibytes 256] [--folder DIR]

Prints one JSON object: the machine, the parameters, GB/s of each step and of BLAKE3 on one
thread in the same run (the bound of a step that hashes once), and the ratio to it. Writing
and assembling hash twice (chunks and the whole) and flush to the disk; a fetch over a
loopback connection with CURVE adds the wire.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import structlog
from blake3 import blake3

from echo2.config import Config
from echo2.net.auth import AllowList, load_or_create_key
from echo2.net.relay import Relay
from echo2.net.sockets import close_context, make_context
from echo2.weights.origin import Origin
from echo2.weights.snapshot import Manifest
from echo2.weights.store import ChunkStore, open_version, write_version

TENSOR_BYTES = 16 << 20
TIMEOUT_S = 600.0


def measure(folder: Path, num_bytes: int) -> dict[str, float]:
    """GB/s of each step."""
    tensor = memoryview(os.urandom(TENSOR_BYTES))
    num_tensors = num_bytes // TENSOR_BYTES
    versions = folder / "run" / "versions"
    speeds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], None]) -> None:
        start = time.perf_counter()
        work()
        speeds[name] = round(num_tensors * TENSOR_BYTES / (time.perf_counter() - start) / 1e9, 3)

    def hash_all() -> None:
        digest = blake3()
        for _ in range(num_tensors):
            digest.update(tensor)

    manifests: list[Manifest] = []

    def write() -> None:
        tensors = ((f"t{n}", "U8", (TENSOR_BYTES,), tensor) for n in range(num_tensors))
        manifests.append(write_version(versions, tensors))

    timed("blake3_one_thread", hash_all)
    timed("write", write)
    manifest = manifests[0]
    published = open_version(versions, manifest.manifest_digest)
    assert published is not None
    with published:
        timed("verify", published.verify)
        store = ChunkStore(folder / "store", 2 * num_bytes)

        def assemble() -> None:
            assembly = store.begin(manifest)
            for index in range(manifest.num_chunks):
                assembly.add(index, published.read(index))
            assembly.finish().close()

        timed("assemble", assemble)
    speeds["fetch_loopback_curve"] = asyncio.run(fetch(folder, manifest))
    return speeds


async def fetch(folder: Path, manifest: Manifest) -> float:
    """GB/s of a fetch; origin and relay share this process and its event loop."""
    run_dir = folder / "run"
    keys = load_or_create_key(folder / "worker.key")
    AllowList(run_dir / "keys" / "authorized").authorize("worker", keys.public)
    origin_context, context = make_context(), make_context()
    origin = Origin(origin_context, Config(), run_dir)
    await origin.start()
    store = await asyncio.to_thread(ChunkStore, folder / "fetched", 2 * manifest.num_bytes)
    try:
        async with Relay(context, store, keys=keys, name="worker") as relay:
            start = time.perf_counter()
            version = await relay.fetch(
                manifest.manifest_digest, origin.endpoint, origin.public_key, timeout_s=TIMEOUT_S
            )
            elapsed_s = time.perf_counter() - start
            version.close()
    finally:
        await origin.stop()
        await close_context(context)
        await close_context(origin_context)
    return round(manifest.num_bytes / elapsed_s / 1e9, 3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument(
        "--folder", type=Path, help="where to write; by default the temporary folder"
    )
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    num_bytes = options.mebibytes << 20
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        speeds = measure(Path(name), num_bytes)
    bound = speeds["blake3_one_thread"]
    result = {
        "benchmark": "chunk_store",
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "load_1min": round(os.getloadavg()[0], 2),
        },
        "parameters": {"num_bytes": num_bytes, "chunk_bytes": 256 << 10},
        "gb_per_s": speeds,
        "ratio_to_blake3": {name: round(speed / bound, 3) for name, speed in speeds.items()},
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
