"""The same groups through Ray's actor calls: for `coordinator_load.py`, in a Python with Ray.

    RAY_PYTHON benchmarks/coordinator_ray.py [--callers 1] [--seconds 10] [--in-flight 16]

One actor keeps the newest groups that it was given, in memory, and answers; callers are
processes of their own, each with so many calls in flight, and wait for the oldest first. A
group is a dict of NumPy arrays, small enough for Ray to send it with the call. Prints one line
of JSON: groups a second from the first to the last answer of all callers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from typing import Any

import numpy as np
import ray

KEPT = 1024
WARM_UP_S = 3.0


def a_group(seed: int, group_size: int, tokens: int, prompt: int) -> dict[str, Any]:
    """What `load_clients.Groups` sends, as a Ray program would have it."""
    rng = np.random.default_rng(seed)
    size = (group_size, tokens)
    mask = np.ones(size, np.uint8)
    mask[:, :prompt] = 0
    return {
        "lease": "l0.0",
        "group": "g0",
        "token_ids": rng.integers(0, 32_000, size, dtype=np.int32),
        "logprobs": (-rng.exponential(1.0, size)).astype(np.float32),
        "loss_mask": mask,
        "rewards": rng.random(group_size).astype(np.float32),
        "versions": np.zeros((group_size, 2), np.int32),
        "lengths": np.full(group_size, tokens, np.int32),
    }


@ray.remote
class Buffer:
    def __init__(self) -> None:
        self.groups: deque[dict[str, Any]] = deque(maxlen=KEPT)

    def add(self, group: dict[str, Any]) -> str:
        self.groups.append(group)
        return str(group["lease"])


@ray.remote
class Caller:
    def __init__(self, buffer: Any, seed: int, shape: tuple[int, int, int]) -> None:
        self.buffer = buffer
        self.groups = [a_group(seed * 100 + place, *shape) for place in range(8)]

    def run(self, seconds: float, in_flight: int) -> tuple[int, float]:
        """(answers, seconds)"""
        calls: deque[Any] = deque()
        sent = answered = 0
        began = time.monotonic()
        until = began + seconds
        while time.monotonic() < until:
            while len(calls) < in_flight:
                calls.append(self.buffer.add.remote(self.groups[sent % 8]))
                sent += 1
            ray.get(calls.popleft())
            answered += 1
        took = time.monotonic() - began
        ray.get(list(calls))
        return answered, took


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--callers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=32)
    options = parser.parse_args()
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error")
    shape = (options.group_size, options.tokens, options.prompt)
    buffer = Buffer.remote()
    callers = [Caller.remote(buffer, seed, shape) for seed in range(options.callers)]
    ray.get([caller.run.remote(WARM_UP_S, options.in_flight) for caller in callers])
    found = ray.get([caller.run.remote(options.seconds, options.in_flight) for caller in callers])
    rate = sum(answered / seconds for answered, seconds in found)
    print(json.dumps({"groups_per_s": round(rate), "ray": ray.__version__}), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
