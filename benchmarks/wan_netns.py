"""Network namespaces that cannot be left behind.

A namespace here has no name and no file: it is held by a descriptor of this process and by
the processes that run inside, and the kernel removes it, with every device in it, when both
are gone. So a crash leaves nothing, no mount is needed (containers often refuse one), and
root in a user namespace is root enough:

    unshare --user --map-root-user python benchmarks/...

Processes inside carry ECHO2_WAN=PID-START of the process that owns the namespace. Those whose
owner is dead are ended by `end_stale`, before the next fleet starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, TypeVar

MARK: Final = "ECHO2_WAN"
COMMAND_TIMEOUT_S: Final = 30.0
END_TIMEOUT_S: Final = 10.0
CLONE_NEWNET: Final = 0x40000000
STATE, FLAGS, STARTED = 0, 6, 19
ENVIRONMENT: Final = (47, 48)
"""Places in what `_stat` returns; the last are where the environment begins and ends."""
KERNEL_THREAD: Final = 0x00200000
"""In the flags; such a process has no environment."""

T = TypeVar("T")


class WanError(RuntimeError):
    """Hosts cannot be made or changed; says what is absent and what to do."""


class Namespace:
    """A network namespace, made at once; `close` lets go of it."""

    def __init__(self) -> None:
        self._fd = _in_thread(_unshared)
        status = os.fstat(self._fd)
        self.id = (status.st_dev, status.st_ino)

    def command(self, argv: Sequence[str]) -> list[str]:
        """`argv`, to be run inside. It keeps the process id: nsenter becomes the program."""
        return ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self._fd}", "--", *argv]

    @property
    def path(self) -> str:
        """Names it to `ip link ... netns`."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def run(self, *argv: str, text: str = "") -> str:
        """Run a command inside and return what it printed. Raises WanError."""
        try:
            done = subprocess.run(
                self.command(argv),
                input=text,
                capture_output=True,
                text=True,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
            )
        except FileNotFoundError:
            raise WanError("there is no program nsenter; install util-linux") from None
        except subprocess.TimeoutExpired:
            raise WanError(f"`{' '.join(argv)}` took over {COMMAND_TIMEOUT_S:g} s") from None
        if done.returncode:
            said = done.stderr.strip() or f"exit code {done.returncode}"
            raise WanError(f"`{' '.join(argv)}` failed: {said}")
        return done.stdout

    def inside(self, function: Callable[[], T]) -> T:
        """Call `function` in a thread that is inside: what it opens belongs to the namespace."""

        def entered() -> T:
            _libc_call("setns", self._fd, CLONE_NEWNET)
            return function()

        return _in_thread(entered)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def mark() -> dict[str, str]:
    """What the environment of every process inside gets."""
    return {MARK: f"{os.getpid()}-{_started(os.getpid())}"}


def end_inside(spaces: Iterable[Namespace]) -> None:
    """Kill every process inside, whoever its parent is. WanError when one does not end."""
    ids = {space.id for space in spaces}
    _end("inside the namespaces", lambda pid: _namespace_id(pid) in ids)


def end_stale() -> None:
    """Kill what is left of fleets whose owner died without a chance to remove them."""
    _end("of dead fleets", _is_stale)


def _end(which: str, doomed: Callable[[int], bool]) -> None:
    deadline = time.monotonic() + END_TIMEOUT_S
    while pids := [pid for pid in _pids() if doomed(pid)]:
        if time.monotonic() > deadline:
            raise WanError(f"processes {which} survive SIGKILL for {END_TIMEOUT_S:g} s: {pids}")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(pid)
                try:
                    if doomed(pid):  # still: the number was not given to another meanwhile
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
                finally:
                    os.close(fd)
        time.sleep(0.01)


def _pids() -> list[int]:
    own = os.getpid()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != own]


def _namespace_id(pid: int) -> tuple[int, int] | None:
    try:
        status = os.stat(f"/proc/{pid}/ns/net")
    except OSError:  # it ended, is a zombie, or belongs to somebody else
        return None
    return status.st_dev, status.st_ino


def _is_stale(pid: int) -> bool:
    try:
        if os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid"):
            return False  # in a container, where its owner has another number
        environment = _environment(pid)
    except OSError:
        return False
    prefix = f"{MARK}=".encode()
    for entry in environment.split(b"\0"):
        if entry.startswith(prefix):
            owner, _, started = entry.removeprefix(prefix).decode().partition("-")
            return owner.isdigit() and _started(int(owner)) != started
    return False


def _environment(pid: int) -> bytes:
    """Raises OSError when there is no such process. In the middle of an exec the kernel shows
    an empty one that lies nowhere: looked at again until it has a place."""
    while True:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        stat = _stat(pid)
        has_none = stat[STATE] in ("Z", "X") or int(stat[FLAGS]) & KERNEL_THREAD
        start, end = (int(stat[place]) for place in ENVIRONMENT)
        if environment or has_none or start == end != 0:
            return environment
        time.sleep(0.001)


def _started(pid: int) -> str:
    """When the process began, in the kernel's ticks; empty when there is none."""
    try:
        return _stat(pid)[STARTED]
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """What `proc_pid_stat(5)` calls fields 3 to 52."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _unshared() -> int:
    _libc_call("unshare", CLONE_NEWNET)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _libc_call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        code = ctypes.get_errno()
        raise WanError(
            f"{name}(CLONE_NEWNET) failed: {os.strerror(code)}. Network namespaces need root "
            "(CAP_SYS_ADMIN), and a container needs it granted; without root, run the same "
            "command under `unshare --user --map-root-user`"
        )


def _in_thread(function: Callable[[], T]) -> T:
    """A namespace is a property of the thread, so the caller's own stays what it was."""
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:  # raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=call, name="namespace")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
