"""Which policy version a worker fetches, installs and serves.

Promise: at most one fetch and one install at a time; a version serves only after its own
install succeeded; what failed its canary here never serves while another version can.

Life-cycle of a version: announced -> fetching -> fetched (held while evals need the one
before) -> installing -> installed. A newer announcement replaces a fetch of which half or
less is here, never an install. A failure is tried again with back-off, a bounded number of
times. Leaves bytes, engines and clocks to the shell.
"""

from __future__ import annotations

from dataclasses import replace

from echo2 import messages
from echo2.core.worker_events import CancelFetch, Effect, Fetch, Install, Log, Send
from echo2.messages import VersionAnnounced, VersionInstalled
from echo2.types import Version

GIVEN_UP_MAX = 64
UNHEARD_MAX = 64
NEVER_SENT = 1 << 62
"""Above the number of any heartbeat."""
KEEP_FETCH_ABOVE = 0.5
"""A fetch with a larger share of its bytes here ends before a newer one begins."""
SUPERSEDED_MAX = 1
"""So many fetches are given up for a newer version until one is done."""


def backoff_s(failures: int, *, longest_s: float = 30.0) -> float:
    """1, 2, 4 ... seconds after the first, second, third failure in a row."""
    return float(min(longest_s, 2.0 ** min(failures - 1, 16)))


def clipped(text: str) -> str:
    """Text that fits a message; the end of a long one is cut off."""
    return text if len(text) <= 2000 else text[:1997] + "..."


class Versions:
    """`report` is the VersionInstalled that the coordinator has not been sent yet. Those that were
    sent are kept until a later heartbeat was echoed: a connection that is lost may take them
    with it, and what was sampled by such a version must not come from nowhere."""

    def __init__(self, *, needs_weights: bool, attempts_max: int) -> None:
        self.needs_weights = needs_weights
        self.attempts_max = attempts_max
        self.announced: VersionAnnounced | None = None
        self.fetching: VersionAnnounced | None = None
        self.fetched: VersionAnnounced | None = None
        self.installing: VersionAnnounced | None = None
        self.installed: VersionAnnounced | None = None
        self.last_good: VersionAnnounced | None = None
        self.report: VersionInstalled | None = None
        self.failures = 0
        """In a row, of whatever version, since an install succeeded."""
        self._share = 0.0
        self._num_superseded = 0
        self._fetch_s: dict[str, float] = {}
        self._attempts: dict[Version, int] = {}
        self._given_up: dict[Version, str] = {}
        self._retry_at = float("-inf")
        self._hold_since: float | None = None
        self._last_report: VersionInstalled | None = None
        self._unheard: list[tuple[int, VersionInstalled]] = []
        """With the number of the heartbeat whose echo says that it was heard."""

    def sent(self, sequence: int) -> VersionInstalled | None:
        """What is to be reported now; heartbeat `sequence` will be the next."""
        report = self.report
        self._remember(sequence)
        return report

    def heard(self, sequence: int) -> None:
        """The echo of a heartbeat: what was sent before it has arrived."""
        self._unheard = [entry for entry in self._unheard if entry[0] > sequence]

    def tell_again(self, sequence: int) -> list[VersionInstalled]:
        """After a lost connection: what may not have arrived, for the record alone."""
        self._unheard = [(sequence, report) for _, report in self._unheard]
        return [replace(report, past=True) for _, report in self._unheard]

    def _remember(self, sequence: int) -> None:
        report, self.report = self.report, None
        if report is not None:
            self._unheard = [*self._unheard[1 - UNHEARD_MAX :], (sequence, report)]

    @property
    def serving(self) -> Version | None:
        return None if self.installed is None else self.installed.version

    @property
    def exhausted(self) -> bool:
        """Nothing serves, and as many tries in a row as allowed have failed."""
        return self.installed is None and self.failures >= self.attempts_max

    def needed(self) -> frozenset[str]:
        """Manifests that must stay on disk."""
        stages = (self.fetching, self.fetched, self.installing, self.installed, self.last_good)
        return frozenset(stage.manifest_digest for stage in stages if stage is not None)

    def assets(self) -> frozenset[str]:
        """Manifests of the assets that came with what is installed."""
        installed = self.installed
        named = installed is not None and installed.assets_digest
        return frozenset((named,)) if named else frozenset()

    def conflict(self, announced: VersionAnnounced, *, first: bool) -> str:
        """Why this announcement belongs to another line of versions than this worker's;
        "" when it does not. `first`: it is the first one of a session."""
        newest = self.announced
        if first and newest is not None and announced.version < newest.version:
            return f"{announced.version} is the newest version there, and {newest.version} is here"
        for known in (newest, self.installed, self.installing, self.fetched, self.fetching):
            if (
                known is not None
                and known.version == announced.version
                and known.manifest_digest != announced.manifest_digest
            ):
                return (
                    f"version {announced.version} is {announced.manifest_digest[:12]} there and "
                    f"{known.manifest_digest[:12]} here"
                )
        return ""

    def announce(self, announced: VersionAnnounced, now: float) -> list[Effect]:
        if self.installed is not None and announced.version == self.installed.version:
            self.report = self._last_report
        newest = self.announced
        if newest is not None and announced.version < newest.version:
            return [Log("info", "version_ignored", _fields(announced, newer=str(newest.version)))]
        if newest is None or announced.version > newest.version:
            self._retry_at = now
        self.announced = announced
        return []

    def fetch_progress(self, manifest_digest: str, share: float) -> None:
        if self.fetching is not None and self.fetching.manifest_digest == manifest_digest:
            self._share = max(self._share, min(share, 1.0))

    def fetch_done(self, manifest_digest: str, fetch_s: float) -> None:
        """A fetch that was cancelled meanwhile is not under way and changes nothing."""
        fetching = self.fetching
        if fetching is not None and fetching.manifest_digest == manifest_digest:
            self.fetching, self._num_superseded = None, 0
            self._take(fetching, fetch_s)

    def fetch_failed(self, manifest_digest: str, text: str, now: float) -> list[Effect]:
        fetching = self.fetching
        if fetching is None or fetching.manifest_digest != manifest_digest:
            return []
        self.fetching = None
        return self._failed(fetching, "fetch", text, now)

    def advance(self, now: float, *, has_assets: bool) -> list[Effect]:
        """Begin the fetch that is wanted now, if any. `has_assets`: the run's assets are
        known; without them no model can be made."""
        wanted = self._wanted()
        if wanted is None or any(
            stage is not None and stage.version == wanted.version
            for stage in (self.fetched, self.installing)
        ):
            return []
        effects: list[Effect] = []
        if self.fetching is not None:
            if not self._gives_way(self.fetching, wanted):
                return []
            self._num_superseded += self.fetching.version != wanted.version
            effects.append(CancelFetch(self.fetching.manifest_digest))
            effects.append(Log("info", "version_superseded", _fields(self.fetching)))
            self.fetching = None
        elif now < self._retry_at:
            return []
        if wanted.origin == "" and not self.needs_weights:
            self._take(wanted, 0.0)
            return effects
        lacks = "an origin" if wanted.origin == "" else "assets (config.json)"
        if self.needs_weights and not (wanted.origin and has_assets):
            text = f"it was announced without {lacks}; its publisher must name them"
            return effects + self._failed(wanted, "fetch", text, now)
        self.fetching, self._share = wanted, 0.0
        fetch = Fetch(
            wanted.manifest_digest,
            wanted.origin,
            wanted.origin_key,
            wanted.version,
            path=wanted.path,
            stripes=wanted.stripes,
            serves=wanted.serves,
            planned_s=wanted.planned_s,
        )
        return [*effects, fetch]

    def may_install(self, now: float, *, hold_s: float | None) -> bool:
        """`hold_s`: how long unfinished evals of the installed version may put off the
        flip; None when there are none."""
        if self.fetched is None or self.installing is not None:
            return False
        if hold_s is None or self.installed is None:
            return True
        if self._hold_since is None:
            self._hold_since = now
        return now >= self._hold_since + hold_s

    def begin_install(self, epoch: int) -> Install:
        assert self.fetched is not None
        assert self.installing is None
        self.installing, self.fetched, self._hold_since = self.fetched, None, None
        return Install(epoch, self.installing, self.installed)

    def install_done(
        self, *, install_s: float, pause_s: float, canary_diff: float | None
    ) -> list[Effect]:
        assert self.installing is not None
        installed, self.installing = self.installing, None
        self.installed = self.last_good = installed
        self.failures = 0
        self._attempts.clear()
        self._remember(NEVER_SENT)
        self._last_report = self.report = VersionInstalled(
            version=installed.version,
            manifest_digest=installed.manifest_digest,
            fetch_s=self._fetch_s.get(installed.manifest_digest, 0.0),
            install_s=install_s,
            pause_s=pause_s,
            canary_diff=canary_diff,
        )
        self._fetch_s = {
            digest: seconds for digest, seconds in self._fetch_s.items() if digest in self.needed()
        }
        fields = _fields(installed, install_s=install_s, pause_s=pause_s, canary_diff=canary_diff)
        return [Log("info", "version_installed", fields)]

    def install_failed(self, stage: str, text: str, now: float, *, restored: bool) -> list[Effect]:
        assert self.installing is not None
        failed, self.installing = self.installing, None
        if not restored:
            self.installed = None
        return self._failed(failed, stage, text, now)

    def engine_lost(self) -> None:
        """The engine's memory is gone; the last version that served is still on disk."""
        self._remember(NEVER_SENT)
        self.installing = self.installed = self._hold_since = None
        if self.fetched is None:
            self.fetched = self.last_good

    def stop(self) -> list[Effect]:
        if self.fetching is None:
            return []
        fetching, self.fetching = self.fetching, None
        return [CancelFetch(fetching.manifest_digest)]

    def _gives_way(self, fetching: VersionAnnounced, wanted: VersionAnnounced) -> bool:
        """A young fetch, to a newer version; one of a whole version also to deltas that lead to
        it, of which the coordinator tells as soon as it knows what serves here."""
        if self._share > KEEP_FETCH_ABOVE:
            return False
        if fetching.version == wanted.version:
            return bool(wanted.path) and not fetching.path
        return self._num_superseded < SUPERSEDED_MAX

    def _wanted(self) -> VersionAnnounced | None:
        """The newest announced version, or after an engine's death the last that served."""
        for announced in (self.announced, self.last_good):
            if announced is None or announced.version in self._given_up:
                continue
            if self.installed is None or announced.version > self.installed.version:
                return announced
        return None

    def _take(self, announced: VersionAnnounced, fetch_s: float) -> None:
        if self.fetched is not None and self.fetched.version > announced.version:
            return
        self.fetched = announced
        self._fetch_s[announced.manifest_digest] = fetch_s

    def _failed(self, failed: VersionAnnounced, stage: str, text: str, now: float) -> list[Effect]:
        attempts = self._attempts[failed.version] = self._attempts.get(failed.version, 0) + 1
        self.failures += 1
        self._retry_at = now + backoff_s(attempts)
        other = self.last_good is not None and self.last_good.version != failed.version
        if (stage == "canary" and other) or attempts >= self.attempts_max:
            self._given_up[failed.version] = stage
            while len(self._given_up) > GIVEN_UP_MAX:
                del self._given_up[next(iter(self._given_up))]
        told = messages.InstallFailed(
            version=failed.version,
            stage="canary" if stage == "canary" else "fetch" if stage == "fetch" else "install",
            text=clipped(text),
            serving=self.serving,
        )
        fields = _fields(failed, stage=stage, text=text, attempts=attempts)
        return [Send(told), Log("error", "install_failed", fields)]


def _fields(announced: VersionAnnounced, **more: object) -> dict[str, object]:
    fields: dict[str, object] = {
        "version": str(announced.version),
        "manifest_digest": announced.manifest_digest,
    }
    return fields | more
