"""Parent and child talk in whole messages over an inherited socket pair, and a child never
outlives its parent.

    u32 bytes of what follows | one message after the other, each:
        u32 bytes of the header | u32 number of frames | u32 bytes of each frame
        header: MessagePack of a plain dict | the raw frames                    (big endian)

What several tasks send in one turn of the event loop goes out, and comes in, as one piece: a
group's rollouts ask for their tokens at once, and one read serves them all.

Sizes are bounded, and checked before anything is allocated. The end of the other process is
the end of the stream: `receive` returns None at a message's border, and raises
PipeBrokenError inside one.

A child is a module run with -m. It leads a process group of its own, so that Ctrl-C in the
terminal reaches the parent only, which then ends its children as it sees fit; if the parent
dies, the kernel kills the child (`net.child`) and the pipe ends. What a message means is
left to both ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from echo2 import wire
from echo2.errors import Echo2Error, LocalProtocolError, RemoteProtocolError
from echo2.net.child import PARENT_VARIABLE, PIPE_VARIABLE

HEADER_MAX_BYTES: Final = 16 << 20
FRAMES_MAX: Final = 4096
MESSAGE_MAX_BYTES: Final = 1 << 30
"""Header and frames together."""

PIECE_BYTES: Final = 4 << 20
"""Messages are sent together up to so many bytes."""
_LENGTH: Final = struct.Struct(">I")
_HEAD: Final = struct.Struct(">II")
_PIECE_MAX_BYTES: Final = MESSAGE_MAX_BYTES + PIECE_BYTES + 4 * FRAMES_MAX + _HEAD.size
_READ_LIMIT: Final = 1 << 20


class PipeBrokenError(Echo2Error):
    """The other process went away, in the midst of a message or while we sent one."""


class Pipe:
    """One end. `send` may be called by many tasks, `receive` by one. After an error or a
    cancelled `receive` the border between messages is lost, and with it the pipe."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._outgoing: list[bytes | memoryview] = []
        self._outgoing_bytes = 0
        self._arrived: deque[tuple[dict[str, Any], list[bytes]]] = deque()

    async def send(
        self, header: Mapping[str, Any], frames: Sequence[bytes | memoryview] = ()
    ) -> None:
        """Send one message with this turn of the loop; returns when the stream takes more.

        Raises PipeBrokenError when the other end is known to be gone (one that has just gone
        is met by the next call), LocalProtocolError for a message that is too big or not plain.
        """
        packed = wire.pack(dict(header))
        sizes = [memoryview(frame).nbytes for frame in frames]
        total = len(packed) + sum(sizes)
        if len(packed) > HEADER_MAX_BYTES or len(sizes) > FRAMES_MAX or total > MESSAGE_MAX_BYTES:
            raise LocalProtocolError(
                f"a message of {len(packed)} bytes of header, {len(sizes)} frames and {total} "
                f"bytes in all; at most {HEADER_MAX_BYTES}, {FRAMES_MAX} and {MESSAGE_MAX_BYTES} "
                f"are allowed; send it in parts",
                reason="oversized",
            )
        head = _HEAD.pack(len(packed), len(sizes)) + struct.pack(f">{len(sizes)}I", *sizes)
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing += [head, packed, *frames]  # whole, before any other task's
        self._outgoing_bytes += len(head) + total
        if self._outgoing_bytes >= PIECE_BYTES:
            self._flush()
        try:
            if self._reader.at_eof():
                raise BrokenPipeError("it closed the pipe")
            await self._writer.drain()
        except OSError as error:
            raise PipeBrokenError(f"the other process is gone: {error}") from error

    async def receive(self) -> tuple[dict[str, Any], list[bytes]] | None:
        """The next (header, frames), or None when the other end closed.

        Raises PipeBrokenError when it ended within a message, RemoteProtocolError for sizes
        beyond the limits or a header that is no dict.
        """
        while not self._arrived:
            try:
                length = await self._reader.readexactly(_LENGTH.size)
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    raise PipeBrokenError("the other process went away within a message") from None
                return None
            except OSError:
                return None  # reset: closed with our bytes unread
            (piece_bytes,) = _LENGTH.unpack(length)
            if piece_bytes > _PIECE_MAX_BYTES:
                raise RemoteProtocolError(
                    f"a piece of {piece_bytes} bytes is coming; at most {_PIECE_MAX_BYTES} are "
                    "allowed",
                    reason="oversized",
                )
            try:
                piece = await self._reader.readexactly(piece_bytes)
            except (asyncio.IncompleteReadError, OSError) as error:
                raise PipeBrokenError("the other process went away within a message") from error
            self._arrived.extend(_messages(piece))
        return self._arrived.popleft()

    async def close(self) -> None:
        """Close our end; what was sent still arrives."""
        self._flush()
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return  # the other end was first

    def _flush(self) -> None:
        if self._outgoing and not self._writer.is_closing():
            self._writer.writelines([_LENGTH.pack(self._outgoing_bytes), *self._outgoing])
        self._outgoing, self._outgoing_bytes = [], 0


def _messages(piece: bytes) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
    """Those that came as one piece."""
    at = 0
    while at < len(piece):
        try:
            header_bytes, num_frames = _HEAD.unpack_from(piece, at)
            if header_bytes > HEADER_MAX_BYTES or num_frames > FRAMES_MAX:
                raise RemoteProtocolError(
                    f"a message of {header_bytes} bytes of header and {num_frames} frames came; "
                    f"at most {HEADER_MAX_BYTES} and {FRAMES_MAX} are allowed",
                    reason="oversized",
                )
            at += _HEAD.size
            sizes = struct.unpack_from(f">{num_frames}I", piece, at)
            if header_bytes + sum(sizes) > MESSAGE_MAX_BYTES:
                raise RemoteProtocolError(
                    f"a message of {header_bytes + sum(sizes)} bytes came; at most "
                    f"{MESSAGE_MAX_BYTES} are allowed",
                    reason="oversized",
                )
        except struct.error:
            raise RemoteProtocolError("a message ends within its sizes") from None
        at += 4 * num_frames
        if at + header_bytes + sum(sizes) > len(piece):
            raise RemoteProtocolError(
                f"a message of {header_bytes + sum(sizes)} bytes came, of which "
                f"{len(piece) - at} are there"
            )
        header = wire.unpack(piece[at : at + header_bytes], max_bytes=HEADER_MAX_BYTES)
        if not isinstance(header, dict):
            raise RemoteProtocolError("a header came that is no dict")
        at += header_bytes
        frames = []
        for size in sizes:
            frames.append(piece[at : at + size])
            at += size
        yield header, frames


class ChildProcess:
    """A child and the pipe to it. Its owner ends it: `stop`, or `kill`."""

    def __init__(self, process: asyncio.subprocess.Process, pipe: Pipe, *, name: str) -> None:
        self.name = name
        self.pipe = pipe
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; minus the signal's number if a signal ended it."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for its end; the return code."""
        return await self._process.wait()

    def terminate(self) -> None:
        """Ask it to end (SIGTERM). What it started is its own to end."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # reaped; asyncio tells in a moment
                self._process.terminate()

    def kill(self) -> None:
        """End it and all of its process group at once (SIGKILL)."""
        if self.returncode is None:
            # Not known to be reaped, so the number names its group, or for a moment nobody's.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, timeout_s: float) -> int:
        """Ask it to end and kill it after `timeout_s`; the return code."""
        self.terminate()
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()
        await self.pipe.close()
        return await self.wait()


async def spawn(
    module: str,
    args: Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    log_path: str | os.PathLike[str] | None = None,
    python: str | os.PathLike[str] = "",
) -> ChildProcess:
    """Start `python -m module args` with a pipe to it.

    `python` is this interpreter unless another is named; echo2 must be installed there.
    `env` is added to our own environment. Its output is appended to `log_path`, or goes
    where ours goes. To be called on a thread that lives as long as the child should: the
    kernel takes the end of that thread for the end of the parent.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        pipe = await _open_pipe(ours)
        try:
            process = await _start(
                module, args, env=env, log_path=log_path, end=theirs, python=str(python)
            )
        except BaseException:  # also when it is cancelled: nobody else knows of the socket
            await pipe.close()
            raise
    return ChildProcess(process, pipe, name=module)


async def child_pipe() -> Pipe:
    """The child's end of the pipe. Raises LocalProtocolError in a process that was not
    started by `spawn`; to be called once."""
    descriptor = os.environ.pop(PIPE_VARIABLE, "")
    if not descriptor:
        raise LocalProtocolError(
            f"{PIPE_VARIABLE} is not set: this process was not started by its parent's spawn(), "
            f"and cannot run by itself"
        )
    return await _open_pipe(socket.socket(fileno=int(descriptor)))


async def _start(
    module: str,
    args: Sequence[str],
    *,
    env: Mapping[str, str] | None,
    log_path: str | os.PathLike[str] | None,
    end: socket.socket,
    python: str,
) -> asyncio.subprocess.Process:
    ours = {PIPE_VARIABLE: str(end.fileno()), PARENT_VARIABLE: str(os.getpid())}
    output = None if log_path is None else _open_log(Path(log_path))
    try:
        return await asyncio.create_subprocess_exec(
            *(python or sys.executable, "-m", "echo2.net.child", module, *args),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(env or {}), **ours},
            pass_fds=(end.fileno(),),
            start_new_session=True,
        )
    finally:
        if output is not None:
            os.close(output)


async def _open_pipe(end: socket.socket) -> Pipe:
    end.setblocking(False)
    return Pipe(*await asyncio.open_unix_connection(sock=end, limit=_READ_LIMIT))


def _open_log(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
