"""Which parts a configuration asks for: settings of the state machine, engine, environments."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from echo2 import __version__
from echo2.config import Config
from echo2.config_vllm import precision_of
from echo2.core.worker_settings import WorkerSettings
from echo2.net.sockets import split_endpoint
from echo2_workers.engine_process import EngineHandle, EngineProcess, LocalEngine
from echo2_workers.engine_python import engine_python
from echo2_workers.engines.null import NullEngine
from echo2_workers.environment import BUILTIN, About
from echo2_workers.environment_pool import EnvironmentPool
from echo2_workers.groups import Environments, LocalEnvironments
from echo2_workers.model_folder import FetchAssets, ModelFolder


def settings_of(config: Config, name: str, about: About) -> WorkerSettings:
    """The state machine's settings out of the TOML schema."""
    worker = config.worker
    return WorkerSettings(
        name=name,
        echo2_version=__version__,
        engine=worker.engine,
        precision=precision_of(config),
        environment=config.environment.name,
        environment_version=about.version,
        replays=about.replays,
        on_update=worker.on_update,
        uplink_mbit=worker.uplink_mbit,
        downlink_mbit=worker.downlink_mbit,
        slots=worker.slots,
        price_usd_per_h=worker.price_usd_per_h,
        standby_usd_per_h=worker.standby_usd_per_h,
        needs_weights=worker.engine not in ("null", "none"),
        takes_leases=worker.engine != "none",
        drain_timeout_s=worker.drain_timeout_s,
        connect_timeout_s=config.net.connect_timeout_s,
        bytes_in_flight_max=config.net.rollout_bytes_in_flight,
    )


def relay_bind(config: Config) -> str:
    """Where the relay listens, "tcp://HOST:PORT"; "" when it is switched off.

    The address from which this machine reaches the coordinator: loopback stays loopback. With
    `worker.relay_endpoint`, which a router forwards from, on every address.
    """
    worker, net = config.worker, config.net
    if not worker.relay:
        return ""
    port = worker.relay_port or 0
    if worker.relay_endpoint:
        return f"tcp://0.0.0.0:{port}"
    host = split_endpoint(net.coordinator)[0] if net.coordinator else net.host
    return f"tcp://{_local_address(host)}:{port}"


def _local_address(host: str) -> str:
    """This machine's address on the way to `host`; loopback when there is no way."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect(address)
            found = str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
    return f"[{found}]" if ":" in found else found


def make_engine(config: Config, *, on_died: Callable[[str], None]) -> EngineHandle:
    """An engine that is not started yet. Raises ConfigError when worker.python is wrong."""
    worker = config.worker
    if worker.engine == "null":
        return LocalEngine(NullEngine(**worker.null.model_dump()))
    model = config.model
    settings: dict[str, Any] = {"dtype": model.compute_dtype, "weights_dtype": model.dtype}
    if worker.engine == "transformers":
        settings |= worker.transformers.model_dump()
    if worker.engine == "vllm":
        sampling = config.sampling
        settings |= worker.vllm.model_dump()
        settings |= {"stop": sampling.stop, "stop_token_ids": sampling.stop_token_ids}
    python = engine_python(worker.python, worker.engine)
    return EngineProcess(
        worker.engine,
        settings,
        on_died=on_died,
        python=python,
        silence_max_s=worker.engine_silence_s,
        stall_max_s=worker.engine_stall_s,
    )


def make_model_folder(config: Config, folder: Path, fetch_assets: FetchAssets) -> EngineHandle:
    """What engine "none" is. `folder` is the worker's own; `fetch_assets` brings assets."""
    name = config.worker.model_folder
    return ModelFolder(
        Path(os.path.normpath(folder / name)) if name else None,
        worker_folder=folder,
        fetch_assets=fetch_assets,
    )


def make_environments(
    config: Config,
    *,
    folder: Path,
    import_paths: Sequence[Path],
    on_fatal: Callable[[str], None],
) -> Environments:
    """Processes of their own, but for a trusted environment beside the null engine."""
    environment = config.environment
    if config.worker.engine == "null" and environment.name in BUILTIN:
        return LocalEnvironments(environment.name)
    return EnvironmentPool(
        name=environment.name,
        processes=environment.processes,
        hang_timeout_s=environment.hang_timeout_s,
        folder=folder,
        import_paths=import_paths,
        on_fatal=on_fatal,
    )


def doubts(config: Config) -> dict[str, str]:
    """Log event -> reason, for settings that work but may surprise."""
    found = {}
    worker = config.worker
    if worker.engine == "none":
        found["worker_idle"] = (
            'engine "none" fetches, forwards and lays out versions; it samples nothing'
        )
    per_trajectory = worker.null.tokens_mean / config.dispatch.group_size
    if worker.engine == "null" and per_trajectory > config.sampling.max_tokens:
        found["null_tokens_cut"] = (
            f"worker.null.tokens_mean over dispatch.group_size is {per_trajectory:g} tokens per "
            f"trajectory, and sampling.max_tokens {config.sampling.max_tokens} cuts them"
        )
    return found
