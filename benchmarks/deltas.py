"""How small and how fast deltas are, against XOR planes, gaps with values, and zstd alone.

    python benchmarks/deltas.py                          synthetic changes
    python benchmarks/deltas.py --run-dir RUN            consecutive versions of a finished run
    python benchmarks/deltas.py --train builtin:addition-1m --learning-rate 2e-4
    python benchmarks/deltas.py --train DIR --learning-rate 1e-6 --publish bfloat16
                                                         versions as the learner makes them

Prints one JSON object: the machine, the parameters, and for each pair of versions the share of
elements that changed and for each codec `share` (bytes on the wire per byte of the full
version), `encode` and `decode` in GB/s of the full version's bytes on one core (processor time,
the best of `--rounds`). `delta` is echo2's, with its headers and manifests; beside it, over the
same bytes in the same run: `xor_planes` (XOR, byte planes, zstd 1), `gaps_values` (gaps between
changed positions in two bytes and more, the new values, zstd 1) and `zstd` (zstd 1 of the new
bytes). `write` and `apply` are whole: digests, files and fsync too.

`--train` uses the learner's own policy, masters and AdamW, on rollouts of a few tokens that the
policy samples, with advantages drawn at random: how many weights change follows from the size of
AdamW's steps, not from what the batch says.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
import zstandard

from echo2.types import Version
from echo2.weights.delta import apply_delta, write_delta
from echo2.weights.delta_codec import (
    BLOCK_BYTES,
    block_ranges,
    decode_block,
    elements,
    encode_block,
)
from echo2.weights.snapshot import Manifest
from echo2.weights.store import ChunkStore, StoredVersion, open_version, write_version

DENSITIES = (0.01, 0.02, 0.1, 0.4)
TENSOR_ELEMENTS = 4 << 20
GAP_MAX = 65535

Pair = tuple[str, memoryview, memoryview]
"""(dtype, base, target) of one block"""
Elements = npt.NDArray[Any]


class Deltas:
    """What echo2 does, block by block."""

    def __init__(self) -> None:
        self._room = np.empty(BLOCK_BYTES, dtype=np.uint8)

    def encode(self, pair: Pair) -> bytes:
        dtype, base, target = pair
        return encode_block(dtype, target, base)

    def decode(self, pair: Pair, encoded: bytes) -> memoryview:
        dtype, base, target = pair
        return decode_block(dtype, memoryview(encoded), base, len(target), self._room)


class XorPlanes:
    def __init__(self) -> None:
        self._zstd = zstandard.ZstdCompressor(level=1)
        self._unzstd = zstandard.ZstdDecompressor()

    def encode(self, pair: Pair) -> list[bytes]:
        dtype, base, target = pair
        differ = elements(dtype, target) ^ elements(dtype, base)
        return [self._zstd.compress(plane) for plane in planes(differ)]

    def decode(self, pair: Pair, encoded: list[bytes]) -> memoryview:
        old = elements(pair[0], pair[1])
        differ = np.empty((old.size, old.itemsize), dtype=np.uint8)
        for index, frame in enumerate(encoded):
            differ[:, index] = np.frombuffer(self._unzstd.decompress(frame), dtype=np.uint8)
        found: Elements = differ.reshape(-1).view(old.dtype) ^ old
        return found.view(np.uint8).data


class GapsValues:
    def __init__(self) -> None:
        self._zstd = zstandard.ZstdCompressor(level=1)
        self._unzstd = zstandard.ZstdDecompressor()

    def encode(self, pair: Pair) -> tuple[bytes, bytes]:
        dtype, base, target = pair
        new = elements(dtype, target)
        positions = np.flatnonzero(new != elements(dtype, base))
        gaps = np.diff(positions, prepend=-1) - 1
        times, rests = np.divmod(gaps, GAP_MAX)
        coded = np.full(int(times.sum()) + gaps.size, GAP_MAX, dtype="<u2")
        coded[np.cumsum(times + 1) - 1] = rests
        return self._zstd.compress(coded), self._zstd.compress(new[positions])

    def decode(self, pair: Pair, encoded: tuple[bytes, bytes]) -> memoryview:
        found = elements(pair[0], pair[1]).copy()
        gaps = np.frombuffer(self._unzstd.decompress(encoded[0]), dtype="<u2")
        positions = np.cumsum(gaps, dtype=np.intp)[gaps != GAP_MAX]
        positions += np.arange(positions.size)
        found[positions] = np.frombuffer(self._unzstd.decompress(encoded[1]), dtype=found.dtype)
        return found.view(np.uint8).data


class Zstd:
    def __init__(self) -> None:
        self._zstd = zstandard.ZstdCompressor(level=1)
        self._unzstd = zstandard.ZstdDecompressor()

    def encode(self, pair: Pair) -> bytes:
        return self._zstd.compress(pair[2])

    def decode(self, pair: Pair, encoded: bytes) -> memoryview:
        return memoryview(self._unzstd.decompress(encoded))


PEERS: dict[str, Callable[[], Any]] = {
    "delta": Deltas,
    "xor_planes": XorPlanes,
    "gaps_values": GapsValues,
    "zstd": Zstd,
}


def planes(bits: Elements) -> Iterator[npt.NDArray[np.uint8]]:
    split = bits.view(np.uint8).reshape(-1, bits.itemsize)
    for index in range(bits.itemsize):
        yield np.ascontiguousarray(split[:, index])


def blocks_of(base: StoredVersion, target: StoredVersion) -> list[Pair]:
    """Of the tensors that both have alike, which are all of those of one model."""
    old = base.tensors()
    return [
        (dtype, old[name][2][start:end], content[start:end])
        for name, (dtype, shape, content) in target.tensors().items()
        if name in old and old[name][:2] == (dtype, shape)
        for start, end in block_ranges(len(content))
    ]


def changed_share(pairs: Sequence[Pair]) -> float:
    num = changed = 0
    for dtype, base, target in pairs:
        new = elements(dtype, target)
        num += new.size
        changed += int(np.count_nonzero(new != elements(dtype, base)))
    return changed / max(1, num)


def codec_figures(pairs: Sequence[Pair], *, rounds: int) -> dict[str, dict[str, float]]:
    """name -> share, encode and decode, of the blocks alone; every decoding is compared."""
    num_bytes = sum(len(target) for _, _, target in pairs)
    found = {}
    for name, make in PEERS.items():
        codec = make()
        encode_s, decode_s, size = [], [], 0
        for number in range(rounds):
            spent_in, spent_out, size = 0.0, 0.0, 0
            for pair in pairs:
                start = time.process_time()
                encoded = codec.encode(pair)
                middle = time.process_time()
                decoded = codec.decode(pair, encoded)
                spent_out += time.process_time() - middle
                spent_in += middle - start
                size += len(encoded) if isinstance(encoded, bytes) else sum(map(len, encoded))
                if number == 0 and decoded != pair[2]:
                    raise SystemExit(f"{name} is not lossless")
            encode_s.append(spent_in)
            decode_s.append(spent_out)
        found[name] = {
            "share": round(size / num_bytes, 6),
            "encode_gb_per_s": round(num_bytes / min(encode_s) / 1e9, 3),
            "decode_gb_per_s": round(num_bytes / min(decode_s) / 1e9, 3),
        }
    return found


@dataclass(frozen=True, slots=True)
class Made:
    """A delta that was written."""

    manifest: Manifest
    share: float
    write_s: float


def write_measured(folder: Path, base: StoredVersion, target: StoredVersion) -> Made:
    start = time.perf_counter()
    manifest = write_delta(folder, base, target, share_max=2.0)
    assert manifest is not None
    wire = manifest.num_bytes + len(manifest.encode())
    return Made(manifest, wire / target.manifest.num_bytes, time.perf_counter() - start)


def pair_figures(base: StoredVersion, target: StoredVersion, *, rounds: int) -> dict[str, Any]:
    """Codecs, and the whole way through files: written, applied, compared."""
    pairs = blocks_of(base, target)
    figures = codec_figures(pairs, rounds=rounds)
    num_bytes = target.manifest.num_bytes
    with tempfile.TemporaryDirectory(dir=target.path.parent) as name:
        store = ChunkStore(Path(name), 4 * num_bytes + (1 << 20))
        made = write_measured(store.folder, base, target)
        delta = store.open(made.manifest.manifest_digest, verify=True)
        assert delta is not None
        start = time.perf_counter()
        with delta, apply_delta(store, delta, base) as applied:
            apply_s = time.perf_counter() - start
            assert applied.manifest == target.manifest
    figures["delta"]["share"] = round(made.share, 6)
    return {
        "changed": round(changed_share(pairs), 5),
        "full_mb": round(num_bytes / 1e6, 1),
        "delta_mb": round(made.share * num_bytes / 1e6, 3),
        "codecs": figures,
        "write_gb_per_s": round(num_bytes / made.write_s / 1e9, 3),
        "apply_gb_per_s": round(num_bytes / apply_s / 1e9, 3),
    }


def synthetic(folder: Path, *, num_bytes: int, rounds: int) -> dict[str, Any]:
    """Weights of N(0, 0.02), of which a share is one unit in the last place up or down."""
    found = {}
    for dtype, width in (("BF16", 2), ("F32", 4)):
        rng = np.random.default_rng(0)
        num = num_bytes // width
        values = (0.02 * rng.standard_normal(num, dtype=np.float32)).view("<u4")
        old = values if dtype == "F32" else (values >> 16).astype("<u2")
        base = opened(folder, write_bits(folder, dtype, old))
        for density in DENSITIES:
            chosen = np.flatnonzero(rng.random(num, dtype=np.float32) < density)
            new = old.copy()
            new[chosen] += rng.choice(np.array([1, -1]).astype(old.dtype), chosen.size)
            with opened(folder, write_bits(folder, dtype, new)) as target:
                found[f"{dtype} {density:.0%}"] = pair_figures(base, target, rounds=rounds)
            target.path.unlink()
        base.close()
    return found


def write_bits(folder: Path, dtype: str, bits: Elements) -> Manifest:
    parts = np.split(bits, range(TENSOR_ELEMENTS, bits.size, TENSOR_ELEMENTS))
    named = ((f"t{n}", dtype, (part.size,), part.data) for n, part in enumerate(parts))
    return write_version(folder, named)


def opened(folder: Path, manifest: Manifest) -> StoredVersion:
    version = open_version(folder, manifest.manifest_digest)
    assert version is not None
    return version


def of_run(run_dir: Path, *, rounds: int) -> dict[str, Any]:
    """Consecutive versions that a run left in its folder."""
    folder = run_dir / "versions"
    versions = {}
    for path in folder.glob("*.manifest"):
        manifest = Manifest.decode(path.read_bytes())
        if manifest.kind in ("weights", "adapter") and "version" in manifest.metadata:
            versions[Version.parse(manifest.metadata["version"])] = manifest
    if len(versions) < 2:
        raise SystemExit(f"{folder} holds {len(versions)} versions; two are needed")
    found = {}
    for one, other in itertools.pairwise(sorted(versions)):
        with opened(folder, versions[one]) as base, opened(folder, versions[other]) as target:
            found[f"{one} to {other}"] = pair_figures(base, target, rounds=rounds)
    return found


def trained(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Deltas between the versions of each step, and all figures of the last."""
    from deltas_training import training_versions

    shares: list[float] = []
    changed: list[float] = []
    versions: list[StoredVersion] = []
    last: dict[str, Any] = {}
    for manifest in training_versions(folder, options):
        versions.append(opened(folder, manifest))
        if len(versions) == 1:
            continue
        base, target = versions[-2], versions[-1]
        changed.append(changed_share(blocks_of(base, target)))
        if len(shares) + 1 < options.steps:
            with tempfile.TemporaryDirectory(dir=folder) as name:
                shares.append(write_measured(Path(name), base, target).share)
        else:
            last = pair_figures(base, target, rounds=options.rounds)
            shares.append(last["codecs"]["delta"]["share"])
        if len(versions) > 2:  # the first is kept, for the direct delta
            base.close()
            base.path.unlink()
    with tempfile.TemporaryDirectory(dir=folder) as name:
        direct = write_measured(Path(name), versions[0], versions[-1]).share
    return {
        "changed_of_each_step": [round(share, 5) for share in changed],
        "share_of_each_step": [round(share, 6) for share in shares],
        "share_mean": round(float(np.mean(shares)), 6),
        "share_max": round(max(shares), 6),
        "share_direct_first_to_last": round(direct, 6),
        "last_step": last,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mebibytes", type=int, default=64, help="of synthetic weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; else the temporary folder")
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--train", help="builtin:NAME or the folder of a model")
    parser.add_argument("--publish", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1, help="of the training")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    load = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        if options.run_dir is not None:
            figures = of_run(options.run_dir, rounds=options.rounds)
        elif options.train is not None:
            figures = trained(Path(name), options)
        else:
            figures = synthetic(
                Path(name), num_bytes=options.mebibytes << 20, rounds=options.rounds
            )
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "zstd": ".".join(map(str, zstandard.ZSTD_VERSION)),
        "load_1min": load,
    }
    result = {
        "benchmark": "deltas",
        "machine": machine,
        "parameters": vars(options),
        "figures": figures,
    }
    print(json.dumps(result, indent=2, default=str))


if __name__ == "__main__":
    main()
