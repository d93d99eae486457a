"""Errors by audience: the user, a peer, an engine, an environment, the learner.

Each says what happened with its values, what is allowed and what to do.
"""

from __future__ import annotations


class Echo2Error(Exception):
    """Base of everything that echo2 raises on purpose."""


class ConfigError(Echo2Error):
    """The user's settings cannot work. Holds every problem found, not only the first."""

    def __init__(self, problems: list[str] | str, *, source: str = "") -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        self.source = source
        head = f"{source}: " if source else ""
        if len(self.problems) == 1:
            text = head + self.problems[0]
        else:
            text = f"{head}{len(self.problems)} problems\n" + "\n".join(
                f"  {i}. {problem}" for i, problem in enumerate(self.problems, 1)
            )
        super().__init__(text)


class ProtocolError(Echo2Error):
    """A message broke the protocol. `remote` says whose bug it is."""

    def __init__(self, text: str, *, remote: bool, reason: str = "malformed") -> None:
        self.remote = remote
        self.reason = reason
        super().__init__(text)


class RemoteProtocolError(ProtocolError):
    """The peer sent what the protocol forbids; it is refused and counted by `reason`."""

    def __init__(self, text: str, *, reason: str = "malformed") -> None:
        super().__init__(text, remote=True, reason=reason)


class LocalProtocolError(ProtocolError):
    """Our own code asked for what the protocol forbids."""

    def __init__(self, text: str, *, reason: str = "local") -> None:
        super().__init__(text, remote=False, reason=reason)


class FencedError(Echo2Error):
    """A newer learner took over; this one may neither complete nor publish."""


class RefusedError(Echo2Error):
    """The coordinator refused this peer, with its reason."""


class WeightsError(Echo2Error):
    """Bytes of a version are missing, torn or not those of its manifest."""


class EngineError(Echo2Error):
    """The engine failed; the original error is chained."""


class EnvironmentError_(Echo2Error):  # noqa: N801, N818  the builtin name is taken
    """A user's environment or reward failed; the original error is chained."""


class LearnerError(Echo2Error):
    """A learner step, checkpoint or publication failed; the original error is chained."""


class WaitTimeoutError(Echo2Error):
    """A wait ended at its deadline; the text names what was waited for, and who owed it."""


class RunEndedError(Echo2Error):
    """The coordinator ended (the run, or only itself); the text says why."""

    def __init__(self, text: str, *, finished: bool = False) -> None:
        self.finished = finished
        super().__init__(text)
