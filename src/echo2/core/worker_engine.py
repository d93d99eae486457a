"""The life of a worker's engine, and of the run's assets that it needs to start.

    off --assets are here--> starting --> up --died--> off (after a back-off, again)

Bounded: `attempts_max` fetches of the assets in a row, `engine_restarts_max` deaths
without a finished group in between. Each life has a number, `epoch`.
"""

from __future__ import annotations

import enum

from echo2.core.worker_events import Effect, Fetch, Log, StartEngine
from echo2.core.worker_settings import WorkerSettings
from echo2.core.worker_versions import backoff_s


class EngineLife(enum.Enum):
    OFF = enum.auto()
    STARTING = enum.auto()
    UP = enum.auto()


class EngineCare:
    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.life = EngineLife.OFF
        self.epoch = 0
        self.assets_digest = ""
        self.assets_fetching = False
        self._assets_here = False
        self._assets_failures = 0
        self._assets_retry_at = float("-inf")
        self._origin = ("", "")
        self._deaths = 0
        self._retry_at = float("-inf")

    def learn_assets(self, digest: str, origin: str, origin_key: str) -> str:
        """Note where the assets are; the problem when they are not the known ones."""
        if not self.settings.needs_weights or digest == "":
            return ""
        if self.assets_digest and digest != self.assets_digest:
            return (
                f"the run's tokenizer and model configuration changed from "
                f"{self.assets_digest[:12]} to {digest[:12]}; start this worker again"
            )
        self.assets_digest = digest
        self._origin = (origin, origin_key)
        return ""

    def is_assets(self, manifest_digest: str) -> bool:
        """Whether a fetch of this manifest is the one of the assets."""
        return self.assets_fetching and manifest_digest == self.assets_digest

    def assets_fetched(self) -> None:
        self.assets_fetching, self._assets_here, self._assets_failures = False, True, 0

    def assets_failed(self, text: str, now: float) -> str:
        """The problem when no further try is allowed."""
        self.assets_fetching = False
        self._assets_failures += 1
        self._assets_retry_at = now + backoff_s(self._assets_failures)
        if self._assets_failures < self.settings.attempts_max:
            return ""
        return (
            f"the run's assets {self.assets_digest[:12]} could not be fetched in "
            f"{self._assets_failures} tries: {text}"
        )

    def ready(self, epoch: int) -> list[Effect]:
        if epoch != self.epoch or self.life is not EngineLife.STARTING:
            return []
        self.life = EngineLife.UP
        return [Log("info", "engine_started", {"epoch": epoch})]

    def lives(self, epoch: int) -> bool:
        """Whether `epoch` is the present life, and not over."""
        return epoch == self.epoch and self.life is not EngineLife.OFF

    def died(self, text: str, now: float) -> str:
        """The problem when it died too often to be started again."""
        self.life = EngineLife.OFF
        self._deaths += 1
        self._retry_at = now + backoff_s(self._deaths)
        if self._deaths <= self.settings.engine_restarts_max:
            return ""
        return (
            f"the engine died {self._deaths} times without finishing a group in between; "
            f"the last time: {text}"
        )

    def finished_group(self) -> None:
        self._deaths = 0

    def advance(self, now: float, environment_settings: str) -> list[Effect]:
        """Fetch the assets, then start the engine, when either is due."""
        if self.life is not EngineLife.OFF:
            return []
        if self.settings.needs_weights and not self._assets_here:
            if not self.assets_digest or self.assets_fetching or now < self._assets_retry_at:
                return []
            self.assets_fetching = True
            return [Fetch(self.assets_digest, *self._origin, None)]
        if now < self._retry_at:
            return []
        self.life = EngineLife.STARTING
        self.epoch += 1
        return [StartEngine(self.epoch, self.assets_digest, environment_settings)]
