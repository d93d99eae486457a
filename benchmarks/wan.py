"""Several hosts on one machine: network namespaces joined by links with rates, delay and loss.

    with Wan([HostLink("origin", 300, 1000), HostLink("w1", 100, 100)]) as wan:
        server = wan.popen("origin", ["python3", "-m", "http.server"])
        client = wan.popen("w1", ["curl", f"http://{wan.address('origin')}:8000"])
        wan.set_uplink("w1", 10)
        wan.cut("w1")           # packets to and from it vanish, silently, until
        wan.mend("w1")
        wan.cut("w1", "out")    # only what it sends, or with "in" what is sent to it

Each host has one device, eth0, and an address in a network of its own; nothing of the machine's
is seen inside, and nothing inside is seen by the machine. Without delay and loss the hosts are
veth pairs on a bridge with tbf both ways, in the kernel. With either, on any link, all of them
are TUN devices of a router in user space (wan_router.py), with tbf on the uplinks.

On leaving, by whatever way (SIGTERM and SIGINT are ways), every process inside is killed, and
with the last of them the kernel removes the namespaces and their devices. A SIGKILL of this
process leaves at most processes, which the next Wan on this machine ends.

    python benchmarks/wan.py --doctor        what this machine has, and what is absent
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fcntl import ioctl
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, Literal

from wan_netns import Namespace, WanError, end_inside, end_stale, mark

__all__ = ["HostLink", "Wan", "WanError", "absent"]

NETWORK: Final = "10.31.0"
HOSTS_MAX: Final = 250
BURST: Final = "128kb"
QUEUE: Final = "100ms"
"""What would wait for longer in front of a link is dropped, as in the router."""
TX_QUEUE_PACKETS: Final = 1000
ROUTER_ANSWER_S: Final = 10.0

Way = Literal["both", "in", "out"]

TUNSETIFF: Final = 0x400454CA
TUNSETOFFLOAD: Final = 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x1, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x1, 0x2


@dataclass(frozen=True, slots=True)
class HostLink:
    """One host and its link. Rates in Mbit/s (10^6).

    `delay_s` is what the link adds in each direction: the round trip of a and b takes
    2 (delay_a + delay_b). `loss` is the share of packets that it loses in each direction.
    """

    name: str
    up_mbit: float
    down_mbit: float
    delay_s: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]{1,64}", self.name):
            raise ValueError(f"host {self.name!r}: 1 to 64 letters, digits, _, - and . are allowed")
        for key in ("up_mbit", "down_mbit"):
            _check_rate(f"host {self.name}: {key}", getattr(self, key))
        if not 0 <= self.delay_s <= 10 or not 0 <= self.loss <= 1:
            raise ValueError(
                f"host {self.name}: delay_s {self.delay_s:g} and loss {self.loss:g}; allowed are "
                "0 to 10 s and a share of 0 to 1"
            )


def _check_rate(what: str, mbit: float) -> None:
    if not 0.1 <= mbit <= 10_000:
        raise ValueError(f"{what} is {mbit:g}; allowed are 0.1 to 10000 Mbit/s")


class Wan:
    """The hosts, from entering to leaving. All methods raise WanError with the cause."""

    def __init__(self, links: Sequence[HostLink]) -> None:
        if not 1 <= len(links) <= HOSTS_MAX:
            raise ValueError(f"{len(links)} hosts; allowed are 1 to {HOSTS_MAX}")
        self.links = {link.name: link for link in links}
        if len(self.links) < len(links):
            raise ValueError(f"names of hosts repeat: {sorted(link.name for link in links)}")
        self._index = {name: index for index, name in enumerate(self.links, start=1)}
        self._spaces: dict[str, Namespace] = {}
        self._switch: Namespace | None = None
        self._router: subprocess.Popen[str] | None = None
        self._processes: list[subprocess.Popen[Any]] = []
        self._one_way: set[str] = set()
        self._sigterm: Callable[[int, FrameType | None], Any] | int | None = None

    def __enter__(self) -> Wan:
        self._catch_sigterm()
        try:
            end_stale()
            for name in self.links:
                self._spaces[name] = Namespace()
            if any(link.delay_s or link.loss for link in self.links.values()):
                self._join_by_router()
            else:
                self._join_by_bridge()
        except WanError as error:
            self.close()
            missing = absent()
            if not missing:
                raise
            text = "; ".join(f"{part}: {why}" for part, why in missing.items())
            raise WanError(f"this machine cannot hold the hosts. Absent: {text}") from error
        except BaseException:  # whatever it was: no namespace is left behind
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------- use

    def address(self, host: str) -> str:
        return f"{NETWORK}.{self._number(host)}"

    @property
    def addresses(self) -> dict[str, str]:
        return {name: self.address(name) for name in self.links}

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """`argv` as a command that runs it on the host, for as long as this process lives."""
        return self._space(host).command(argv)

    def popen(self, host: str, argv: Sequence[str], **kwargs: Any) -> subprocess.Popen[Any]:
        """Start a process on the host, in a session of its own unless told otherwise. It is
        killed at the end if it still runs. Its `pid` is that of the program itself."""
        kwargs.setdefault("start_new_session", True)
        kwargs["env"] = {**(kwargs.get("env") or os.environ), **mark()}
        process = subprocess.Popen(self.command(host, argv), **kwargs)
        self._processes.append(process)
        return process

    def set_uplink(self, host: str, mbit: float) -> None:
        """Change the rate at which the host sends, from the next packet on."""
        _check_rate(f"the uplink of {host}", mbit)
        self._space(host).run(*f"tc qdisc change dev eth0 {_tbf(mbit)}".split())

    def cut(self, host: str, way: Way = "both") -> None:
        """Packets to and from the host are lost from now on, or those one way; no end is told."""
        if way == "both":
            self._connect(host, connect=False)
        else:
            self._misdirect(host, way)

    def mend(self, host: str) -> None:
        """Undo `cut`, whichever way it was."""
        self._connect(host, connect=True)
        if host in self._one_way:
            self._misdirect(host, None)

    # -------------------------------------------------------------------- set-up

    def _join_by_bridge(self) -> None:
        switch = self._switch = Namespace()
        joins = ["link add br0 type bridge", "link set br0 up"]
        for name, number in self._index.items():
            peer = f"peer name eth0 netns {self._spaces[name].path}"
            joins.append(f"link add p{number} type veth {peer}")
            joins.append(f"link set p{number} master br0 up")
        _batch(switch, "ip", joins)
        rates = (
            f"p{self._index[link.name]} {_tbf(link.down_mbit)}" for link in self.links.values()
        )
        _batch(switch, "tc", [f"qdisc add dev {rate}" for rate in rates])
        for name, space in self._spaces.items():
            others = [
                f"neigh add {self.address(other)} lladdr {_mac(number)} dev eth0 nud permanent"
                for other, number in self._index.items()
                if other != name
            ]
            mac = f"link set eth0 address {_mac(self._index[name])}"
            self._set_up_host(name, space, before=[mac], after=others)

    def _join_by_router(self) -> None:
        fds: dict[str, int] = {}
        try:
            for name, space in self._spaces.items():
                fds[name] = space.inside(_open_tun)
                queue = f"link set eth0 txqueuelen {TX_QUEUE_PACKETS}"
                self._set_up_host(name, space, before=[queue])
            script = Path(__file__).with_name("wan_router.py")
            self._router = subprocess.Popen(
                [sys.executable, "-I", str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=tuple(fds.values()),
                start_new_session=True,
            )
        finally:
            for fd in fds.values():
                os.close(fd)
        self._ask_router(
            json.dumps(
                [
                    {**asdict(link), "fd": fds[link.name], "address": self.address(link.name)}
                    for link in self.links.values()
                ]
            )
        )

    def _set_up_host(
        self, name: str, space: Namespace, *, before: Sequence[str] = (), after: Sequence[str] = ()
    ) -> None:
        own = ["link set lo up", f"addr add {self.address(name)}/24 dev eth0", "link set eth0 up"]
        _batch(space, "ip", [*before, *own, *after])
        space.run(*f"tc qdisc add dev eth0 {_tbf(self.links[name].up_mbit)}".split())

    def _connect(self, host: str, *, connect: bool) -> None:
        number = self._number(host)
        if self._switch is not None:
            way = "master br0" if connect else "nomaster"
            self._switch.run(*f"ip link set p{number} {way}".split())
        else:
            self._ask_router(f"{'mend' if connect else 'cut'} {host}")

    def _misdirect(self, host: str, way: Way | None) -> None:
        """Frames go to an address that no device has. None: to the right one again."""
        if self._switch is None:
            raise WanError("a cut one way needs hosts whose links have neither delay nor loss")
        own = self._number(host)
        others = {name: number for name, number in self._index.items() if number != own}

        def neighbours(numbers: Iterable[int], *, lost: bool) -> list[str]:
            return [
                f"neigh replace {NETWORK}.{number} lladdr {_mac(0 if lost else number)} dev eth0 "
                "nud permanent"
                for number in numbers
            ]

        _batch(self._space(host), "ip", neighbours(others.values(), lost=way == "out"))
        for name in others:
            _batch(self._space(name), "ip", neighbours([own], lost=way == "in"))
        (self._one_way.discard if way is None else self._one_way.add)(host)

    def _ask_router(self, line: str) -> None:
        router = self._router
        if router is None or router.stdin is None or router.stdout is None:
            raise WanError("the hosts are not up; use Wan as a context manager")
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            router.stdin.write(f"{line}\n")
            router.stdin.flush()
            if select.select([router.stdout], [], [], ROUTER_ANSWER_S)[0]:
                answer = router.stdout.readline()
        if answer.strip() != "done":
            state = "hangs" if router.poll() is None else f"ended with code {router.returncode}"
            raise WanError(f"the router {state}; it should have answered {line.split()[0]!r}")

    def _number(self, host: str) -> int:
        number = self._index.get(host)
        if number is None:
            raise WanError(f"there is no host {host!r}; there are {', '.join(self.links)}")
        return number

    def _space(self, host: str) -> Namespace:
        self._number(host)
        if host not in self._spaces:
            raise WanError("the hosts are not up; use Wan as a context manager")
        return self._spaces[host]

    # ------------------------------------------------------------------- removal

    def close(self) -> None:
        """Remove everything. A signal that arrives meanwhile waits until it is done."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            with contextlib.ExitStack() as stack:  # the last one first, whatever fails
                stack.callback(self._forget_sigterm)
                for space in (*self._spaces.values(), *filter(None, [self._switch])):
                    stack.callback(space.close)
                stack.callback(self._reap)
                stack.callback(end_inside, tuple(self._spaces.values()))
        finally:
            self._spaces, self._switch, self._router, self._processes = {}, None, None, []
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _reap(self) -> None:
        if self._router is not None:
            self._router.kill()
            self._router.communicate()
        for process in self._processes:
            if process.poll() is None:
                process.kill()  # one that left its namespace, or is about to enter it
                process.wait()

    def _catch_sigterm(self) -> None:
        """A plain SIGTERM would end Python without leaving `with`; an owner's handler stays."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._sigterm = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))

    def _forget_sigterm(self) -> None:
        if self._sigterm is not None:
            signal.signal(signal.SIGTERM, self._sigterm)
            self._sigterm = None


def _tbf(mbit: float) -> str:
    return f"root tbf rate {round(mbit * 1000)}kbit burst {BURST} latency {QUEUE}"


def _mac(number: int) -> str:
    return f"02:00:00:00:00:{number:02x}"


def _batch(space: Namespace, program: str, lines: Sequence[str]) -> None:
    space.run(program, "-batch", "-", text="".join(f"{line}\n" for line in lines))


def _open_tun() -> int:
    """A TUN device eth0 in the calling thread's namespace, as a descriptor of its packets."""
    try:
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        try:
            flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
            ioctl(fd, TUNSETIFF, struct.pack("16sH22x", b"eth0", flags))
            ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
        except BaseException:  # whatever it was: no descriptor is left behind
            os.close(fd)
            raise
    except OSError as error:
        raise WanError(f"no TUN device, which delay and loss need: {error}") from error
    return fd


# -------------------------------------------------------------------------------- doctor


def absent() -> dict[str, str]:
    """What the hosts need and this machine lacks, each with the reason."""
    return {part: why for part, why in probe() if why}


def probe() -> Iterator[tuple[str, str]]:
    """Every part, tried in a namespace of its own, and why it does not work (or nothing)."""
    for program, package in (("nsenter", "util-linux"), ("ip", "iproute2"), ("tc", "iproute2")):
        yield program, "" if shutil.which(program) else f"not found; install {package}"
    try:
        space = Namespace()
    except WanError as error:
        yield "network namespaces", str(error)
        return
    yield "network namespaces", ""
    try:
        for part, argv in {
            "veth": "ip link add v0 type veth peer name v1",
            "bridge": "ip link add br0 type bridge",
            "tbf": f"tc qdisc add dev lo {_tbf(10)}",
        }.items():
            yield part, _why_not(partial(space.run, *argv.split()))
        yield "tun", _why_not(lambda: os.close(space.inside(_open_tun)))
    finally:
        space.close()


def _why_not(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except (WanError, FileNotFoundError) as error:
        return str(error)
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="wan.py", description="Hosts with shaped links, out of network namespaces."
    )
    parser.add_argument(
        "--doctor", action="store_true", help="print what this machine has; 1 if a part is absent"
    )
    options = parser.parse_args(arguments)
    if not options.doctor:
        parser.error("it is a module for other scripts; only --doctor can be run")
    missing = 0
    started = time.monotonic()
    for part, why in probe():
        print(f"{part:20} {why or 'works'}", flush=True)
        missing += bool(why)
    print(f"{missing} absent ({time.monotonic() - started:.1f} s)")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
