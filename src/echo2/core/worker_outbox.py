"""Results of a worker until the coordinator settled them.

Promise: a result stays until its acknowledgement, and is sent again in each new session
and after a silence. At most `bytes_in_flight_max` unacknowledged bytes are under way (one
result may always go); with KEPT_WINDOWS_MAX times as many kept, no lease is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from echo2.core.worker_events import Effect, Log, Send
from echo2.messages import GroupResult
from echo2.types import LeaseId

KEPT_WINDOWS_MAX: Final = 4


@dataclass(slots=True)
class _Kept:
    result: GroupResult
    num_bytes: int
    sent_at: float | None = None
    resend_s: float = 0.0


class Outbox:
    """Results without an acknowledgement, oldest first."""

    def __init__(self, *, bytes_in_flight_max: int) -> None:
        self.bytes_in_flight_max = bytes_in_flight_max
        self._kept: dict[LeaseId, _Kept] = {}
        self._bytes_in_flight = 0
        self._bytes_kept = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, lease: object) -> bool:
        return lease in self._kept

    @property
    def leases(self) -> tuple[LeaseId, ...]:
        return tuple(self._kept)

    @property
    def full(self) -> str:
        """Why no further lease should be taken; "" when there is room."""
        limit = KEPT_WINDOWS_MAX * self.bytes_in_flight_max
        if self._bytes_kept < limit:
            return ""
        return (
            f"{len(self._kept)} results of {self._bytes_kept} bytes wait for their "
            f"acknowledgement; at most {limit} bytes are kept (net.rollout_bytes_in_flight)"
        )

    def add(self, result: GroupResult) -> None:
        size = result_bytes(result)
        self._kept[result.lease] = _Kept(result, size)
        self._bytes_kept += size

    def acknowledge(self, lease: LeaseId) -> bool:
        kept = self._kept.pop(lease, None)
        if kept is None:
            return False
        self._bytes_kept -= kept.num_bytes
        if kept.sent_at is not None:
            self._bytes_in_flight -= kept.num_bytes
        return True

    def session_began(self) -> None:
        """Whatever was under way may be lost: all go again."""
        for kept in self._kept.values():
            kept.sent_at = None
        self._bytes_in_flight = 0

    def flush(self, now: float, *, resend_s: float) -> list[Effect]:
        """Send what the window allows, and again what was not acknowledged for so long
        (twice as long after each time)."""
        effects: list[Effect] = []
        for kept in self._kept.values():
            if kept.sent_at is None:
                fits = self._bytes_in_flight + kept.num_bytes <= self.bytes_in_flight_max
                if not fits and self._bytes_in_flight > 0:
                    break
                self._bytes_in_flight += kept.num_bytes
                kept.resend_s = resend_s
            elif now >= kept.sent_at + kept.resend_s:
                kept.resend_s *= 2
                fields = {"lease": kept.result.lease, "silent_s": round(now - kept.sent_at, 3)}
                effects.append(Log("warning", "result_sent_again", fields))
            else:
                continue
            kept.sent_at = now
            effects.append(Send(kept.result))
        return effects


def result_bytes(result: GroupResult) -> int:
    """Size on the wire, about: the frames and what the header says of each trajectory."""
    spans = sum(len(trajectory.spans) for trajectory in result.trajectories)
    frames = len(result.token_ids) + len(result.logprobs) + len(result.loss_mask)
    return frames + 256 + 128 * len(result.trajectories) + 32 * spans
