"""The learner's client over a transport that is none: what it does by itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from echo2.learner_client import LearnerClient
from echo2.messages import LearnerHello, LearnerWelcome, Message, TasksSubmitted, TasksWanted
from echo2.types import Task


class Transport:
    """Answers the hello, and notes that tasks came."""

    trouble = ""

    def __init__(self) -> None:
        self.tasks_came = asyncio.Event()
        self.receive: Callable[[Message], None] = lambda message: None

    async def start(
        self, on_message: Callable[[Message], None], on_failure: Callable[[BaseException], None]
    ) -> None:
        self.receive = on_message

    async def stop(self) -> None: ...

    def send(self, message: Message) -> None:
        if isinstance(message, TasksSubmitted):
            self.tasks_came.set()
        if isinstance(message, LearnerHello):
            welcome = LearnerWelcome(
                protocol=message.protocol,
                run_id="r",
                incarnation=1,
                step=0,
                heartbeat_interval_s=1.0,
                silence_max_s=10.0,
            )
            asyncio.get_running_loop().call_soon(self.receive, welcome)


async def test_tasks_that_are_asked_for_again_take_no_second_thread() -> None:
    loop, asked, may_go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    calls: list[int] = []

    def tasks(start: int, count: int) -> tuple[list[Task], bool]:
        calls.append(start)
        loop.call_soon_threadsafe(asked.set)
        assert may_go.wait(30)
        return [Task(start, "{}")], False

    transport = Transport()
    client = LearnerClient(transport, tasks=tasks)
    await client.start(resume_step=0)
    for _ in range(50):
        transport.receive(TasksWanted(incarnation=1, start=0, count=4))
    async with asyncio.timeout(30):
        await asked.wait()
        assert await asyncio.to_thread(lambda: "a thread is free") == "a thread is free"
        asked.clear()
        may_go.set()
        await transport.tasks_came.wait()
        transport.receive(TasksWanted(incarnation=1, start=0, count=4))
        await asked.wait()
    assert calls == [0, 0]
    await client.close("done", finished=False)
