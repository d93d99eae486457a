"""Whose code runs right now: a few shared bytes that survive whatever that code does.

The environment process writes the number of the group before each step of one of its
coroutines and clears it after; the daemon reads it when the process hangs or is gone. So
one group is guilty, and the others of that process are played again.
"""

from __future__ import annotations

import asyncio
import contextvars
import mmap
import os
import struct
import time
from collections.abc import Coroutine, Generator
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from echo2.errors import EnvironmentError_

_GROUP: Final = struct.Struct("=Q")
_ENTERED: Final = struct.Struct("=d")
_BYTES: Final = _GROUP.size + _ENTERED.size

current_group: contextvars.ContextVar[int] = contextvars.ContextVar("echo2_group", default=0)
"""The group for which the running task works; tasks that it starts inherit it."""


class Marker:
    """Group numbers begin at 1. Times are of the machine's monotonic clock."""

    def __init__(self, path: Path) -> None:
        """Map the file, making it if it is missing."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, _BYTES)
            self._map = mmap.mmap(descriptor, _BYTES)
        finally:
            os.close(descriptor)

    def enter(self, group: int) -> None:
        _ENTERED.pack_into(self._map, _GROUP.size, time.monotonic())
        _GROUP.pack_into(self._map, 0, group)

    def leave(self) -> None:
        _GROUP.pack_into(self._map, 0, 0)

    def read(self) -> tuple[int, float]:
        """(group whose code runs, or 0; since when)."""
        while True:
            (group,) = _GROUP.unpack_from(self._map, 0)
            (entered,) = _ENTERED.unpack_from(self._map, _GROUP.size)
            if _GROUP.unpack_from(self._map, 0)[0] == group:
                return group, entered

    def close(self) -> None:
        self._map.close()


class _Stepped(Coroutine[Any, Any, Any]):
    """A coroutine that marks each of its steps, and keeps exits inside."""

    def __init__(self, inner: Coroutine[Any, Any, Any], group: int, marker: Marker) -> None:
        self._inner = inner
        self._group = group
        self._marker = marker

    def send(self, value: Any) -> Any:
        self._marker.enter(self._group)
        try:
            return self._inner.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            raise _exited(error) from error
        finally:
            self._marker.leave()

    def throw(
        self,
        kind: Any,
        value: BaseException | object = None,
        traceback: TracebackType | None = None,
    ) -> Any:
        error = kind if isinstance(kind, BaseException) else value
        if not isinstance(error, BaseException):
            error = kind()
        self._marker.enter(self._group)
        try:
            return self._inner.throw(error)
        except (SystemExit, KeyboardInterrupt) as exited:
            raise _exited(exited) from exited
        finally:
            self._marker.leave()

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()


def mark_tasks(loop: asyncio.AbstractEventLoop, marker: Marker) -> None:
    """Mark every step of every task that is started for a group, by whomever."""

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        context = options.get("context")
        group = current_group.get() if context is None else context.get(current_group, 0)
        if group:
            coroutine = _Stepped(coroutine, group, marker)
        return asyncio.Task(coroutine, loop=loop, **options)

    loop.set_task_factory(make)


def _exited(error: BaseException) -> EnvironmentError_:
    return EnvironmentError_(
        f"it called for the end of its process: {type(error).__name__} {error}"
    )
