"""A worker's contact with the coordinator: hello, heartbeats, silence, fresh sockets.

    Reconnect -> ConnectionRestored -> hello -> welcome -> heartbeats and echoes
        ^--- silence, a lost connection, or no welcome in time ---'

Ends with a cause when there was no contact for `connect_timeout_s`. Leaves back-off with
jitter, addresses and keys to the shell.
"""

from __future__ import annotations

from echo2.core.worker_events import Effect, Log, Reconnect
from echo2.core.worker_settings import WorkerSettings
from echo2.messages import PROTOCOL, Refused, WorkerWelcome

HELLO_AGAIN_S = 1.0


class Session:
    """`welcomed`: the hello of the present sockets was answered."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.run_id = ""
        self.connected = False
        self.welcomed = False
        self.announcements = 0
        """Versions announced since the welcome."""
        self.environment_settings = "{}"
        self.silence_max_s = 15.0
        self._heartbeat_interval_s = 1.0
        self._heartbeat_at = 0.0
        self._sequence = 0
        self._echo_at = 0.0
        self._hello_at = 0.0
        self._alone_since = 0.0
        self._alone_cause = "it never answered"
        self._attempts = 0

    def start(self, now: float) -> list[Effect]:
        self._alone_since = now
        return [Reconnect(0, "start")]

    def restored(self) -> None:
        self.connected, self.welcomed = True, False

    def hello_sent(self, now: float) -> None:
        self._hello_at = now

    def not_connected(self, reason: str) -> None:
        self._alone_cause = reason

    def lost(self, reason: str, now: float) -> list[Effect]:
        """Ask for fresh sockets; nothing when they are being made already."""
        if not self.connected:
            return []
        if self.welcomed:
            self._alone_since = now
        self.connected = self.welcomed = False
        self._alone_cause = reason
        self._attempts += 1
        return [
            Log("warning", "coordinator_lost", {"reason": reason, "attempt": self._attempts}),
            Reconnect(self._attempts, reason),
        ]

    def problem(self, welcome: WorkerWelcome) -> str:
        """Why this worker cannot work for the run that welcomes it; "" when it can."""
        if welcome.protocol != PROTOCOL:
            return (
                f"the coordinator speaks protocol {welcome.protocol}, this worker {PROTOCOL}; "
                "install the same echo2 on both"
            )
        if self.run_id and welcome.run_id != self.run_id:
            return (
                f"the coordinator serves run {welcome.run_id} now and this worker belongs to "
                f"run {self.run_id}; start it again to join the new one"
            )
        if welcome.environment != self.settings.environment:
            return (
                f"the run's environment is {welcome.environment!r} and this worker's "
                f"{self.settings.environment!r}; set environment.name to the run's"
            )
        if self.run_id and welcome.settings != self.environment_settings:
            return "the run's environment settings changed; start this worker again"
        return ""

    def welcome(self, welcome: WorkerWelcome, now: float) -> None:
        self.welcomed = True
        self.announcements = 0
        self.run_id = welcome.run_id
        self.environment_settings = welcome.settings
        self.silence_max_s = welcome.silence_max_s
        self._heartbeat_interval_s = welcome.heartbeat_interval_s
        self._heartbeat_at = self._echo_at = now
        self._attempts = 0

    def refused(self, refused: Refused, now: float) -> bool:
        """Note a refusal that is not for good; whether to say hello again."""
        self._alone_cause = refusal_text(refused)
        unknown = refused.reason == "unknown_peer"
        return unknown and self.connected and now >= self._hello_at + HELLO_AGAIN_S

    def echoed(self, now: float) -> None:
        self._echo_at = now

    def next_heartbeat(self, now: float) -> int | None:
        """The sequence number of a heartbeat that is due now."""
        if not self.welcomed or now < self._heartbeat_at:
            return None
        self._heartbeat_at = now + self._heartbeat_interval_s
        self._sequence += 1
        return self._sequence

    @property
    def next_sequence(self) -> int:
        """The number of the next heartbeat."""
        return self._sequence + 1

    def given_up(self, now: float) -> str:
        """Why the daemon must end; "" while there is hope."""
        limit_s = self.settings.connect_timeout_s
        if self.welcomed or now < self._alone_since + limit_s:
            return ""
        return (
            f"the coordinator could not be reached for {limit_s:g} s (net.connect_timeout_s): "
            f"{self._alone_cause}"
        )

    def watch(self, now: float) -> list[Effect]:
        """Fresh sockets after a silence, and after a hello that nobody answers."""
        if self.welcomed:
            silent_s = now - self._echo_at
            if silent_s <= self.silence_max_s:
                return []
            return self.lost(
                f"no heartbeat was echoed for {silent_s:.1f} s (at most {self.silence_max_s:g} s)",
                now,
            )
        limit_s = self.settings.welcome_timeout_s
        if not self.connected or now < self._hello_at + limit_s:
            return []
        return self.lost(
            f"no answer to the hello for {limit_s:g} s; is the coordinator running there, and "
            "is this worker's key authorized?",
            now,
        )


def refusal_text(refused: Refused) -> str:
    return f"the coordinator refused this worker ({refused.reason}): {refused.text}"
