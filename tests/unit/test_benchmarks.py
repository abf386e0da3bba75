"""The benchmarks' registry, command and JSON, without measuring anything."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
import json
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from temporalio.api.history.v1 import HistoryEvent

from benchmarks import __main__ as command
from benchmarks import registry
from benchmarks.histories import _steps
from benchmarks.provider_calls import Beside, Cost, metrics_of
from benchmarks.registry import BENCHMARKS, Say, UnknownBenchmark, find
from benchmarks.report import Metric, as_table, make_report
from benchmarks.stack import shell_steps
from benchmarks.wire import HttpRequests, Wire
from workers.scripted_model.scenario import ScenarioFile

COST = Metric(value=1.5, unit="ratio", target=2.0, baseline="two_bare_hops", baseline_value=1.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry of two benchmarks that cost no time."""

    async def measure(say: Say) -> dict[str, Metric]:
        say("measuring")
        return {"ratio": COST}

    monkeypatch.setattr(command, "BENCHMARKS", {"one": "", "two": ""})
    monkeypatch.setattr(command, "find", lambda name: measure)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_name_leads_to_a_module_that_measures(name: str) -> None:
    """Each line of the table names a module with an async `measure`."""
    assert inspect.iscoroutinefunction(find(name))
    assert importlib.import_module(BENCHMARKS[name]).__doc__


def test_an_unknown_name_exits_2_and_lists_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt name measures nothing, and the message tells what there is."""
    with pytest.raises(UnknownBenchmark):
        registry.find("step_overhaed")
    assert command.main(["step_overhaed", "--json"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    for name in ("step_overhaed", *BENCHMARKS):
        assert name in output.err


@pytest.mark.parametrize("arguments", [[], ["one", "--all"]])
def test_exactly_one_of_a_name_and_all_is_needed(arguments: list[str], quick: None) -> None:
    """Neither, or both, is refused as argparse refuses."""
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2


def test_json_is_one_object_of_exactly_the_documented_shape(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output holds the JSON and nothing else; progress goes to standard error."""
    assert command.main(["one", "--json"]) == 0
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert list(report) == ["name", "metrics", "machine", "date"]
    assert report["name"] == "one"
    assert report["metrics"] == {
        "ratio": {"value": 1.5, "unit": "ratio", "target": 2.0, "baseline": "two_bare_hops", "baseline_value": 1.0}
    }
    assert "cores" in report["machine"]
    assert datetime.fromisoformat(report["date"]).tzinfo is not None
    assert output.err == "one: measuring\n"


def test_all_with_json_is_one_object_a_line(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    """`--all --json` can be read line by line."""
    assert command.main(["--all", "--json"]) == 0
    assert [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()] == ["one", "two"]


def test_the_table_shows_values_targets_and_baselines(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is cut off where the output is not a terminal."""
    assert command.main(["--all"]) == 0
    table = capsys.readouterr().out
    for text in ("one", "two", "ratio", "1.5", "two_bare_hops", "yes"):
        assert text in table


def test_a_cost_above_its_target_is_not_met() -> None:
    """Targets are upper bounds, and inclusive."""
    assert COST.model_copy(update={"value": 2.0}).is_met
    missed = COST.model_copy(update={"value": 2.01})
    assert not missed.is_met
    assert as_table([make_report("one", {"ratio": missed}, 0.0)]).row_count == 1


def test_a_figure_that_is_no_number_is_refused() -> None:
    """A division by nothing must fail the benchmark, and never be reported as met."""
    with pytest.raises(ValidationError):
        Metric(value=float("nan"), unit="ms", target=1.0, baseline="b", baseline_value=1.0)


def test_a_step_goes_from_its_first_activity_to_the_next_steps() -> None:
    """Other events belong to the step they are in; what comes before the first step and after the last start is left out."""
    events = [_event(0), _event(10, "call_model"), _event(12), _event(15, "run_shell"), _event(30, "call_model"), _event(90)]
    (step,) = _steps(events, "call_model")
    assert step.milliseconds == 20
    assert step.bytes == sum(event.ByteSize() for event in events[1:4])


def test_the_scenarios_are_ones_that_the_scripted_model_plays() -> None:
    """A run of n steps is n commands and an answer."""
    scenarios = ScenarioFile.model_validate({"scenarios": [shell_steps("bench", 3, "true")]})
    assert scenarios.scenarios[0].length() == 4
    assert scenarios.find("any", ("Play [bench].", "")) is scenarios.scenarios[0]


DECOY = b"GET /decoy HTTP/1.1\r\n\r\n"
PASSING = b"".join(
    (
        b"GET /plain?path=/x HTTP/1.1\r\nHost: h\r\n\r\n",
        b"POST /sized HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(DECOY), DECOY),
        b"PUT /chunked HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(DECOY), DECOY),
        b"POST /raw HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 2\r\n\r\n{}" + DECOY,
    )
)


@given(st.lists(st.integers(0, len(PASSING))))
def test_requests_are_read_however_they_are_cut(cuts: list[int]) -> None:
    """Bodies are no requests, and neither is anything after an upgrade."""
    reader = HttpRequests()
    at = [0, *sorted(cuts), len(PASSING)]
    found = [request for start, end in itertools.pairwise(at) for request in reader.feed(PASSING[start:end])]
    assert found == ["GET /plain", "POST /sized", "PUT /chunked", "POST /raw"]
    assert reader.is_raw


async def test_a_wire_counts_what_passes_and_changes_nothing() -> None:
    """Bytes in both directions, connections and requests; the end of one direction leaves the other open."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"<" + await reader.read() + b">")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, Wire(server.sockets[0].getsockname()[1]) as wire:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(wire.url.rpartition(":")[2]))
        writer.write(DECOY)
        writer.write_eof()
        assert await reader.read() == b"<" + DECOY + b">"
        writer.close()
        await wire.quiet()
    assert (wire.connections, wire.sent, wire.received) == (1, len(DECOY), len(DECOY) + 2)
    assert wire.requests == ["GET /decoy"]


def test_the_bound_on_calls_does_not_depend_on_a_peer() -> None:
    """Five calls are the most whatever a peer takes; what has no figure beside it has no other metric."""
    ours = {"one_changed": Cost(requests=21, calls=6, port_calls=4, bytes=2_000)}
    alone = metrics_of("docker", ours, Beside("peer", {}))
    assert list(alone) == ["docker_one_changed_calls", "docker_one_changed_port_calls"]
    assert [metric.is_met for metric in alone.values()] == [False, True]
    theirs = {"one_changed": Cost(requests=7, calls=3, port_calls=0, bytes=9_000)}
    beside = metrics_of("docker", ours, Beside("peer", theirs, requests=3))
    assert beside["docker_one_changed_calls"].target == 5
    assert beside["docker_one_changed_calls"].baseline_value == 3
    assert beside["docker_one_changed_requests"].is_met
    assert (beside["docker_one_changed_bytes"].value, beside["docker_one_changed_bytes"].target) == (2, 9)


def test_what_a_provider_does_of_its_own_stands_beside_the_portable_way() -> None:
    """The portable way begins with the end of the sandbox before; a provider that has nothing of its own has no such figure."""
    ours = {"close": Cost(2, 0, 0, 1_000), "away_portable": Cost(14, 10, 4, 20_000)}
    assert metrics_of("e2b", ours, Beside("peer", {"away_portable": Cost(1, 1, 0, 1)})) == {}
    both = metrics_of("e2b", {**ours, "away_native": Cost(17, 1, 0, 3_000)}, Beside("peer", {}))
    assert {name: (metric.value, metric.target, metric.is_met) for name, metric in both.items()} == {
        "e2b_away_requests": (17, 16, False),
        "e2b_away_bytes": (3, 21, True),
    }


def _event(milliseconds: int, activity: str = "") -> HistoryEvent:
    event = HistoryEvent()
    event.event_time.FromMilliseconds(milliseconds)
    if activity:
        event.activity_task_scheduled_event_attributes.activity_type.name = activity
    return event
