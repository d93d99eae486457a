"""Held-out tasks by hash: what is in which split depends on nothing but seed and content."""

from __future__ import annotations

import hashlib

from echo2_workers.environment import Split


def split_of(content: str, *, seed: int, eval_share: float) -> Split:
    """The split of a task's content; about `eval_share` of all are in "eval"."""
    digest = hashlib.blake2b(f"{seed}:{content}".encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest, "big") < eval_share * 2.0**64 else "train"
