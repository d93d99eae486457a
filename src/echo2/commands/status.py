"""`echo2 status`: the state of a run now, from its coordinator."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp

from echo2.commands.run_folder import RunFolder, is_alive
from echo2.commands.run_view import fetch_status, number, told_ends, told_wait
from echo2.config import load_config
from echo2.errors import ConfigError, Echo2Error

BROADCASTS_SHOWN = 3


def main(run_dir: Path | None, *, url: str, token: str, as_json: bool) -> int:
    if bool(run_dir) == bool(url):
        raise ConfigError(
            "echo2 status needs either --run-dir DIR (the folder of a run on this machine) or "
            "--url http://HOST:PORT"
        )
    if run_dir is not None:
        url, token = _find(RunFolder(run_dir), token)
    status = asyncio.run(_fetch(url, token))
    print(json.dumps(status, indent=2) if as_json else "\n".join(told(status)))
    return 0


def told(status: dict[str, Any]) -> list[str]:
    """The status in lines for people; what is missing is "-"."""
    learner = status.get("learner") or {}
    versions = status.get("versions") or {}
    buffer = status.get("buffer") or {}
    held = ", ".join(f"{n} of {v}" for v, n in (buffer.get("by_version") or {}).items())
    refused = ", ".join(f"{n} {why}" for why, n in (status.get("refused") or {}).items() if n)
    lines = [
        f"run       {status.get('run_id', '-')}  {status.get('state', '-')}",
        f"step      {number(status.get('step'))}  incarnation {number(status.get('incarnation'))}",
        f"version   {versions.get('published') or '-'}  {str(versions.get('digest') or '')[:16]}",
        f"learner   {learner.get('name', '-')}  {learner.get('state', 'not connected')}"
        + (f"  silent {number(learner.get('silent_s'))} s" if learner else ""),
        f"buffer    {number(buffer.get('total'))} groups" + (f" ({held})" if held else ""),
        f"leases    {number(status.get('leases'))}",
        f"groups    {told_ends(status.get('groups') or {})}",
        f"rate      {number(status.get('tokens_per_s'))} tokens/s",
        f"cost      ${status.get('cost_usd') or 0.0:.4f}",
        f"loop lag  {number(status.get('loop_lag_s'))} s",
    ]
    if refused:
        lines.append(f"refused   {refused}")
    audits = status.get("audits") or {}
    if any(audits.values()):
        told = ", ".join(f"{number(count)} {verdict}" for verdict, count in audits.items())
        lines.append(f"audits    {told}")
    for name, found in (status.get("quarantined") or {}).items():
        lines.append(
            f"quarantine {name}  since step {number(found.get('step'))}  {found.get('reason')}"
        )
    lines.extend(_told_activation(status.get("activation") or {}))
    lines.extend(f"waits     {told_wait(wait)}" for wait in status.get("waits") or [])
    for worker in status.get("workers") or []:
        standby = worker.get("active") is False
        lines.append(
            f"worker    {worker.get('name')}  {worker.get('state')}"
            + (" (standby)  " if standby else "  ")
            + f"version {worker.get('version') or '-'}  "
            f"{number(worker.get('leases'))}/{number(worker.get('slots'))} leases  "
            f"{number(worker.get('tokens_per_s'))} tokens/s  "
            f"Δlogprob {number(worker.get('mismatch'))}  "
            f"silent {number(worker.get('silent_s'))} s"
            + _told_price(worker.get("usd_per_1000_rollouts"))
            + _told_fetch(worker.get("fetch"))
        )
    lines.extend(_told_dissemination(status))
    return lines


def _told_activation(found: dict[str, Any]) -> list[str]:
    """The latest decision, and the machines that were started."""
    if not found:
        return []
    lines = [
        f"active    {number(found.get('active'))}, standby {number(found.get('standby'))}: "
        f"{found.get('decision') or '-'}"
    ]
    leads = ", ".join(f"{name} {number(s)} s" for name, s in (found.get("lead_s") or {}).items())
    if leads:
        lines.append(f"lead      {leads}")
    for machine in found.get("machines") or []:
        text = f"  {machine['text']}" if machine.get("text") else ""
        lines.append(
            f"machine   {machine.get('worker')}  {machine.get('offer')}  {machine.get('state')}"
            + text
        )
    return lines


def _told_price(usd: float | None) -> str:
    return "" if not usd else f"  ${usd:.4g} per 1000 rollouts"


def _told_fetch(fetch: dict[str, Any] | None) -> str:
    if not fetch or not fetch.get("missing"):
        return ""
    return f"  {number(fetch['missing'])} of {number(fetch.get('chunks'))} chunks missing"


def _told_dissemination(status: dict[str, Any]) -> list[str]:
    """Relays, their links, and how long the newest versions took to reach the workers."""
    lines = []
    for worker in status.get("workers") or []:
        relay = worker.get("relay")
        if relay:
            ways = "accepts" if relay.get("accepts") else "only dials"
            why = f"  ({relay['reason']})" if relay.get("reason") else ""
            lines.append(
                f"relay     {worker.get('name')}  {ways}"
                + ("" if relay.get("forwards") else ", forwards nothing")
                + f"  up {number(relay.get('up_mbit'))}  down {number(relay.get('down_mbit'))} "
                f"Mbit/s{why}"
            )
    for link in status.get("links") or []:
        lines.append(
            f"link      {link.get('from')} > {link.get('to')}  {number(link.get('mbit'))} Mbit/s"
        )
    for found in (status.get("broadcasts") or [])[-BROADCASTS_SHOWN:]:
        planned = (
            f"  planned {number(found['predicted_s'])} s, bound {number(found.get('bound_s'))} s"
            if found.get("predicted_s") is not None
            else ""
        )
        lines.append(
            f"t_bcast   version {found.get('version')}  {number(found.get('t50_s'))} s, "
            f"{number(found.get('t90_s'))} s, {number(found.get('t100_s'))} s at half, 90 % and "
            f"all of {number(found.get('workers'))}{planned}  fetching "
            f"{number(found.get('fetch_share'))}, installing {number(found.get('install_share'))} "
            "of it"
        )
    return lines


def _find(folder: RunFolder, token: str) -> tuple[str, str]:
    """(url, token) of the coordinator that serves a run folder."""
    record = folder.coordinator()
    if record is None:
        raise Echo2Error(f"{folder.path} has no coordinator.json: no run was started there")
    if not is_alive(record.get("pid")):
        raise Echo2Error(
            f"the coordinator of {folder.path} (pid {record.get('pid')}) is not running; its "
            "records are there: echo2 verify, or go on with echo2 run --resume"
        )
    if not record.get("http"):
        raise Echo2Error("this run has no HTTP (http.enabled = false), so no status can be asked")
    if not token and folder.resolved_config.exists():
        token = load_config(folder.resolved_config).http.token
    return str(record["http"]), token


async def _fetch(url: str, token: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session:
        return await fetch_status(session, url, token)
