"""Which versions exist, and which of them the surviving learner still descends from.

Each learner hello opens an incarnation at the step that it resumes from. A version of an
older incarnation is alive only if its step is at or below every later resume step: what
was sampled after the checkpoint that was resumed comes from weights that no longer lead
anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from echo2.core.staleness import ALLOWED, Verdict
from echo2.types import Version


@dataclass(slots=True)
class Lineage:
    """`starts` holds (incarnation, resume step), `published` the digest of each version;
    both ascend."""

    starts: list[tuple[int, int]] = field(default_factory=list)
    published: dict[Version, str] = field(default_factory=dict)

    @property
    def incarnation(self) -> int:
        """The newest one; 0 before any learner."""
        return self.starts[-1][0] if self.starts else 0

    @property
    def newest(self) -> Version | None:
        """The newest published version of the surviving line."""
        return next((v for v in reversed(self.published) if self.is_alive(v)), None)

    def last_published_step(self, incarnation: int) -> int | None:
        steps = [v.step for v in self.published if v.incarnation == incarnation]
        return max(steps, default=None)

    def publish(self, version: Version, digest: str) -> None:
        """The version exists. They become durable in almost every order, and stay sorted."""
        late = any(version < known for known in reversed(self.published))
        self.published[version] = digest
        if late:
            self.published = dict(sorted(self.published.items()))

    def begin(self, incarnation: int, resume_step: int) -> None:
        if incarnation <= self.incarnation:
            raise ValueError(f"incarnation {incarnation} is not above {self.incarnation}")
        self.starts.append((incarnation, resume_step))

    def is_alive(self, version: Version) -> bool:
        return version.incarnation <= self.incarnation and all(
            version.step <= resume_step
            for incarnation, resume_step in self.starts
            if incarnation > version.incarnation
        )

    def verdict(self, version: Version, *, step: int) -> Verdict:
        """May a rollout claim to come from `version` while v is `step`?"""
        if version.step > step:
            return Verdict(ok=False, reason=f"version {version} is above v = {step}")
        if version not in self.published:
            return Verdict(ok=False, reason=f"version {version} was never published")
        if not self.is_alive(version):
            return Verdict(
                ok=False,
                reason=f"version {version} is not in the line of incarnation {self.incarnation}",
            )
        return ALLOWED

    def all_verdict(self, versions: Iterable[Version], *, step: int) -> Verdict:
        """The same for every version that sampled a token of a group."""
        for version in versions:
            verdict = self.verdict(version, step=step)
            if not verdict:
                return verdict
        return ALLOWED

    def forget_below(self, step: int) -> None:
        """Drop versions that no rollout can be admissible from any more.

        The newest is always kept. Starts whose resume step is below `step` still decide
        over nothing that is kept, but the last one names the incarnation.
        """
        newest = self.newest
        for version in [v for v in self.published if v.step < step and v != newest]:
            del self.published[version]
        oldest = min((v.incarnation for v in self.published), default=self.incarnation)
        self.starts = [s for s in self.starts if s[0] >= oldest or s == self.starts[-1]]
