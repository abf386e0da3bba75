"""`caisson doctor`: what is right and what is not, and how to mend it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from client.cli.faults import ExitCode
from client.cli.session import AsJson, ended, terminal

if TYPE_CHECKING:
    from client.finding import Finding
    from workers.settings import Settings


def doctor(as_json: AsJson = False) -> None:
    """Check everything that Caisson needs.

    That is this machine, the store, the agents, the model endpoint, Temporal and the workers. Each line is ok, warn or fail,
    with the way to mend it. The exit code is 1 when something failed. A key is never shown.

    \b
    Example:
        caisson doctor
    """
    ended(_doctor(as_json))


async def _doctor(as_json: bool) -> int:
    from client.doctor import examine
    from client.finding import Finding, State

    settings, complaint = _settings()
    findings: list[Finding] = []
    if complaint is not None:
        findings.append(Finding("settings", State.FAIL, complaint, "the checks below use the default settings"))
        if not as_json:
            _print(findings[0])
    async for finding in examine(settings):
        findings.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        rows = [{"check": f.check, "state": f.state.value, "found": f.found, "remedy": f.remedy} for f in findings]
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
    failed = any(finding.state is State.FAIL for finding in findings)
    return ExitCode.FAILED if failed else ExitCode.COMPLETED


def _settings() -> tuple[Settings, str | None]:
    from contracts.base import BadInput
    from workers.settings import Settings, load_settings

    try:
        return load_settings(), None
    except BadInput as error:
        return Settings(), str(error)


def _print(finding: Finding) -> None:
    from rich.text import Text

    from client.show import clean

    style = {"ok": "green", "warn": "yellow", "fail": "bold red"}[finding.state.value]
    console, indent = terminal(), " " * 25
    found = clean(finding.found).replace("\n", f"\n{indent}")
    console.print(Text.assemble((f"{finding.state.value:<6}", style), f"{finding.check:<19}", found), soft_wrap=True)
    if finding.remedy:
        remedy = clean(finding.remedy.strip()).replace("\n", f"\n{indent}")
        console.print(Text(f"{indent}→ {remedy}", style="bold"), soft_wrap=True)
