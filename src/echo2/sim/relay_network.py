"""Links between relays on a virtual clock: dialing, order, delay, rates, loss and silence.

A link is one connection between two hosts. It delivers in order; what is under way when it is
lost is lost with it. A host sends one payload at a time over its uplink and takes one at a
time from its downlink; signs of life and requests wait behind the payloads of their link, and
cost nothing else. With `buffer_bytes` a link takes so many bytes before the uplink does, as a
kernel's socket does: links share the uplink in turn then, and what is in a buffer cannot be
taken back. A host that is paused neither hears nor acts, though its links stay up; one
that vanished (`quietly`) leaves links that look up until `LOST_NOTICE_S` later.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, Protocol

from echo2.sim.timeline import Timeline

LOST_NOTICE_S: Final = 20.0
DIAL_PATIENCE_S: Final = 5.0


class Listener(Protocol):
    """What a host does about its links."""

    def link_up(self, other: str) -> None: ...

    def link_down(self, other: str) -> None: ...

    def dial_failed(self, other: str) -> None: ...


@dataclass(eq=False)
class Line:
    """A host's line: bytes per second up and down, seconds to anybody, one way."""

    name: str
    up_per_s: float
    down_per_s: float
    delay_s: float
    accepts: bool = True
    listener: Listener | None = None
    """None: no process runs there."""
    reachable: bool = True
    paused: bool = False
    born: int = 0
    sending: bool = False
    down_free_s: float = 0.0
    buffer_bytes: int = 0
    _buffers: dict[str, deque[tuple[int, Any]]] = field(default_factory=dict)
    """By receiver: bytes (0: a message) and what is to be called to send them."""
    _inbox: list[Callable[[], None]] = field(default_factory=list)


class RelayNetwork:
    """`lines` by name. All randomness is `rng`'s."""

    def __init__(self, timeline: Timeline, rng: Random) -> None:
        self.timeline = timeline
        self.lines: dict[str, Line] = {}
        self.duplication = 0.0
        self._rng = rng
        self._links: dict[frozenset[str], int] = {}
        self._dialing: set[frozenset[str]] = set()
        self._num_links = 0
        self._last: dict[tuple[str, str], float] = {}

    # ------------------------------------------------------------------------- hosts

    def start(self, name: str, listener: Listener) -> None:
        line = self.lines[name]
        line.listener, line.paused, line.reachable = listener, False, True
        line.sending = False
        line._buffers.clear()
        line.down_free_s = 0.0
        line.born += 1

    def stop(self, name: str, *, quietly: bool = False) -> None:
        """The process ends; `quietly`: the host is gone, and nobody is told for a while."""
        line = self.lines[name]
        line.listener = None
        line.reachable = not quietly
        line._inbox.clear()
        for link in [link for link in self._links if name in link]:
            if quietly:
                self.timeline.after(LOST_NOTICE_S, self._lose, link, self._links[link])
            else:
                self._lose(link, self._links[link])

    def pause(self, name: str, seconds: float) -> None:
        line = self.lines[name]
        if line.listener is not None and not line.paused:
            line.paused = True
            self.timeline.after(seconds, self._resume, line, line.born)

    def _resume(self, line: Line, born: int) -> None:
        if line.born != born or line.listener is None:
            return
        line.paused = False
        waiting, line._inbox = line._inbox, []
        for action in waiting:
            if line.born == born and line.listener is not None:
                action()

    # ------------------------------------------------------------------------- links

    def is_up(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._links

    def dial(self, one: str, other: str) -> None:
        """`link_up` at both ends, or `dial_failed`."""
        pair = frozenset((one, other))
        if pair in self._links or pair in self._dialing:
            return
        self._dialing.add(pair)
        delay_s = 3.0 * self._delay_s(one, other)
        self.timeline.after(delay_s, self._dialed, one, other, self.lines[one].born)

    def cut(self, one: str, other: str) -> None:
        """The link is lost, and both ends are told."""
        pair = frozenset((one, other))
        if pair in self._links:
            self._lose(pair, self._links[pair])

    def links_of(self, name: str) -> list[str]:
        return sorted(other for link in self._links if name in link for other in link - {name})

    def _dialed(self, one: str, other: str, born: int) -> None:
        pair = frozenset((one, other))
        line, target = self.lines[one], self.lines[other]
        if line.born != born or line.listener is None:
            self._dialing.discard(pair)
        elif target.listener is None or target.paused or not target.accepts:
            late_s = DIAL_PATIENCE_S if target.paused or not target.reachable else 0.0
            self.timeline.after(late_s, self._failed, one, other, born)
        else:
            self._dialing.discard(pair)
            self._num_links += 1
            self._links[pair] = self._num_links
            self._last[one, other] = self._last[other, one] = 0.0
            for name, peer in ((one, other), (other, one)):
                self._act(self.lines[name], "link_up", peer)

    def _failed(self, one: str, other: str, born: int) -> None:
        self._dialing.discard(frozenset((one, other)))
        line = self.lines[one]
        if line.born == born:
            self._act(line, "dial_failed", other)

    def _lose(self, pair: frozenset[str], number: int) -> None:
        if self._links.get(pair) != number:
            return
        del self._links[pair]
        for name in sorted(pair):
            (other,) = pair - {name}
            self._act(self.lines[name], "link_down", other)

    # ---------------------------------------------------------------------- messages

    def send(self, one: str, other: str, take: str, *args: Any) -> bool:
        """Call the method `take(one, *args)` of the other's listener when it arrives."""
        number = self._links.get(frozenset((one, other)))
        if number is None:
            return False
        buffer = self.lines[one]._buffers.get(other)
        if buffer:
            buffer.append((0, functools.partial(self._send_now, one, other, number, take, args)))
        else:
            self._send_now(one, other, number, take, args)
        return True

    def has_room(self, one: str, other: str) -> bool:
        """May a payload be handed to the link?"""
        line = self.lines[one]
        if not line.buffer_bytes:
            return not line.sending
        return sum(size for size, _ in line._buffers.get(other, ())) < line.buffer_bytes

    def send_payload(
        self, one: str, other: str, num_bytes: int, sent: Callable[[], None], take: str, *args: Any
    ) -> None:
        """The same for what takes the links' time; `sent` when there may be room again."""
        line, number = self.lines[one], self._links.get(frozenset((one, other)))
        play = functools.partial(self._play, one, other, num_bytes, sent, number, take, args)
        line._buffers.setdefault(other, deque()).append((num_bytes, play))
        if not line.sending:
            self._next(line)

    def _next(self, line: Line) -> None:
        """Links take turns."""
        while not line.sending and line._buffers:
            other = next(iter(line._buffers))
            buffer = line._buffers.pop(other)
            size, play = buffer[0]
            if size:
                line._buffers[other] = buffer  # what is being sent stays in it, at its head
            else:
                buffer.popleft()
                if buffer:
                    line._buffers = {other: buffer, **line._buffers}
            play()

    def _send_now(
        self, one: str, other: str, number: int, take: str, args: tuple[Any, ...]
    ) -> None:
        arrival = self.timeline.now + self._delay_s(one, other)
        self._deliver(one, other, number, arrival, take, args)

    def _play(
        self,
        one: str,
        other: str,
        num_bytes: int,
        sent: Callable[[], None],
        number: int | None,
        take: str,
        args: tuple[Any, ...],
    ) -> None:
        line, receiver = self.lines[one], self.lines[other]
        line.sending = True
        is_up = number is not None and self._links.get(frozenset((one, other))) == number
        free_at = self.timeline.now + (num_bytes / line.up_per_s if is_up else 0.0)
        self.timeline.at(free_at, self._sent, line, line.born, other, sent)
        if number is None or not is_up:
            return
        delay_s = self._delay_s(one, other)
        begins = max(receiver.down_free_s, self.timeline.now + delay_s)
        arrival = max(free_at + delay_s, begins + num_bytes / receiver.down_per_s)
        receiver.down_free_s = arrival
        self._deliver(one, other, number, arrival, take, args)
        if self.duplication and self._rng.random() < self.duplication:
            late_s = self._rng.random() * 5.0
            self.timeline.at(arrival + late_s, self._arrive, one, other, number, take, args)

    def _sent(self, line: Line, born: int, other: str, sent: Callable[[], None]) -> None:
        if line.born != born or line.listener is None:
            return
        line.sending = False
        buffer = line._buffers[other]
        buffer.popleft()
        if not buffer:
            del line._buffers[other]
        self._next(line)
        self._soon(line, sent)

    def _deliver(
        self, one: str, other: str, number: int, arrival: float, take: str, args: tuple[Any, ...]
    ) -> None:
        arrival = max(arrival, self._last[one, other])
        self._last[one, other] = arrival
        self.timeline.at(arrival, self._arrive, one, other, number, take, args)

    def _arrive(self, one: str, other: str, number: int, take: str, args: tuple[Any, ...]) -> None:
        if self._links.get(frozenset((one, other))) == number:
            self._act(self.lines[other], take, one, *args)

    def _act(self, line: Line, method: str, *args: Any) -> None:
        listener = line.listener
        if listener is not None:
            self._soon(line, lambda: getattr(listener, method)(*args))

    def _soon(self, line: Line, action: Callable[[], None]) -> None:
        """Now, or when the host goes on."""
        if line.paused:
            line._inbox.append(action)
        else:
            action()

    def _delay_s(self, one: str, other: str) -> float:
        return max(self.lines[one].delay_s, self.lines[other].delay_s)
