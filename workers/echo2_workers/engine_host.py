"""The engine process: one engine behind a pipe, so that a busy one delays nothing else.

Started by `engine_process`; ends with its parent. Messages (header `op`; frames in brackets):

    to the child    start {id, engine, settings, assets}              -> reply {id}
                    install {id, folder, digest, version, mode, tolerance, previous, probe}
                            [tokens, logprobs]      -> reply {id, install_s, pause_s, canary_diff}
                                                     | reply {id, stage, text, restored}
                    generate {id, sampling, seed, group_seed, group_size, index} [tokens]
                                                    -> reply {id, finish, spans} [tokens, logprobs]
                                                     | reply {id, error}
                    cancel {id}
                    ping {}                         -> pong {steps, busy}
    to the parent   tokens {counts: [[id, n], ...]}, at most every REPORT_S
                    crashed {text, fatal}, and then the process ends; `fatal`: the settings
                    cannot work, so that another try is of no use
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

import numpy as np
import uvloop

from echo2.errors import ConfigError, Echo2Error, EngineError, WeightsError
from echo2.net.pipe import Pipe, PipeBrokenError, child_pipe
from echo2.types import Sampling, Version
from echo2_workers.canary import read_probe
from echo2_workers.engine import Engine, GenerateRequest, RequestError, StoredTensors
from echo2_workers.environment_host import generated_to_plain
from echo2_workers.installing import InstallError, Weights, install
from echo2_workers.playing import told

REPORT_S: Final = 0.2


def make_engine(name: str, settings: dict[str, Any]) -> Engine:
    """The engine `name`, not started. Imports what it needs, torch included."""
    if name == "transformers":
        from echo2_workers.engines.transformers import TransformersEngine

        return TransformersEngine(**settings)
    if name == "vllm":
        from echo2_workers.engines.vllm import VllmEngine

        return VllmEngine(**settings)
    raise EngineError(f"there is no engine {name!r} that runs in a process of its own")


class EngineHost:
    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._engine: Engine | None = None
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._counts: dict[int, int] = {}
        self._crash: asyncio.Future[tuple[str, bool]] = asyncio.get_running_loop().create_future()

    async def serve(self) -> int:
        """Until the parent closes the pipe (0) or the engine crashed (1)."""
        reader = asyncio.create_task(self._read())
        reporter = asyncio.create_task(self._report())
        ends: set[asyncio.Future[Any]] = {reader, self._crash}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        reporter.cancel()
        if not self._crash.done():
            await reader
            return 0
        reader.cancel()
        text, fatal = self._crash.result()
        await self._pipe.send({"op": "crashed", "text": text, "fatal": fatal})
        await self._pipe.close()
        return 1

    async def _read(self) -> None:
        while (received := await self._pipe.receive()) is not None:
            header, frames = received
            op = header["op"]
            if op == "ping":
                engine = self._engine
                steps, busy = (0, False) if engine is None else (engine.steps, engine.busy)
                await self._pipe.send({"op": "pong", "steps": steps, "busy": busy})
            elif op == "cancel":
                request = self._requests.get(header["id"])
                if request is not None:
                    request.cancel()
            else:
                work = {"start": self._start, "install": self._install, "generate": self._generate}
                self._begin(header["id"], work[op](header, frames))

    def _begin(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        request = asyncio.create_task(self._guard(work))
        self._requests[number] = request
        request.add_done_callback(lambda _: self._requests.pop(number, None))

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Whatever is no answer to a request is the end of this engine."""
        try:
            await work
        except PipeBrokenError:
            self._end("the daemon is gone")
        except Echo2Error as error:
            self._end(str(error), fatal=isinstance(error, ConfigError))
        except MemoryError as error:
            self._end(f"out of memory: {told(error)}")
        except Exception as error:
            self._end(told(error))

    def _end(self, text: str, *, fatal: bool = False) -> None:
        if not self._crash.done():
            self._crash.set_result((text, fatal))

    async def _start(self, header: dict[str, Any], frames: list[bytes]) -> None:
        engine = make_engine(header["engine"], header["settings"])
        await engine.start(Path(header["assets"]) if header["assets"] else None)
        self._engine = engine
        await self._pipe.send({"op": "reply", "id": header["id"]})

    async def _install(self, header: dict[str, Any], frames: list[bytes]) -> None:
        folder = Path(header["folder"])
        try:
            probe = read_probe(header["probe"], *frames)
            tensors = _tensors(folder, header["digest"])
            previous = None
            if header["previous"] is not None:
                digest, version = header["previous"]
                previous = Weights(Version(*version), _tensors(folder, digest))
            installed = await install(
                self._live_engine(),
                Weights(Version(*header["version"]), tensors),
                mode=header["mode"],
                probe=probe,
                tolerance=header["tolerance"],
                previous=previous,
            )
        except InstallError as error:
            reply = {"stage": error.stage, "text": str(error), "restored": error.restored}
        except WeightsError as error:  # nothing was touched yet
            reply = {"stage": "install", "text": str(error), "restored": True}
        else:
            reply = {
                "install_s": installed.install_s,
                "pause_s": installed.pause_s,
                "canary_diff": installed.canary_diff,
            }
        await self._pipe.send({"op": "reply", "id": header["id"], **reply})

    async def _generate(self, header: dict[str, Any], frames: list[bytes]) -> None:
        number = header["id"]
        request = GenerateRequest(
            token_ids=np.frombuffer(frames[0], "<i4").tolist(),
            sampling=Sampling(*header["sampling"]),
            seed=header["seed"],
            group_seed=header["group_seed"],
            group_size=header["group_size"],
            index=header["index"],
        )

        def count(tokens: int) -> None:
            self._counts[number] = self._counts.get(number, 0) + tokens

        try:
            generated = await self._live_engine().generate(request, count)
        except RequestError as error:
            await self._pipe.send({"op": "reply", "id": number, "error": str(error)})
            return
        await self._send_counts()
        plain, reply_frames = generated_to_plain(generated)
        await self._pipe.send({"op": "reply", "id": number, **plain}, reply_frames)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            await self._send_counts()

    async def _send_counts(self) -> None:
        if self._counts:
            counts, self._counts = self._counts, {}
            await self._pipe.send({"op": "tokens", "counts": list(counts.items())})

    def _live_engine(self) -> Engine:
        if self._engine is None:
            raise EngineError("the engine was not started")
        return self._engine


def _tensors(folder: Path, manifest_digest: str) -> StoredTensors:
    from echo2_workers.engines.stored import stored_tensors  # imports torch

    return stored_tensors(folder, manifest_digest)


async def _serve() -> int:
    return await EngineHost(await child_pipe()).serve()


def main() -> None:
    """`python -m echo2.net.child echo2_workers.engine_host`."""
    try:
        code = uvloop.run(_serve())
    except PipeBrokenError:
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
