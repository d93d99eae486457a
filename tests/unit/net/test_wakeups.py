from __future__ import annotations

import asyncio

from echo2.net.wakeups import Signal


def test_news_that_are_there_already_give_others_a_turn_first() -> None:
    async def scenario() -> None:
        signal = Signal()
        turns: list[str] = []
        asyncio.get_running_loop().call_soon(turns.append, "other")
        signal.set()
        await signal.wait()
        assert turns == ["other"]

    asyncio.run(scenario())


def test_news_are_kept_until_they_are_waited_for_and_told_once() -> None:
    async def scenario() -> None:
        signal = Signal()
        signal.set()
        signal.set()
        await signal.wait()
        second = asyncio.create_task(signal.wait())
        await asyncio.sleep(0)
        assert not second.done()
        signal.set()
        await second

    asyncio.run(scenario())


def test_a_wait_ends_without_news_when_its_time_is_over() -> None:
    async def scenario() -> None:
        await Signal().wait(0.0)

    asyncio.run(scenario())
