"""Which chunks to ask for next: a bounded window of requests, as a pure state machine.

    wanted --take--> asked --arrived--> checking --verified--> done
      ^                |                    `-- wrong ------.
      `--- expired, overtaken, disconnected, given back --'

Chunks of one peer arrive in order. So a request counts as lost when nothing at all came for
`request_timeout_s` since it was made, or when twice the window that was asked for later is
here already; a slow link alone makes nothing be asked for twice. Indexes inside, bytes,
sockets and the clock outside.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """One chunk asked for: its place in the order of requests, and when."""

    serial: int
    asked_at: float


class ChunkWindow:
    """Requests for the chunks `wanted` in order, at most `requests_max` at once.

    `faults_max` wrong payloads for one chunk make `wrong` say that it is enough.
    """

    def __init__(
        self,
        wanted: Iterable[int],
        *,
        requests_max: int,
        request_timeout_s: float,
        faults_max: int,
        now: float,
    ) -> None:
        self.requests_max = requests_max
        self.request_timeout_s = request_timeout_s
        self.faults_max = faults_max
        self.num_reasked = 0
        self._wanted = deque(wanted)
        self._asked: dict[int, Request] = {}  # in order of serial
        self._checking: set[int] = set()
        self._faults: Counter[int] = Counter()
        self._serial = 0
        self._arrived_serial = -1
        self._arrived_at = now

    @property
    def is_done(self) -> bool:
        return not (self._wanted or self._asked or self._checking)

    @property
    def num_asked(self) -> int:
        return len(self._asked)

    @property
    def num_faults(self) -> int:
        return self._faults.total()

    def take(self, now: float, *, at_most: int) -> tuple[int, ...]:
        """The next indexes to ask for; they count as asked from now."""
        count = min(at_most, self.requests_max - len(self._asked), len(self._wanted))
        taken = tuple(self._wanted.popleft() for _ in range(max(count, 0)))
        for index in taken:
            self._asked[index] = Request(self._serial, now)
            self._serial += 1
        return taken

    def give_back(self, indexes: tuple[int, ...]) -> None:
        """The request for what `take` returned could not be sent."""
        for index in indexes:
            del self._asked[index]
        self._wanted.extendleft(reversed(indexes))

    def arrived(self, index: int, now: float) -> bool:
        """A payload came; False when it was not asked for (or came already): drop it."""
        request = self._asked.pop(index, None)
        if request is None:
            return False
        self._checking.add(index)
        self._arrived_serial = max(self._arrived_serial, request.serial)
        self._arrived_at = now
        return True

    def verified(self, index: int) -> None:
        self._checking.remove(index)

    def wrong(self, index: int) -> bool:
        """The payload was wrong: ask once more. False when it was so too often."""
        self._checking.remove(index)
        self._faults[index] += 1
        self._wanted.appendleft(index)
        return self._faults[index] < self.faults_max

    def expire(self, now: float) -> list[int]:
        """Requests that count as lost go back to the wanted ones; returns them."""
        lost = []
        for index, request in self._asked.items():
            silent_s = now - max(request.asked_at, self._arrived_at)
            overtaken = self._arrived_serial - request.serial >= 2 * self.requests_max
            if silent_s < self.request_timeout_s and not overtaken:
                break  # those after it were asked for later
            lost.append(index)
        for index in lost:
            del self._asked[index]
        self._wanted.extendleft(reversed(lost))
        self.num_reasked += len(lost)
        return lost

    def disconnected(self) -> None:
        """Whatever was asked for is lost with the connection; ask again on the next."""
        self.num_reasked += len(self._asked)
        self._wanted.extendleft(reversed(list(self._asked)))
        self._asked.clear()

    def next_expiry(self) -> float | None:
        """When `expire` is due if nothing arrives; None when nothing is asked for."""
        for request in self._asked.values():
            return max(request.asked_at, self._arrived_at) + self.request_timeout_s
        return None
