"""What is capped leaves in order, at the pace of the line."""

from __future__ import annotations

import asyncio

from echo2.weights.pace import BURST_S, PAYLOAD_SHARE, Pace


class Clock(asyncio.SelectorEventLoop):
    """Time passes when everybody sleeps, and at once."""

    now = 100.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def test_a_line_takes_so_long_for_so_many_bytes() -> None:
    async def scenario() -> list[float]:
        loop = asyncio.get_running_loop()
        pace = Pace(8.0 / PAYLOAD_SHARE)
        times = []
        for _ in range(5):
            await pace.take(1_000_000)
            times.append(loop.time() - 100.0)
        return times

    with asyncio.Runner(loop_factory=Clock) as runner:
        times = runner.run(scenario())
    assert [round(at, 6) for at in times] == [0.0] + [n - BURST_S for n in range(1, 5)]


def test_without_a_cap_nothing_waits() -> None:
    async def scenario() -> float:
        pace = Pace(0.0)
        for _ in range(100):
            await pace.take(1 << 30)
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=Clock) as runner:
        assert runner.run(scenario()) == 100.0
