"""An environment of the library verifiers, played by echo2 as it is. Named in
verifiers_sums.toml as "verifiers:verifiers_sums"; learner and workers import it from the folder
of the configuration, and the library plays it too (`eval verifiers_sums`). It knows nothing of
echo2.

    echo2 run examples/verifiers_sums.toml

Sums of two numbers below `largest`; 1 for the right one, and `near` times how near a wrong one is.
"""

from collections.abc import Iterator

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumConfig(vf.TaskConfig):
    near: float = 0.2


class Sum(vf.Task[SumData, vf.State, SumConfig]):
    @vf.reward
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        return float(_said(trace) == str(task.answer))

    @vf.reward
    async def near(self, task: SumData, trace: vf.Trace) -> float:
        said = _said(trace)
        if not said.isdecimal() or said == str(task.answer):
            return 0.0
        return self.config.near * max(0.0, 1.0 - abs(int(said) - task.answer) / 20)

    @vf.metric
    async def is_number(self, trace: vf.Trace) -> float:
        return float(_said(trace).isdecimal())


class SumsConfig(vf.TasksetConfig):
    largest: int = 100
    task: SumConfig = SumConfig()


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self) -> Iterator[Sum]:
        numbers = range(self.config.largest)
        for a, b in ((a, b) for a in numbers for b in numbers):
            data = SumData(prompt=f"{a:02d}+{b:02d}=", answer=a + b)
            yield Sum(data, self.config.task)


def _said(trace: vf.Trace) -> str:
    return trace.last_reply.strip()


__all__ = ["Sums"]
