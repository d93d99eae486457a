"""A cap of what leaves a machine, in bytes of payload per second.

Promise: over any time t no more than (t + BURST_S) seconds' worth and one message more are let
through, in the order of the calls. The headers of Ethernet, IP and TCP come on top of the
payload: 66 bytes for each 1448 (RFC 793, 7323), so a cap of the line leaves PAYLOAD_SHARE of it.
More, and the queue would form in the line, where nobody chooses what goes first.
"""

from __future__ import annotations

import asyncio
from typing import Final

BURST_S: Final = 0.02
PAYLOAD_SHARE: Final = 0.95


class Pace:
    """For a line of `mbit` Mbit/s, headers included; 0.0 lets everything through."""

    def __init__(self, mbit: float) -> None:
        self.bytes_per_s = mbit * 1e6 / 8 * PAYLOAD_SHARE
        self._free_at = 0.0

    async def take(self, num_bytes: int) -> None:
        """Wait for one's turn."""
        if not self.bytes_per_s:
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now - BURST_S)
        starts_at = self._free_at
        self._free_at += num_bytes / self.bytes_per_s
        if starts_at > now:
            await asyncio.sleep(starts_at - now)
