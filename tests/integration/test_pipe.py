"""Real children: what they say, how they end, and that none outlives its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from echo2.errors import LocalProtocolError
from echo2.net.pipe import ChildProcess, PipeBrokenError, child_pipe, spawn

DEADLINE_S = 60.0

CHILD = """
import asyncio, os, signal, sys, time
from echo2.net.pipe import child_pipe

async def main():
    pipe = await child_pipe()
    await pipe.send({"argv": sys.argv, "name": __name__, "group": os.getpgrp(), "pid": os.getpid()})
    while (message := await pipe.receive()) is not None:
        header, frames = message
        match header["op"]:
            case "echo":
                await pipe.send(header, frames)
            case "exit":
                sys.exit(header["code"])
            case "say":
                print(header["text"], flush=True)
                print(header["text"], file=sys.stderr, flush=True)
                await pipe.send({})
            case "deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                await pipe.send({})
            case "half":
                os.write(pipe._writer.get_extra_info("socket").fileno(), b"\\0\\0")
                os._exit(0)
    print("parent closed", flush=True)

asyncio.run(main())
"""

PARENT = """
import asyncio
from echo2.net.pipe import spawn

async def main():
    child = await spawn("a_child")
    await child.pipe.receive()
    print(child.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "a_child.py").write_text(CHILD)
    (tmp_path / "a_parent.py").write_text(PARENT)
    return {"PYTHONPATH": str(tmp_path)}


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    async def within_deadline() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await coroutine

    asyncio.run(within_deadline())


@asynccontextmanager
async def a_child(env: dict[str, str], **more: Any) -> AsyncIterator[tuple[ChildProcess, Any]]:
    """A child and what it said first."""
    child = await spawn("a_child", ["--flag", "x y"], env=env, **more)
    try:
        hello = await child.pipe.receive()
        assert hello is not None
        yield child, hello[0]
    finally:
        child.kill()
        await child.stop(DEADLINE_S)


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  another process owes it
        await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]
    except FileNotFoundError:
        return False


def test_a_child_is_a_module_with_arguments_and_a_group_of_its_own(env: dict[str, str]) -> None:
    async def scenario() -> None:
        async with a_child(env) as (child, hello):
            assert hello["name"] == "__main__"
            assert Path(hello["argv"][0]).name == "a_child.py"
            assert hello["argv"][1:] == ["--flag", "x y"]
            assert hello["pid"] == hello["group"] == child.pid != os.getpgrp()
            assert child.returncode is None

    run(scenario())


def test_messages_with_megabytes_go_both_ways_at_once(env: dict[str, str]) -> None:
    async def scenario() -> None:
        async with a_child(env) as (child, _):
            payloads = [os.urandom(300_000) for _ in range(20)]
            sends = [child.pipe.send({"op": "echo", "n": n}, [p]) for n, p in enumerate(payloads)]

            async def receive_all() -> None:
                for _ in payloads:
                    message = await child.pipe.receive()
                    assert message is not None
                    header, frames = message
                    assert frames == [payloads[header["n"]]]

            await asyncio.gather(*sends, receive_all())

    run(scenario())


def test_its_output_goes_to_the_log(env: dict[str, str], tmp_path: Path) -> None:
    async def scenario() -> None:
        log = tmp_path / "logs" / "child.log"
        async with a_child(env, log_path=log) as (child, _):
            await child.pipe.send({"op": "say", "text": "hello log"})
            await child.pipe.receive()
            assert log.read_text() == "hello log\n" * 2
            assert log.stat().st_mode & 0o777 == 0o600

    run(scenario())


def test_the_end_of_a_child_is_seen_with_its_code(env: dict[str, str]) -> None:
    async def scenario() -> None:
        async with a_child(env) as (child, _):
            await child.pipe.send({"op": "exit", "code": 7})
            assert await child.pipe.receive() is None
            assert await child.wait() == 7
            with pytest.raises(PipeBrokenError, match="gone"):
                await child.pipe.send({"op": "echo"}, [bytes(1 << 20)])

    run(scenario())


def test_the_end_within_a_message_is_an_error(env: dict[str, str]) -> None:
    async def scenario() -> None:
        async with a_child(env) as (child, _):
            await child.pipe.send({"op": "half"})
            with pytest.raises(PipeBrokenError, match="within a message"):
                await child.pipe.receive()

    run(scenario())


def test_a_closed_pipe_ends_a_child_that_listens(env: dict[str, str]) -> None:
    async def scenario() -> None:
        async with a_child(env) as (child, _):
            await child.pipe.close()
            assert await child.wait() == 0

    run(scenario())


def test_terminate_asks_and_stop_insists(env: dict[str, str]) -> None:
    async def scenario() -> None:
        async with a_child(env) as (child, _):
            child.terminate()
            assert await child.wait() == -signal.SIGTERM
        async with a_child(env) as (child, _):
            await child.pipe.send({"op": "deaf"})
            await child.pipe.receive()
            assert await child.stop(0.05) == -signal.SIGKILL
            assert child.returncode == -signal.SIGKILL

    run(scenario())


def test_a_child_dies_with_its_parent(env: dict[str, str]) -> None:
    async def scenario() -> None:
        parent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "a_parent"),
            env={**os.environ, **env},
            stdout=asyncio.subprocess.PIPE,
        )
        assert parent.stdout is not None
        child_pid = int(await parent.stdout.readline())
        assert is_alive(child_pid)
        parent.kill()
        await parent.wait()
        await until(lambda: not is_alive(child_pid))

    run(scenario())


def test_a_module_that_is_not_there_is_an_end_with_a_code(
    env: dict[str, str], tmp_path: Path
) -> None:
    async def scenario() -> None:
        log = tmp_path / "child.log"
        child = await spawn("no_such_module", env=env, log_path=log)
        assert await child.pipe.receive() is None
        assert await child.wait() == 1
        assert "No module named no_such_module" in log.read_text()
        await child.stop(DEADLINE_S)

    run(scenario())


def test_a_process_without_a_parent_is_told_so() -> None:
    with pytest.raises(LocalProtocolError, match="not started by its parent"):
        asyncio.run(child_pipe())
