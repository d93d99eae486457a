"""Peak memory of a process tree, read from the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from echo2.commands.memory import MemoryWatch, told_peaks

HOLDER = "import sys; held = bytearray(80 << 20); print('held', flush=True); sys.stdin.read()"
PARENT = (
    "import subprocess, sys; "
    f"child = subprocess.Popen([sys.executable, '-c', {HOLDER!r}], stdin=subprocess.PIPE); "
    "sys.stdin.read(); child.communicate()"
)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_tree_has_the_memory_of_its_descendants_and_none_is_told_for_who_does_not_run() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline().strip() == b"held"
        watch = MemoryWatch()
        watch.sample({"holder": parent.pid, "gone": None})
        peaks = watch.peaks()
    finally:
        parent.communicate()
    assert peaks.keys() == {"holder"}
    assert peaks["holder"] > 80 << 20
    watch.sample({"holder": parent.pid})
    assert watch.peaks() == peaks, "a process that ended keeps its peak"


def test_peaks_are_told_in_gigabytes() -> None:
    assert told_peaks({"learner": 1_234_000_000, "w-1": 2 * 10**9}) == (
        "learner 1.23 GB, w-1 2.00 GB"
    )


def test_this_process_has_a_peak() -> None:
    watch = MemoryWatch()
    watch.sample({"me": os.getpid()})
    assert watch.peaks().get("me", 0) > 1 << 20 or not Path("/proc/self").exists()
