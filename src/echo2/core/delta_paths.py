"""The cheapest way from the version that a worker has to the one that it wants: pure.

What can be sent is an artifact: a full version, which needs nothing, or a delta, which needs
its base. A path is the artifacts to fetch and apply in order; it may begin with a full
version, of an anchor for instance, whatever the worker has. Its length is bounded, because
each delta that is applied writes a whole version to the disk: `step_bytes` says how many
bytes on the wire one more artifact has to save.

Who knows the artifacts, and who serves them, belongs to others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from echo2.messages import DELTA_PATH_MAX


@dataclass(frozen=True, slots=True)
class Artifact:
    """Something that can be fetched: `digest` names it, and gives the version `target`.

    `base` is the version that it needs; None for a full version, whose `digest` is `target`.
    `num_bytes` is what it costs on the wire.
    """

    digest: str
    target: str
    num_bytes: int
    base: str | None = None

    def __post_init__(self) -> None:
        if self.num_bytes < 0:
            raise ValueError(f"artifact {self.digest[:12]} has {self.num_bytes} bytes")
        if self.base is None and self.digest != self.target:
            raise ValueError(
                f"artifact {self.digest[:12]} has no base, so it is a version itself; its target "
                f"is {self.target[:12]}"
            )


def cheapest_path(
    have: str | None,
    want: str,
    artifacts: Iterable[Artifact],
    *,
    steps_max: int = DELTA_PATH_MAX,
    step_bytes: int = 0,
) -> list[Artifact] | None:
    """The artifacts to fetch, in the order in which they are applied; None when none lead there.

    Of paths with at most `steps_max` artifacts that with the fewest bytes, each artifact
    counting `step_bytes` more; of equal ones that with the fewest artifacts; of these the
    first by digest, so that everyone who asks gets the same. [] when it is here already.
    """
    if have == want:
        return []
    # The k-th round knows the cheapest path of at most k artifacts to each version: Bellman
    # and Ford's algorithm, which bounds the length by the number of rounds.
    found: dict[str | None, _Path] = {None: _Path(0, ())}
    if have is not None:
        found[have] = _Path(0, ())
    usable = sorted(artifacts, key=lambda artifact: (artifact.digest, artifact.base or ""))
    for _ in range(steps_max):
        before = dict(found)
        for artifact in usable:
            start = before.get(artifact.base)
            if start is None:
                continue
            path = _Path(start.cost + artifact.num_bytes + step_bytes, (*start.artifacts, artifact))
            known = found.get(artifact.target)
            if known is None or path.order < known.order:
                found[artifact.target] = path
        if found == before:
            break
    best = found.get(want)
    return None if best is None else list(best.artifacts)


@dataclass(frozen=True, slots=True)
class _Path:
    cost: int
    artifacts: tuple[Artifact, ...]

    @property
    def order(self) -> tuple[int, int, tuple[str, ...]]:
        return self.cost, len(self.artifacts), tuple(a.digest for a in self.artifacts)
