"""Promise 4, weights are exact: digests as told, digests as recomputed, and the canary."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from blake3 import blake3

from echo2 import wire
from echo2.errors import Echo2Error
from echo2.messages import MANIFEST_MAX_BYTES
from echo2.verify.check import Check
from echo2.verify.records import Line

CANARY_MAX_DIFF: Final = {
    "float32": 1e-4, "bfloat16": 5e-2, "fp8": 1e-1, "int8": 1e-1, "int4": 3e-1,
}  # fmt: skip
"""Largest mean |logprob difference| on the probe, by precision class."""
PIECE_BYTES: Final = 8 << 20
_MANIFEST_NAME: Final = re.compile(r"^[0-9a-f]{64}\.manifest$")


class InstalledDigests(Check):
    NAME = "installed_digests"
    TEXT = "what workers installed is, by its digest, what was published"
    UNIT = "installs"

    def read(self, line: Line) -> None:
        if line["event"] not in ("version_published", "version_installed"):
            return
        version = (line["incarnation"], line["step"])
        name = f"{version[0]}.{version[1]}"
        published = self.history.published.get(version)
        if line["event"] == "version_published":
            if published is not None and published != line["manifest_digest"]:
                self.violate(
                    line.where,
                    f"version {name} was published twice: as {published[:12]} and as "
                    f"{line['manifest_digest'][:12]}",
                    version=name,
                )
        else:
            self.promise.checked += 1
            if published is None:
                self.violate(
                    line.where,
                    f"worker {line['worker']} installed version {name} before it was published",
                    worker=line["worker"],
                    version=name,
                )
            elif published != line["manifest_digest"]:
                self.violate(
                    line.where,
                    f"worker {line['worker']} installed version {name} with digest "
                    f"{line['manifest_digest'][:12]}; published was {published[:12]}",
                    worker=line["worker"],
                    version=name,
                )

    def conclude(self) -> None:
        self.promise.facts["versions"] = len(self.history.published)


class Canary(Check):
    NAME = "canary"
    TEXT = "after each install the probe's logprobs are the publisher's, within the precision"
    UNIT = "probes"

    def read(self, line: Line) -> None:
        if line["event"] != "version_installed" or line["canary_diff"] is None:
            return
        self.promise.checked += 1
        diff = line["canary_diff"]
        self.promise.facts["largest"] = max(self.promise.facts.get("largest", 0.0), diff)
        precision = self.history.precisions.get(line["worker"], self.settings.dtype)
        allowed = self.settings.canary_max_diff or CANARY_MAX_DIFF.get(precision)
        if allowed is not None and diff > allowed:
            self.violate(
                line.where,
                f"worker {line['worker']} ({precision}) installed version "
                f"{line['incarnation']}.{line['step']} with a mean difference of {diff:.3g}; "
                f"at most {allowed:.3g} is allowed",
                worker=line["worker"],
                canary_diff=diff,
            )

    def conclude(self) -> None:
        if not self.promise.checked:
            self.promise.skipped = "no version came with a probe"


class VersionFiles(Check):
    NAME = "version_files"
    TEXT = "the bytes of every stored version are those of its manifest, recomputed"
    UNIT = "versions"

    def conclude(self) -> None:
        folder = self.run_dir / "versions"
        num_bytes = 0
        for path in _manifests(folder):
            num_bytes += self._stored(path)
        copies = unfinished = 0
        for worker in sorted((self.run_dir / "workers").glob("*/")):
            for path in _manifests(worker):
                if not path.with_suffix(".bin").is_file():
                    unfinished += 1  # a fetch that was cut short, to be resumed
                    continue
                num_bytes += self._stored(path)
                copies += 1
        self.promise.facts["copies at workers"] = copies
        if unfinished:
            self.promise.facts["unfinished copies"] = unfinished
        self.promise.facts["MB"] = round(num_bytes / 1e6, 1)
        self._newest_is_there(folder)

    def _newest_is_there(self, folder: Path) -> None:
        if not self.history.published:
            return
        if not folder.is_dir():
            self.promise.notes.append("there is no versions/ folder; the origin is elsewhere")
            return
        alive = [
            (version, digest)
            for version, digest in self.history.published.items()
            if self.history.is_alive(*version)
        ]
        version, digest = max(alive, default=((0, 0), ""))
        if digest and not (folder / f"{digest}.manifest").is_file():
            self.violate(
                str(folder.relative_to(self.run_dir)),
                f"the newest version {version[0]}.{version[1]} ({digest[:12]}) is not stored",
                version=f"{version[0]}.{version[1]}",
            )

    def _stored(self, path: Path) -> int:
        """Check one version; returns its size in bytes."""
        self.promise.checked += 1
        where = str(path.relative_to(self.run_dir))
        name = path.name.removesuffix(".manifest")
        if path.stat().st_size > MANIFEST_MAX_BYTES:
            self.violate(where, f"the manifest has more than {MANIFEST_MAX_BYTES} bytes")
            return 0
        encoded = path.read_bytes()
        digest = blake3(encoded).hexdigest()
        if digest != name:
            self.violate(
                where, f"the manifest's digest is {digest[:12]}, not its name", digest=digest
            )
            return 0
        try:
            manifest = wire.unpack(encoded, max_bytes=MANIFEST_MAX_BYTES)
            chunk_bytes, num_bytes = int(manifest["chunk_bytes"]), int(manifest["num_bytes"])
            chunk_digests, whole = bytes(manifest["chunk_digests"]), str(manifest["digest"])
        except (Echo2Error, KeyError, TypeError, ValueError) as error:
            self.violate(where, f"the manifest cannot be read: {error}")
            return 0
        if not path.with_suffix(".bin").is_file() and path.with_suffix(".partial").is_file():
            return 0  # a fetch that was superseded or cut off: never installed
        problem = _content_problem(
            path.with_suffix(".bin"), chunk_bytes, num_bytes, chunk_digests, whole
        )
        if problem:
            self.violate(where, problem, manifest_digest=name)
        return num_bytes


def _manifests(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.rglob("*.manifest") if _MANIFEST_NAME.match(path.name))


def _content_problem(
    path: Path, chunk_bytes: int, num_bytes: int, chunk_digests: bytes, whole: str
) -> str:
    """What is wrong with the bytes of a version; "" if they are those of its manifest."""
    if not path.is_file():
        return "its bytes are not there, though its manifest is"
    size = path.stat().st_size
    if size != num_bytes:
        return f"it has {size} bytes; its manifest says {num_bytes}"
    if chunk_bytes < 1 or len(chunk_digests) != 32 * -(-num_bytes // chunk_bytes):
        return f"its {len(chunk_digests)} bytes of chunk digests do not fit {num_bytes} bytes"
    hasher = blake3()
    piece_bytes = max(1, PIECE_BYTES // chunk_bytes) * chunk_bytes
    with path.open("rb") as file:
        index = 0
        while piece := file.read(piece_bytes):
            hasher.update(piece)
            for start in range(0, len(piece), chunk_bytes):
                chunk = blake3(piece[start : start + chunk_bytes]).digest()
                if chunk != chunk_digests[32 * index : 32 * index + 32]:
                    return f"chunk {index} does not have the digest that its manifest names"
                index += 1
    if hasher.hexdigest() != whole:
        return f"its digest is {hasher.hexdigest()[:12]}; its manifest says {whole[:12]}"
    return ""


def weight_checks() -> tuple[type[Check], ...]:
    return (InstalledDigests, Canary, VersionFiles)
