from __future__ import annotations

import asyncio
import random

import pytest

from echo2.net.tasks import Backoff, LoopLag, OwnedTasks


async def for_ever() -> None:
    await asyncio.Event().wait()


async def crash() -> None:
    raise ZeroDivisionError("by zero")


def test_a_crash_is_raised_to_the_owner_that_waits() -> None:
    async def scenario() -> None:
        tasks = OwnedTasks("test")
        tasks.start(for_ever(), name="runs")
        tasks.start(crash(), name="fails")
        with pytest.raises(ZeroDivisionError):
            await tasks.wait()
        assert isinstance(tasks.crash, ZeroDivisionError)
        await tasks.stop()  # raised once, not twice

    asyncio.run(scenario())


def test_a_crash_that_nobody_waited_for_is_raised_by_stop() -> None:
    async def scenario() -> None:
        tasks = OwnedTasks("test")
        await asyncio.wait({tasks.start(crash(), name="fails")})
        with pytest.raises(ZeroDivisionError):
            await tasks.stop()

    asyncio.run(scenario())


def test_a_call_that_crashes_is_raised_to_the_owner_and_none_comes_after_stop() -> None:
    async def scenario() -> None:
        tasks, calls = OwnedTasks("test"), list[str]()
        tasks.call_soon(lambda: calls.append("first"), name="first")
        tasks.call_soon(lambda: calls.append(str(1 / 0)), name="fails")
        with pytest.raises(ZeroDivisionError):
            await tasks.wait()
        tasks.call_soon(lambda: calls.append("late"), name="late")
        await asyncio.sleep(0)
        assert calls == ["first"]

    asyncio.run(scenario())


def test_stop_ends_the_tasks_and_the_wait() -> None:
    async def scenario() -> None:
        tasks = OwnedTasks("test")
        running = [tasks.start(for_ever(), name=str(index)) for index in range(3)]
        waiting = asyncio.create_task(tasks.wait())
        await asyncio.sleep(0)
        await tasks.stop()
        await waiting
        assert all(task.cancelled() for task in running)

    asyncio.run(scenario())


def test_a_task_that_ends_well_is_forgotten() -> None:
    async def scenario() -> None:
        tasks = OwnedTasks("test")
        await tasks.start(asyncio.sleep(0), name="short")
        await asyncio.sleep(0)
        assert not tasks._tasks
        await tasks.stop()

    asyncio.run(scenario())


def test_a_crash_while_stopping_is_not_lost() -> None:
    async def fails_at_its_end() -> None:
        try:
            await for_ever()
        finally:
            raise ZeroDivisionError

    async def scenario() -> None:
        tasks = OwnedTasks("test")
        tasks.start(fails_at_its_end(), name="fails")
        await asyncio.sleep(0)
        with pytest.raises(ZeroDivisionError):
            await tasks.stop()

    asyncio.run(scenario())


def test_waits_double_up_to_the_most_less_a_random_half() -> None:
    backoff = Backoff(random.Random(1), base_s=1.0, max_s=10.0)
    waits = [backoff.next_s() for _ in range(8)]
    for wait, full in zip(waits, [1, 2, 4, 8, 10, 10, 10, 10], strict=True):
        assert full / 2 <= wait <= full
    assert len(set(waits)) == 8
    backoff.reset()
    assert backoff.next_s() <= 1.0
    assert waits[0] == Backoff(random.Random(1), base_s=1.0, max_s=10.0).next_s()


def test_the_lag_is_smoothed_and_its_maximum_taken_once() -> None:
    lag = LoopLag()
    lag.record(1.0)
    for _ in range(100):
        lag.record(0.0)
    assert 0 < lag.ewma_s < 1e-3
    assert lag.take_max_s() == 1.0
    assert lag.take_max_s() == 0.0


def test_each_sample_of_the_lag_is_told() -> None:
    samples: list[float] = []
    lag = LoopLag(on_sample=samples.append)
    lag.record(0.25)
    lag.record(0.0)
    assert samples == [0.25, 0.0]


def test_the_meter_sees_what_its_loop_says() -> None:
    """The loop's clock is moved by hand: no real time is measured."""

    class Loop(asyncio.SelectorEventLoop):
        late_s = 0.0

        def time(self) -> float:
            return super().time() + self.late_s

    async def scenario() -> None:
        lag = LoopLag(interval_s=0.001)
        tasks = OwnedTasks("test")
        tasks.start(lag.run(), name="lag")
        await asyncio.sleep(0)
        loop.late_s = 60.0
        while not lag.ewma_s:  # noqa: ASYNC110  the meter tells nobody
            await asyncio.sleep(0)
        await tasks.stop()
        assert 59 < lag.take_max_s() < 90

    loop = Loop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(scenario())
