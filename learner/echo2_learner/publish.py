"""Publication: one immutable version on disk, its probe, and the message that names it.

Life-cycle of a version: cast to the published dtype -> probe computed with just these
weights -> written to RUN/versions (the origin serves it) -> VersionPublished -> announced by
the coordinator -> pruned when `keep_from` says that nobody needs it.

With adapters the model beneath them is written once, as a version of its own that is never
announced, and a version holds the adapters alone (`echo2.weights.adapter`), unless
`learner.lora.publish` says "merged".

Names of tensors are those of the Hugging Face state dict; a tied tensor is published once,
under its first name (`model.embed_tokens.weight`, not `lm_head.weight`), and an engine ties
it again, as the model's configuration says.

Of several ranks rank 0 publishes and the others `help`: each casts its own rows, all compute
the probe together, and then one tensor after the other is gathered, so that no rank ever
holds more than one whole. The bytes are those that one process would have published.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from echo2.core.lineage import Lineage
from echo2.errors import LearnerError, WaitTimeoutError
from echo2.messages import DELTA_PATH_MAX, VersionPublished
from echo2.types import DeltaOffer, Version
from echo2.weights.adapter import AdapterBase, adapter_base
from echo2.weights.delta import write_delta
from echo2.weights.files import version_files
from echo2.weights.snapshot import Manifest
from echo2.weights.store import open_version, prune, write_assets, write_version
from echo2_learner import lora
from echo2_learner.policy import Policy
from echo2_learner.ranks import ALONE, Ranks
from echo2_learner.shards import StoredTensor, full
from echo2_workers.engine import StoredTensors
from echo2_workers.engines.stored import stored_tensors

NUM_PROBES: Final = 4
PROBE_LENGTH: Final = 12
PROBE_SEED: Final = 12
VERSION_KEY: Final = "version"

DTYPE_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class PublishedVersions:
    """The versions in RUN/versions that are of the surviving line, by version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._digests: dict[Version, str] = {}
        self._bases: dict[str, str] = {}
        """Of versions that are adapters: what they go onto."""
        self._deltas: list[str] = []
        """The newest ones, which may lead from a version that is no longer kept."""
        self._seen: set[str] = set()
        """What was in the folder when this learner took over, and what it has written since."""

    def find(self, lineage: Lineage) -> None:
        """Take up what earlier incarnations of this line left in the folder."""
        by_age = sorted(self.folder.glob("*.manifest"), key=lambda path: path.stat().st_mtime_ns)
        self._seen |= version_files(self.folder).keys()
        for path in by_age:
            with _opened(self.folder, path.stem) as stored:
                if stored.manifest.kind == "delta":
                    self._deltas = [*self._deltas, path.stem][-DELTA_PATH_MAX:]
                if VERSION_KEY not in stored.manifest.metadata:
                    continue
                manifest = stored.manifest
            version = Version.parse(manifest.metadata[VERSION_KEY])
            if version.incarnation < lineage.incarnation and lineage.is_alive(version):
                self.add(version, manifest)

    def add(self, version: Version, manifest: Manifest, delta: DeltaOffer | None = None) -> None:
        """A version was published, and a delta that leads to it."""
        self._digests[version] = manifest.manifest_digest
        self._seen.add(manifest.manifest_digest)
        if delta is not None:
            self._seen.add(delta.manifest_digest)
            self._deltas.append(delta.manifest_digest)
            del self._deltas[:-DELTA_PATH_MAX]
        base = adapter_base(manifest)
        if base is not None:
            self._bases[manifest.manifest_digest] = base.manifest_digest

    def newest(self) -> str:
        """The digest of the newest one; "" before the first."""
        return self._digests[max(self._digests)] if self._digests else ""

    def __contains__(self, version: Version) -> bool:
        return version in self._digests

    def known(self) -> dict[str, str]:
        """Digest by version, as text, for the other ranks."""
        return {str(version): digest for version, digest in self._digests.items()}

    def take(self, known: Mapping[str, str]) -> None:
        """Know just what `known` of rank 0 told."""
        self._digests = {Version.parse(version): digest for version, digest in known.items()}

    def load(self, version: Version, policy: Policy) -> None:
        """Put the weights of `version` into `policy`, bit by bit; of a sharded one, its rows."""
        digest = self._digests[version]
        _opened(self.folder, digest).close()
        tensors = stored_tensors(self.folder, digest)
        policy.load_tensors({name: _stored_tensor(tensors, name) for name in tensors})

    def prune(self, keep_from: int, *, keep: set[str]) -> None:
        """Remove versions below step `keep_from`; `keep` names digests that stay anyhow.

        The newest version stays too, and what those that stay go onto; what else was here when
        this learner took over goes. What came since is another's: this one may have been stopped,
        and does not know yet that somebody has taken its place.
        """
        newest = max(self._digests, default=None)
        for version in [v for v in self._digests if v.step < keep_from and v != newest]:
            self._bases.pop(self._digests.pop(version), None)
        of_others = version_files(self.folder).keys() - self._seen
        own = {*self._digests.values(), *self._bases.values(), *self._deltas}
        prune(self.folder, keep | own | of_others)


class Publisher:
    """Publishes `policy` in the `weights_dtype` of `scratch`, a second model (sharded as the
    policy is): it holds the last published version after a publication, and the
    log-probability check borrows it."""

    def __init__(
        self,
        policy: Policy,
        run_dir: Path,
        *,
        scratch: Policy,
        run_name: str,
        origin_timeout_s: float,
        ranks: Ranks = ALONE,
        adapters_alone: bool = False,
        deltas: bool = False,
    ) -> None:
        self.policy = policy
        self.scratch = scratch
        self._ranks = ranks
        self.versions = PublishedVersions(run_dir / "versions")
        self._origin_file = run_dir / "origin.json"
        self._origin_timeout_s = origin_timeout_s
        self._run_name = run_name
        self._assets_digest = ""
        self._adapters_alone = adapters_alone
        self._deltas = deltas
        self._base: AdapterBase | None = None
        self._probe_tokens: Tensor | None = None

    def publish(self, version: Version, *, final: bool = False) -> VersionPublished:
        """Write `version` with the policy's weights of now; returns what to announce.

        `final`: the last of the run. WeightsError when the disk does not take it,
        WaitTimeoutError when no origin serves the run folder.
        """
        self._ranks.order("publish")
        probe_tokens, probe = self._probe()
        folder = self.versions.folder
        if not self._assets_digest:
            self._assets_digest = write_assets(folder, self.policy.asset_files()).manifest_digest
        metadata = {VERSION_KEY: str(version), "run": self._run_name}
        if self._adapters_alone:
            manifest = self._write_adapters(metadata)
        else:
            manifest = write_version(
                folder, _buffers(self._wholes()), kind="weights", metadata=metadata
            )
        delta = self._write_delta(manifest)
        self.versions.add(version, manifest, delta)
        origin = self._origin()
        return VersionPublished(
            version=version,
            manifest_digest=manifest.manifest_digest,
            assets_digest=self._assets_digest,
            num_bytes=manifest.num_bytes,
            origin=origin["endpoint"],
            origin_key=origin["public_key"],
            final=final,
            vocab_size=self.policy.vocab_size,
            deltas=() if delta is None else (delta,),
            probe_length=PROBE_LENGTH,
            probe_tokens=probe_tokens.to(torch.int32).numpy().tobytes(),
            probe_logprobs=probe.numpy().tobytes(),
        )

    def help(self) -> None:
        """What the other ranks do while rank 0 is in `publish`."""
        self._probe()
        for _ in self._wholes():
            pass

    def prune(self, keep_from: int) -> None:
        """Let versions below `keep_from` go; assets stay."""
        self.versions.prune(keep_from, keep={self._assets_digest} - {""})

    @torch.no_grad()
    def _probe(self) -> tuple[Tensor, Tensor]:
        """Take the policy's weights of now over into `scratch`, and compute the probe with it:
        ([NUM_PROBES, PROBE_LENGTH] tokens, their logprobs in float32, column 0 is 0.0).

        The tokens are those that the first published version draws. What a model finds likely
        has logprobs that every precision computes closely; of tokens drawn at random, nearly
        impossible each, bfloat16 tells little: 0.1 nats of noise with 135 M parameters.
        """
        self.scratch.load_tensors(self.policy.published_tensors(self.scratch.weights_dtype))
        if self._probe_tokens is None:
            self._probe_tokens = self.scratch.sample(NUM_PROBES, PROBE_LENGTH, seed=PROBE_SEED)
        tokens = self._probe_tokens
        lengths = torch.full((NUM_PROBES,), PROBE_LENGTH, device=self.policy.device)
        logprobs, _ = self.scratch.logprobs(tokens.to(self.policy.device), lengths, temperature=1.0)
        return tokens, logprobs.float().cpu()

    def _write_delta(self, manifest: Manifest) -> DeltaOffer | None:
        """What makes this version of the one before; None where that is no smaller."""
        folder, before = self.versions.folder, self.versions.newest()
        if not self._deltas or not before or before == manifest.manifest_digest:
            return None
        base, target = open_version(folder, before), open_version(folder, manifest.manifest_digest)
        try:
            # Another learner that took over removes both; then this one is about to be told so.
            if base is None or target is None or base.manifest.kind != target.manifest.kind:
                return None
            delta = write_delta(folder, base, target)
        finally:
            for version in (base, target):
                if version is not None:
                    version.close()
        return None if delta is None else DeltaOffer(before, delta.manifest_digest, delta.num_bytes)

    def _write_adapters(self, metadata: dict[str, str]) -> Manifest:
        """The adapters as a version; before the first one, what they go onto."""
        policy, folder = self.policy, self.versions.folder
        if self._base is None:
            base = policy.base_tensors(self.scratch.weights_dtype)
            manifest = write_version(
                folder, _buffers(base.items()), metadata={"run": self._run_name}
            )
            self._base = AdapterBase(manifest.manifest_digest, lora.scale(policy.module))
        return write_version(
            folder,
            _buffers(lora.adapter_pairs(policy.module).items()),
            kind="adapter",
            metadata=metadata | self._base.metadata(),
        )

    def _wholes(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors one by one, gathered from all ranks, as they are published."""
        computes, published = self.scratch.dtype, self.scratch.weights_dtype
        for name, tensor in self.scratch.tensors().items():
            whole = full(tensor)
            yield name, whole.to(published) if whole.dtype == computes else whole

    def _origin(self) -> dict[str, Any]:
        """What the origin wrote about itself, read anew: it may have been restarted."""
        deadline = time.monotonic() + self._origin_timeout_s
        while True:
            try:
                origin = json.loads(self._origin_file.read_text(encoding="utf-8"))
                return {
                    "endpoint": str(origin["endpoint"]),
                    "public_key": str(origin["public_key"]),
                }
            except FileNotFoundError:
                pass
            except (ValueError, KeyError, TypeError) as error:
                raise LearnerError(
                    f"{self._origin_file} does not say where the origin is ({error!r}); remove "
                    "it and start the origin again"
                ) from error
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"no origin wrote {self._origin_file} within {self._origin_timeout_s:.0f} s: "
                    "nobody would serve this version; start `echo2 origin` with the same --run-dir"
                )
            time.sleep(0.1)


def _opened(folder: Path, manifest_digest: str) -> Any:
    stored = open_version(folder, manifest_digest)
    if stored is None:
        raise LearnerError(
            f"version {manifest_digest[:12]} is not in {folder} any more; only the learner removes "
            "versions: start it again with --resume"
        )
    return stored


def _buffers(
    tensors: Iterable[tuple[str, Tensor]],
) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
    for name, tensor in tensors:
        flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        yield name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), flat.numpy().data


def _stored_tensor(tensors: StoredTensors, name: str) -> StoredTensor:
    dtype, shape, stored = tensors.stored(name)
    row_bytes = len(stored) // shape[0] if shape and shape[0] else len(stored)

    def read(start: int, stop: int) -> Tensor:
        """A tensor of its own: the copy lets the mapping go."""
        _, _, content = tensors[name]
        part = content[start * row_bytes : stop * row_bytes] if shape else content
        rows = (max(0, stop - start), *shape[1:]) if shape else ()
        if not len(part):
            return torch.empty(rows, dtype=_DTYPES[dtype])
        return torch.frombuffer(bytearray(part), dtype=_DTYPES[dtype]).reshape(rows)

    return StoredTensor(shape, _DTYPES[dtype], read)
