"""Commands, SkyPilot (against a module with its signatures), and classes of the user's."""

from __future__ import annotations

import asyncio
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from echo2.config import Config, config_from_mapping
from echo2.errors import ConfigError
from echo2.provision import Machine, MachineOrder, ProvisionError, load_provisioner

PYTHON = sys.executable


def a_config(**provisioner: Any) -> Config:
    return config_from_mapping(
        {
            "offers": [{"name": "gpu", "price_usd_per_h": 1.0, "groups_per_s": 1.0}],
            "provisioner": provisioner,
        }
    )


def commands(start: str, stop: str = "", **more: Any) -> Config:
    return a_config(
        kind="command",
        start_command=[PYTHON, "-c", start, "{worker}", "{offer}", "{run_dir}"],
        stop_command=[PYTHON, "-c", stop, "{worker}", "{id}"],
        **more,
    )


def an_order(config: Config, run_dir: Path) -> MachineOrder:
    return MachineOrder("gpu-1", config.offers[0], "secret", run_dir)


async def test_a_start_gets_its_values_and_its_last_line_is_the_id(tmp_path: Path) -> None:
    said = "import os, sys; print('renting'); print(*sys.argv[1:], os.environ['ECHO2_TOKEN'])"
    config = commands(said)
    found = await load_provisioner(config).start(an_order(config, tmp_path))
    assert found == f"gpu-1 gpu {tmp_path} secret"


async def test_a_failure_is_told_with_its_code_and_the_end_of_stderr(tmp_path: Path) -> None:
    fails = "import sys; print('a\\nb\\nno such machine', file=sys.stderr); sys.exit(3)"
    config = commands("", fails)
    provisioner = load_provisioner(config)
    with pytest.raises(ProvisionError, match=r"ended with code 3: a \| b \| no such machine$"):
        await provisioner.stop(Machine("gpu-1", "gpu", "i-7", tmp_path))


async def test_what_a_start_leaves_running_with_its_output_open_is_not_waited_for(
    tmp_path: Path,
) -> None:
    pid = tmp_path / "pid"
    leaves = (
        "import pathlib, subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True)\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(p.pid)); print('up')"
    )
    config = commands(leaves)
    try:
        async with asyncio.timeout(300):  # half of the child's life
            assert await load_provisioner(config).start(an_order(config, tmp_path)) == "up"
    finally:
        os.kill(int(pid.read_text()), 9)


async def test_a_command_that_is_cancelled_is_killed_with_its_children(tmp_path: Path) -> None:
    started = tmp_path / "started"
    config = commands(
        f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(600)"
    )
    task = asyncio.create_task(load_provisioner(config).start(an_order(config, tmp_path)))
    async with asyncio.timeout(60):
        while not started.exists():  # noqa: ASYNC110  a file
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = a_config(kind="command", start_command=["./rent"], stop_command=["./x", "{worker}"])
    with pytest.raises(ProvisionError, match=r"\./rent cannot be started \(No such file"):
        await load_provisioner(config).start(an_order(config, tmp_path))


async def test_machines_are_listed_where_a_command_can(tmp_path: Path) -> None:
    assert await load_provisioner(commands("")).list() is None
    config = commands("", list_command=[PYTHON, "-c", "print('gpu-1\\ngpu-2')"])
    assert await load_provisioner(config).list() == {"gpu-1", "gpu-2"}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("no_such_module:Class", "cannot be made"),
        ("json:Nothing", "cannot be made"),
        ("types:SimpleNamespace", "cannot be made"),
    ],
)
def test_a_class_that_is_none_is_refused(kind: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_provisioner(a_config(kind=kind))


# ---------------------------------------------------------------------------- SkyPilot


class FakeSky(types.ModuleType):
    """Clusters, and requests that `get` resolves, with SkyPilot's call signatures."""

    def __init__(self) -> None:
        super().__init__("sky")
        self.clusters: dict[str, dict[str, str]] = {}
        self.requests: dict[str, Any] = {}
        self.Task = FakeTask

    def _request(self, result: Any) -> str:
        name = f"request-{len(self.requests)}"
        self.requests[name] = result
        return name

    def launch(self, task: FakeTask, cluster_name: str | None = None, **_: Any) -> str:
        assert cluster_name
        self.clusters[cluster_name] = {"path": task.path, **task.envs}
        return self._request((1, object()))

    def down(self, cluster_name: str, purge: bool = False) -> str:
        del self.clusters[cluster_name]
        return self._request(None)

    def status(self, cluster_names: list[str] | None = None, **_: Any) -> str:
        return self._request(
            [{"name": n} for n in self.clusters if cluster_names is None or n in cluster_names]
        )

    def get(self, request_id: str) -> Any:
        return self.requests.pop(request_id)


class FakeTask:
    def __init__(self, path: str) -> None:
        self.path, self.envs = path, dict[str, str]()

    @classmethod
    def from_yaml(cls, yaml_path: str) -> FakeTask:
        return cls(yaml_path)

    def update_envs(self, envs: dict[str, str]) -> FakeTask:
        self.envs.update(envs)
        return self


@pytest.fixture
def sky(monkeypatch: pytest.MonkeyPatch) -> FakeSky:
    fake = FakeSky()
    monkeypatch.setitem(sys.modules, "sky", fake)
    return fake


async def test_a_cluster_is_launched_listed_and_taken_down(tmp_path: Path, sky: FakeSky) -> None:
    task = tmp_path / "worker.yaml"
    task.write_text("run: echo2 worker --join $ECHO2_TOKEN\n")
    config = a_config(kind="skypilot", task=str(task))
    provisioner = load_provisioner(config)
    machine = Machine("gpu-1", "gpu", "", tmp_path)
    await provisioner.stop(machine)  # it never was there
    await provisioner.start(an_order(config, tmp_path))
    assert sky.clusters == {
        "gpu-1": {"path": str(task), "ECHO2_TOKEN": "secret", "ECHO2_WORKER": "gpu-1"}
    }
    assert await provisioner.list() == {"gpu-1"}
    await provisioner.stop(machine)
    assert sky.clusters == {}


async def test_an_offer_may_have_a_task_of_its_own(tmp_path: Path, sky: FakeSky) -> None:
    task, own = tmp_path / "worker.yaml", tmp_path / "worker.gpu.yaml"
    task.touch()
    own.touch()
    config = a_config(kind="skypilot", task=str(task))
    await load_provisioner(config).start(an_order(config, tmp_path))
    assert sky.clusters["gpu-1"]["path"] == str(own)


def test_without_skypilot_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sky", None)
    (tmp_path / "t.yaml").touch()
    with pytest.raises(ConfigError, match=r"pip install 'echo2\[skypilot\]'"):
        load_provisioner(a_config(kind="skypilot", task=str(tmp_path / "t.yaml")))
    with pytest.raises(ConfigError, match="there is no such file"):
        load_provisioner(a_config(kind="skypilot", task=str(tmp_path / "none.yaml")))
