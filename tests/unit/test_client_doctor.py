"""`caisson doctor`: what it finds without a server, and that it never shows a key."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
import yaml
from pydantic import SecretStr
from typer.testing import CliRunner

from client.cli.main import app
from client.doctor import (
    check_agents,
    check_bubblewrap,
    check_limits,
    check_model,
    check_packages,
    check_prices,
    check_python,
)
from client.doctor_mcp import check_mcp
from client.finding import State
from tests.mcp_support import program
from workers.settings import Settings

KEY = "sk-canary-0123456789abcdef"


def test_an_old_python_is_named_with_the_one_that_is_needed() -> None:
    """3.10 fails, 3.11 does not."""
    assert check_python((3, 10, 9)).state is State.FAIL
    assert "3.11" in check_python((3, 10, 9)).remedy
    assert check_python((3, 11, 0)).state is State.OK


def test_packages_that_are_not_of_the_declared_versions_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed distribution's own declaration is what counts; extras that were not asked for do not."""
    info = tmp_path / "example_dist-1.dist-info"
    info.mkdir()
    declared = ["pydantic>=999", "not-there-at-all", "typer>=0.1", 'also-not-there; extra == "dev"']
    lines = ["Metadata-Version: 2.1", "Name: example-dist", "Version: 1", *(f"Requires-Dist: {one}" for one in declared)]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = check_packages("example-dist")
    assert finding.state is State.FAIL
    assert "pydantic" in finding.found
    assert "not-there-at-all missing" in finding.found
    assert "typer" not in finding.found
    assert "also-not-there" not in finding.found


def test_a_source_tree_that_is_not_installed_is_a_warning() -> None:
    """Everything may work; the versions are just not known to fit."""
    assert check_packages("no-such-distribution").state is State.WARN


def test_limits_without_control_groups_are_a_warning_with_the_way_to_get_them(tmp_path: Path) -> None:
    """Where the worker may make no groups, what holds instead is named."""
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "mountinfo").write_text("")
    finding = check_limits(tmp_path)
    assert finding.state is State.WARN
    assert "RLIMIT_DATA" in finding.found
    assert "Delegate=yes" in finding.remedy


async def test_bubblewrap_that_is_missing_is_told_with_its_package() -> None:
    """The commonest reason why a fresh machine cannot run."""
    finding = await check_bubblewrap("no-such-program")
    assert (finding.state, finding.found) == (State.FAIL, "not installed")
    assert "apt-get install bubblewrap" in finding.remedy


async def test_bubblewrap_that_cannot_make_namespaces_is_told_with_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there, and still of no use: an operator needs to know why."""
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    finding = await check_bubblewrap()
    assert finding.state is State.FAIL
    assert "No permissions to create new namespace" in finding.found
    assert "unprivileged" in finding.remedy


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed here")
async def test_bubblewrap_that_works_is_told_with_its_version() -> None:
    """The real program, making real namespaces."""
    finding = await check_bubblewrap()
    assert finding.state is State.OK
    assert finding.found.startswith("bubblewrap ")


def test_every_agent_is_parsed_and_its_schemas_are_checked(tmp_path: Path) -> None:
    """A fault is found before a run meets it, and every faulty agent is named."""
    (tmp_path / "fine.yaml").write_text("instructions: Hello\n")
    settings = Settings(agents=tmp_path)
    assert check_agents(settings).state is State.OK
    (tmp_path / "typo.yaml").write_text("toolz: [shell]\n")
    (tmp_path / "schema.yaml").write_text("output_schema: {type: nonsense}\n")
    finding = check_agents(settings)
    assert finding.state is State.FAIL
    assert "toolz" in finding.found
    assert "output_schema" in finding.found


def test_no_agents_at_all_is_a_warning(tmp_path: Path) -> None:
    """Runs with an inline agent, or with none, work without."""
    assert check_agents(Settings(agents=tmp_path / "absent")).state is State.WARN


def test_a_default_model_without_a_price_is_a_warning(tmp_path: Path) -> None:
    """Its cost is unknown, which is said before a run is."""
    assert check_prices(Settings()).state is State.OK
    assert check_prices(Settings(model="nobody-sells-this")).state is State.WARN
    assert check_prices(Settings(prices=tmp_path / "absent.yaml")).state is State.FAIL


async def test_the_endpoint_is_reached_for_and_the_key_is_never_shown() -> None:
    """Reached or not, only the place is told."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        settings = Settings(openai_api_key=SecretStr(KEY), openai_base_url=f"http://127.0.0.1:{port}/v1")
        reached = await check_model(settings)
    gone = await check_model(settings)
    assert (reached.state, gone.state) == (State.OK, State.WARN)
    for finding in (reached, gone):
        assert f"127.0.0.1:{port}" in finding.found
        assert KEY not in finding.found + finding.remedy


def test_doctor_fails_where_there_is_no_server_and_says_how_to_start_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1, the other checks done all the same, and the key of the environment nowhere."""
    monkeypatch.chdir(tmp_path)
    environment = {
        "TEMPORAL_ADDRESS": "127.0.0.1:1",
        "OPENAI_API_KEY": KEY,
        "OPENAI_BASE_URL": "http://127.0.0.1:1/v1",
        "CAISSON_STORE": str(tmp_path / "store"),
    }
    done = CliRunner().invoke(app, ["doctor", "--json"], env=environment)
    assert done.exit_code == 1
    found = {row["check"]: row for row in json.loads(done.stdout)}
    assert found["Temporal"]["state"] == "fail"
    assert "127.0.0.1:1" in found["Temporal"]["found"]
    assert "caisson dev" in found["Temporal"]["remedy"]
    assert found["blob store"]["state"] == "ok"
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert KEY not in done.output
    shown = CliRunner().invoke(app, ["doctor"], env=environment)
    assert "fail  Temporal" in shown.stdout
    assert KEY not in shown.output


def test_doctor_names_a_bad_setting_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bad variable must not hide what else is wrong."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["doctor"], env={"CAISSON_STOER": "x", "TEMPORAL_ADDRESS": "127.0.0.1:1"})
    assert done.exit_code == 1
    assert "CAISSON_STOER" in done.stdout
    assert "blob store" in done.stdout


async def test_mcp_servers_are_asked_where_the_file_is_known(tmp_path: Path) -> None:
    """One that answers, one that does not, and a file that cannot be used; nothing where there is no file."""
    assert [one async for one in check_mcp(Settings())] == []
    file = tmp_path / "mcp.yaml"
    file.write_text(yaml.safe_dump({"servers": {"good": program("plain"), "bad": program("refuses")}}))
    bad, good = [one async for one in check_mcp(Settings(mcp=file))]
    assert (good.check, good.state, good.found) == ("MCP server good", State.OK, "answers, with 3 tools")
    assert (bad.state, "no licence" in bad.found) == (State.WARN, True)
    file.write_text("servers: {a: {}}")
    (fault,) = [one async for one in check_mcp(Settings(mcp=file))]
    assert fault.state is State.FAIL
