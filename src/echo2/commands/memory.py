"""Peak memory of the local processes of a run, each with all its descendants.

Read from /proc on Linux (`VmHWM`, the kernel's own peak of each process); elsewhere nothing
is known, and nothing is told. The peak of a tree is the sum of its processes' peaks: an
upper bound, since they need not fall together and share some pages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")


class MemoryWatch:
    """Sampled while the run goes; a process that comes and goes between two samples is
    missed."""

    def __init__(self) -> None:
        self._peaks: dict[str, dict[int, int]] = defaultdict(dict)
        self._trees: dict[str, int] = {}

    def sample(self, roots: Mapping[str, int | None]) -> None:
        """`roots`: name -> process id, None when it does not run."""
        children = _children()
        for name, root in roots.items():
            if root is None:
                continue
            peaks = self._peaks[name]
            alive = 0
            for pid in _tree(root, children):
                peak = _peak_bytes(pid)
                if peak:
                    peaks[pid] = max(peak, peaks.get(pid, 0))
                    alive += peaks[pid]
            self._trees[name] = max(alive, self._trees.get(name, 0))

    def peaks(self) -> dict[str, int]:
        """Name -> most bytes that its processes, alive at one time, had at their peaks."""
        return {name: size for name, size in self._trees.items() if size}


def told_peaks(peaks: Mapping[str, int]) -> str:
    """As "learner 1.2 GB, w-1 2.9 GB"."""
    return ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in peaks.items())


def _children() -> dict[int, list[int]]:
    """Process id -> ids of its children."""
    found: dict[int, list[int]] = defaultdict(list)
    if not _PROC.is_dir():
        return found
    for path in _PROC.iterdir():
        if not path.name.isdigit():
            continue
        try:
            stat = (path / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it ended in between
            continue
        parent = stat.rpartition(")")[2].split()[1]
        found[int(parent)].append(int(path.name))
    return found


def _tree(root: int, children: Mapping[int, Iterable[int]]) -> list[int]:
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting.extend(children.get(pid, ()))
    return found


def _peak_bytes(pid: int) -> int:
    try:
        status = (_PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it ended, or there is no /proc
        return 0
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
