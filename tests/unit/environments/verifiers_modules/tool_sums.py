"""Sums with a tool that adds, served once for all rollouts, in a process of its own."""

import os
from collections.abc import Iterator

import verifiers.v1 as vf


class Adder(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "adder"

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return f"{a + b} by {os.getpid()}"


class Sum(vf.Task[vf.TaskData]):
    @vf.stop
    async def said_enough(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 3

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "42")


class Sums(vf.Taskset[Sum]):
    def load(self) -> Iterator[Sum]:
        yield Sum(vf.TaskData(prompt="40 + 2 =", system_prompt="Use the tool."))

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Adder(vf.SharedToolsetConfig())]


__all__ = ["Sums"]

if __name__ == "__main__":
    Adder.run()
