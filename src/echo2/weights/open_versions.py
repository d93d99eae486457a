"""Versions that are kept open while they are served, a bounded number of them."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import structlog

from echo2.errors import WeightsError
from echo2.weights.versions import StoredVersion, open_version

log = structlog.get_logger(__name__)

VERSIONS_OPEN_MAX: Final = 8


class OpenVersions:
    """Versions of `folder`, kept open while they are used: at most `versions_max`."""

    def __init__(self, folder: Path, *, versions_max: int = VERSIONS_OPEN_MAX) -> None:
        self.folder = folder
        self._versions_max = versions_max
        self._lock = threading.Lock()
        self._versions: OrderedDict[str, StoredVersion] = OrderedDict()

    def __len__(self) -> int:
        return len(self._versions)

    @contextlib.contextmanager
    def use(self, manifest_digest: str) -> Iterator[StoredVersion]:
        """An open version; WeightsError when it is not there (any more), or torn."""
        with contextlib.ExitStack() as stack:
            with self._lock:
                version = self._get(manifest_digest)
                stack.enter_context(version.held())
            yield version

    def sweep(self) -> None:
        """Let go of versions that were removed, so that their disk space is free."""
        with self._lock:
            for manifest_digest, version in list(self._versions.items()):
                if not version.path.exists():
                    self._versions.pop(manifest_digest).close()

    def close(self) -> None:
        with self._lock:
            while self._versions:
                self._versions.popitem()[1].close()

    def _get(self, manifest_digest: str) -> StoredVersion:
        version = self._versions.get(manifest_digest)
        if version is not None and not version.path.exists():
            self._versions.pop(manifest_digest).close()
            version = None
        if version is None:
            version = open_version(self.folder, manifest_digest)
            if version is None:
                raise WeightsError(
                    f"version {manifest_digest[:12]} is not here (any more): it was removed, "
                    "or never published from here"
                )
            self._versions[manifest_digest] = version
            log.info(
                "version_opened",
                manifest_digest=manifest_digest,
                num_bytes=version.manifest.num_bytes,
            )
        self._versions.move_to_end(manifest_digest)
        while len(self._versions) > self._versions_max:
            self._versions.popitem(last=False)[1].close()
        return version
