"""SIGINT and SIGTERM: finish the step, write a checkpoint, leave.

While the learner computes, a signal is only noted. While it waits for others
(`interruptible`), the signal ends the wait at once; while a step is put on record
(`patient`), only when that takes long: the coordinator may be gone. A second SIGINT ends the
process.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequested(KeyboardInterrupt):
    """Ends a wait after a signal. A KeyboardInterrupt, so that the session's calls cancel
    what they wait for."""


class StopSignal:
    """Use it as a context manager, in the main thread."""

    def __init__(self) -> None:
        self.requested = ""
        """Name of the first signal, "" while there was none."""
        self._waiting = False
        self._patience_s: float | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._received)
        self._previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._patience_ended)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A wait that a signal ends with StopRequested, also one that came before."""
        self._waiting = True
        try:
            if self.requested:
                raise StopRequested(self.requested)
            yield
        finally:
            self._waiting = False

    @contextmanager
    def patient(self, patience_s: float) -> Iterator[None]:
        """A wait that ends with StopRequested so many seconds after a signal."""
        self._patience_s = patience_s
        if self.requested:
            signal.setitimer(signal.ITIMER_REAL, patience_s)
        try:
            yield
        finally:
            self._patience_s = None
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _patience_ended(self, number: int, frame: FrameType | None) -> None:
        if self._patience_s is not None:
            raise StopRequested(self.requested)

    def _received(self, number: int, frame: FrameType | None) -> None:
        again = bool(self.requested)
        self.requested = self.requested or signal.Signals(number).name
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._patience_s is not None and not again:
            signal.setitimer(signal.ITIMER_REAL, self._patience_s)
        if self._waiting and not again:
            raise StopRequested(self.requested)
