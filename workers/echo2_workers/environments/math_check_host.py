"""The process that compares answers; `math_checks.py` starts and kills it.

to the child    {said, wanted}
to the parent   {ready} once, then {equal} for each, in order
"""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
from typing import Final

from echo2.net.pipe import PipeBrokenError, child_pipe
from echo2_workers.environments.extras import require

MEMORY_BYTES_MAX: Final = 2 << 30


async def serve() -> None:
    math_verify = require("math_verify", extra="envs", environment="jsonl")
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    pipe = await child_pipe()
    await pipe.send({"ready": True})
    while (received := await pipe.receive()) is not None:
        header, _ = received
        try:
            # No limits of its own: they are signals, and the parent's limit is the real one.
            wanted = _parsed(math_verify, header["wanted"])
            said = _parsed(math_verify, header["said"])
            equal = bool(math_verify.verify(wanted, said, timeout_seconds=None))
        except Exception:  # what cannot be read is not equal
            equal = False
        await pipe.send({"equal": equal})


def _parsed(math_verify: object, text: str) -> object:
    """The expressions in `text`; bare LaTeX is read as such."""
    parse = math_verify.parse  # type: ignore[attr-defined]
    found = parse(text, parsing_timeout=None)
    if not found or ("\\" in text and "$" not in text and "\\boxed" not in text):
        found = parse(f"${text}$", parsing_timeout=None) or found
    return found


def main() -> None:
    try:
        asyncio.run(serve())
    except PipeBrokenError:
        sys.exit("the environment process is gone")


if __name__ == "__main__":
    main()
