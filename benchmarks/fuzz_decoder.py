"""Millions of hostile messages through the decoder: what came out, how long it took, memory.

    python benchmarks/fuzz_decoder.py [--messages 5000000] [--seconds S] [--seed 0] [--out FILE]

Each message begins as a valid one of some class (tests/security/mutator.py) and is changed in
bytes, fields, frames or route. Checked of each (tests/security/decoder_target.py): a message or
an error with a documented reason comes out; what was taken encodes and decodes to itself. Of
all: the process's memory stays within MEMORY_MB_MAX of what it was after the first messages, and
no message takes longer than MESSAGE_S_MAX.

With `--engine atheris` the same target runs under libFuzzer, which keeps what reaches new
branches of the decoder and goes on from there; ours is the mutator then too, beside its own.
That needs atheris (`pip install atheris`, 3.0 or later, CPython on Linux) in the environment;
`--engine auto`, the default, takes it where it is installed and the mutator alone elsewhere.
Prints one JSON object; exit code 1 when a check failed, with the message that did it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import random
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

MEMORY_MB_MAX: Final = 64.0
MESSAGE_S_MAX: Final = 1.0
WARM_UP: Final = 20_000
LOOK_EVERY: Final = 1000
SLOWEST: Final = 5
REPEATS: Final = 3
"""A message that seems slow is timed again: the machine may have been busy elsewhere."""
INPUT_MAX_BYTES: Final = 1 << 16


class Check:
    """The target, with its books."""

    def __init__(self) -> None:
        from security.decoder_target import decodes_or_is_refused

        self._target = decodes_or_is_refused
        self.num_messages = 0
        self.results: Counter[str] = Counter()
        self.taken: Counter[str] = Counter()
        self.slowest: list[tuple[float, str]] = []
        self.memory_first_mb = 0.0
        self.memory_most_mb = 0.0
        self._slow_s = 0.0

    def run(self, frames: list[bytes], route: Any) -> None:
        began = time.perf_counter()
        result = self._target(frames, route)
        seconds = time.perf_counter() - began
        if isinstance(result, str):
            self.results[result] += 1
        else:
            self.results["taken"] += 1
            self.taken[type(result).__name__] += 1
        if seconds > self._slow_s:
            self._note_slow(frames, route)
        self.num_messages += 1
        if self.num_messages % LOOK_EVERY == 0:
            self._look_at_memory()

    def report(self) -> dict[str, Any]:
        return {
            "messages": self.num_messages,
            "results": dict(self.results.most_common()),
            "classes_taken": len(self.taken),
            "slowest_ms": [[round(1e3 * s, 2), what] for s, what in self.slowest],
            "memory_mb_after_warm_up": round(self.memory_first_mb, 1),
            "memory_mb_most": round(self.memory_most_mb, 1),
            "memory_mb_peak_of_process": round(
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1
            ),
        }

    def _note_slow(self, frames: list[bytes], route: Any) -> None:
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            self._target(frames, route)
            times.append(time.perf_counter() - began)
        seconds = min(times)
        if seconds > MESSAGE_S_MAX:
            raise AssertionError(f"a message of {sum(map(len, frames))} bytes took {seconds:.2f} s")
        head = frames[0][:24] if frames else b""
        what = f"{head!r}, {sum(map(len, frames))} bytes in {len(frames)} frames"
        self.slowest = sorted([*self.slowest, (seconds, what)], reverse=True)[:SLOWEST]
        if len(self.slowest) == SLOWEST:
            self._slow_s = self.slowest[-1][0]

    def _look_at_memory(self) -> None:
        resident = resident_mb()
        if self.num_messages <= WARM_UP or not self.memory_first_mb:
            self.memory_first_mb = resident
        self.memory_most_mb = max(self.memory_most_mb, resident)
        if resident > self.memory_first_mb + MEMORY_MB_MAX:
            raise AssertionError(
                f"memory grew from {self.memory_first_mb:.0f} to {resident:.0f} MB within "
                f"{self.num_messages} messages"
            )


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 1e6


# --------------------------------------------------------------------------- the mutator alone


def fuzz_random(messages: int, seconds: float, seed: int) -> dict[str, Any]:
    from security.mutator import Mutator

    mutator = Mutator(random.Random(seed))
    check = Check()
    began = time.perf_counter()
    deadline = began + seconds
    problem = ""
    frames: list[bytes] = []
    while check.num_messages < messages and time.perf_counter() < deadline:
        if check.num_messages % 20:
            frames, route = mutator.mutated()
        else:
            frames, route = mutator.noise(), mutator.valid()[1]
        try:
            check.run(frames, route)
        except Exception as error:  # whatever it is, it is what we look for
            problem = f"{type(error).__name__}: {error}; frames {frames!r:.2000} on {route}"
            break
    wall_s = time.perf_counter() - began
    return {**check.report(), "wall_s": round(wall_s, 1), "problem": problem}


# ------------------------------------------------------------------------------------ atheris


def fuzz_atheris(messages: int, seconds: float, seed: int) -> dict[str, Any]:
    """In a process of its own: libFuzzer ends the process that it runs in."""
    with tempfile.TemporaryDirectory(prefix="fuzz-decoder-") as name:
        folder = Path(name)
        limits = ["--messages", str(messages), "--seconds", str(seconds), "--seed", str(seed)]
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, __file__, "--inner", str(folder), *limits],
            capture_output=True,
            text=True,
            check=False,
        )
        wall_s = time.perf_counter() - began
        books = folder / "report.json"
        found = json.loads(books.read_text(encoding="utf-8")) if books.exists() else {}
        lines = done.stderr.splitlines()
        last = [line for line in lines if "cov:" in line]
        return {
            **found,
            "wall_s": round(wall_s, 1),
            "coverage": last[-1].strip() if last else "",
            "corpus": len(list((folder / "corpus").glob("*"))),
            "problem": "" if not done.returncode else done.stdout + "\n".join(lines[-40:]),
        }


def inner(folder: Path, messages: int, seconds: float, seed: int) -> None:
    """What `fuzz_atheris` starts."""
    import atheris

    with atheris.instrument_imports(include=["echo2.wire", "echo2.messages", "echo2.types"]):
        import echo2.wire
    from security.mutator import Mutator

    rng = random.Random(seed)
    mutator = Mutator(rng)
    check = Check()
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(2000):
        frames, route = mutator.valid()
        (corpus / str(number)).write_bytes(container_of(frames, route))
    deadline = time.monotonic() + seconds

    def one_input(data: bytes) -> None:
        frames, route = frames_of(data)
        check.run(frames, route)
        if check.num_messages >= messages or time.monotonic() > deadline:
            (folder / "report.json").write_text(json.dumps(check.report()), encoding="utf-8")
            os._exit(0)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng.seed(seed)
        frames, route = frames_of(data)
        if rng.random() < 0.6:
            changed = mutator.mutate(frames)
        elif frames:
            place = rng.randrange(len(frames))
            frames[place] = bytes(atheris.Mutate(frames[place], max(1, len(frames[place]) + 64)))
            changed = frames
        else:
            changed = mutator.valid()[0]
        if rng.random() < 0.03:
            route = mutator.valid()[1]
        made = container_of(changed, route)
        return made if len(made) <= max_size else data[:max_size]

    atheris.Setup(
        [
            *("fuzz_decoder", str(corpus), f"-max_len={INPUT_MAX_BYTES}", f"-seed={seed + 1}"),
            f"-artifact_prefix={folder}/",
            f"-timeout={int(10 * MESSAGE_S_MAX)}",
            "-rss_limit_mb=2048",
        ],
        one_input,
        custom_mutator=mutate,
    )
    assert echo2.wire.FRAMES_MAX
    atheris.Fuzz()


def container_of(frames: Sequence[bytes], route: Any) -> bytes:
    """One input: where it is sent, then each frame with its length."""
    from echo2.messages import Lane, Role

    lane, sender, receiver = route
    head = bytes((list(Lane).index(lane), list(Role).index(sender), list(Role).index(receiver)))
    return head + b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)


def frames_of(data: bytes) -> tuple[list[bytes], Any]:
    """Of any bytes: lengths that lead beyond the end are cut."""
    from echo2.messages import Lane, Role

    head, rest = data[:3].ljust(3, b"\0"), data[3:]
    route = (
        list(Lane)[head[0] % len(Lane)],
        list(Role)[head[1] % len(Role)],
        list(Role)[head[2] % len(Role)],
    )
    frames: list[bytes] = []
    while len(rest) >= 4 and len(frames) < 16:
        size = struct.unpack("<I", rest[:4])[0]
        frames.append(rest[4 : 4 + size])
        rest = rest[4 + size :]
    return frames, route


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--messages", type=int, default=5_000_000)
    parser.add_argument("--seconds", type=float, default=3600.0, help="end after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("auto", "atheris", "random"), default="auto")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inner", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    limits = (options.messages, options.seconds, options.seed)
    if options.inner:
        inner(options.inner, *limits)
        return 0
    has_atheris = importlib.util.find_spec("atheris") is not None
    if options.engine == "atheris" and not has_atheris:
        print(
            "atheris is not installed in this Python; pip install atheris, in an environment of "
            "its own with echo2, or give --engine random",
            file=sys.stderr,
        )
        return 2
    engine = "random" if options.engine == "random" or not has_atheris else "atheris"
    found = (fuzz_atheris if engine == "atheris" else fuzz_random)(*limits)
    report = {
        "benchmark": "fuzz_decoder",
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "engine": engine,
        "seed": options.seed,
        "goal": {
            "messages": options.messages,
            "problem": "",
            "message_s_max": MESSAGE_S_MAX,
            "memory_mb_growth_max": MEMORY_MB_MAX,
        },
        **found,
        "messages_per_s": round(found.get("messages", 0) / max(1e-9, found["wall_s"])),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    return 1 if found["problem"] or not found.get("messages") else 0


if __name__ == "__main__":
    sys.exit(main())
