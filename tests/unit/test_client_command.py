"""The `caisson` command, as far as it needs no server: quick help, and faults that are told before anything is started."""

from __future__ import annotations

import importlib
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from client.cli.faults import FAULTS, ExitCode, fault_of
from client.cli.main import app
from client.cli.say import chosen
from client.cli.session import exit_code
from contracts.base import BadInput
from contracts.run import PendingApproval, RunResult, RunStatus

COMMANDS = (
    "dev worker run fork watch result message pause resume stop approve extend "  # noqa: SIM905
    "transcript artifacts files diff checkout agents skills doctor".split()
)
HEAVY = ("temporalio", "openai", "pydantic", "rich", "structlog", "boto3", "workers", "workflows", "activities", "contracts")
RUNNER = CliRunner()


def caisson(*arguments: str, stdin: bytes | None = None, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Run a command; return its exit code, standard output and standard error."""
    done = RUNNER.invoke(app, list(arguments), input=stdin, env=env)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A place where nothing may be reached: a command that comes as far as connecting fails the test by its exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:1")


def test_help_loads_no_heavy_module() -> None:
    """`caisson --help` must be quick, so it imports neither Temporal nor the workers nor the contracts."""
    program = (
        "import sys, client.cli.main as main\n"
        "try: main.app(['--help'])\n"
        "except SystemExit: pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "Usage:" in done.stdout
    assert done.stderr.strip() == "[]"


def test_help_takes_less_than_three_tenths_of_a_second_more_than_python() -> None:
    """In time of the processor, because the machine may be busy with other things; compared with an empty program."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    def quickest(*argv: str) -> float:
        times = []
        for _ in range(5):
            before = used()
            subprocess.run([sys.executable, *argv], capture_output=True, check=True)
            times.append(used() - before)
        return min(times)

    assert quickest("-m", "client.cli.main", "--help") - quickest("-c", "pass") < 0.3


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_is_explained_with_an_example(command: str) -> None:
    """A person learns a command from its help alone."""
    code, out, _ = caisson(command, "--help")
    assert code == 0
    assert f"caisson {command}" in out.partition("Example:")[2]


def test_these_are_all_commands() -> None:
    """The list above is the whole command, so a new one gets its help tested too."""
    assert {command.name or command.callback.__name__ for command in app.registered_commands if command.callback} == set(COMMANDS)


def test_the_exit_codes_are_in_the_help() -> None:
    """Scripts depend on the codes, so they are stated where one looks first."""
    out = caisson("--help")[1]
    for code in ("0 completed", "1 failed or refused", "2 bad input", "3 a budget was exceeded", "4 stopped or cancelled"):
        assert code in out


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'{"task": "x",\n "agent": }', ["input.json: line 2, column 11: not JSON"]),
        (b"", ["line 1, column 1: not JSON"]),
        (b"\xff\xfe", ["is not UTF-8 text", "byte 0"]),
        (b"[1]", ["must hold a JSON object", "holds an array"]),
        (b'{"task": "x", "task": "y"}', ["'task' is given twice"]),
        (b'{"task": "x", "budget": {"cost_usd": NaN}}', ["NaN is no JSON value"]),
        (b'{"task": "x", "agnet": "y"}', ["agnet: unknown field"]),
        (b'{"task": " "}', ["task: ", "must not be empty"]),
        (b'{"task": 5}', ["task: ", "found 5"]),
        (b'{"agent": "analyst"}', ["task: required, but missing"]),
        (b'{"task": "x", "budget": {"steps": 0}}', ["budget.steps: ", "found 0"]),
        (b'{"task": "x", "labels": ["a"]}', ["labels: "]),
        (b"[" * 100_000, ["nested too deeply"]),
        (b'{"task": "x", "budget": {"steps": ' + b"9" * 5000 + b"}}", ["input.json: holds a number that is too long"]),
    ],
)
@pytest.mark.usefixtures("no_server")
def test_bad_input_is_told_before_anything_is_started(content: bytes, told: list[str]) -> None:
    """A file that cannot be used ends with code 2 and names the place; were it accepted, connecting would be the complaint."""
    Path("input.json").write_bytes(content)
    code, out, err = caisson("run", "--input", "input.json")
    assert code == ExitCode.BAD_INPUT
    assert out == ""
    assert err.startswith("caisson: ")
    assert all(part in err for part in told), err
    assert "Temporal" not in err
    assert "Traceback" not in err


@pytest.mark.usefixtures("no_server")
def test_labels_of_a_file_are_not_dropped_for_one_that_is_given() -> None:
    """What stands in their place in the file is a fault, whether or not there is a label on the command line too."""
    Path("input.json").write_text('{"task": "x", "labels": ["a"]}')
    code, _, err = caisson("run", "--input", "input.json", "--label", "b=c")
    assert code == ExitCode.BAD_INPUT
    assert "labels: must be an object" in err and "an array" in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run"], "task: required, but missing"),
        (["run", "--input", "absent.json"], "absent.json: cannot be read: No such file or directory"),
        (["run", "--input", "."], ".: cannot be read: Is a directory"),
        (["run", "x", "--agent", "Not A Name"], "agent"),
        (["run", "x", "--label", "novalue"], "--label 'novalue': must be key=value"),
        (["run", "x", "--label", "a=1", "--label", "a=2"], "'a' is given twice"),
        (["run", "x", "--id", " padded "], "run id ' padded '"),
        (["run", "x", "--id", "a" * 201], "must be 1 to 200 printable characters"),
        (["run", "x", "--id", ""], "run id ''"),
        (["worker", "--role", "cook"], "--role 'cook': no such role; there are: workflow, model, sandbox, tools"),
        (["extend", "r"], "name at least one of --steps"),
        (["extend", "r", "--steps", "-1"], "steps: "),
        (["approve", "r", "1.0"], "--allow or --deny"),
        (["approve", "r", "--allow"], "name the approval"),
        (["approve", "r", "1.0", "--allow", "--digest", "abc"], "must be the first 8 or more digits"),
        (["transcript"], "name one of the two"),
        (["transcript", "r", "--head", "x"], "name one of the two"),
        (["transcript", "r", "--json", "--raw"], "exclude each other"),
        (["transcript", "--head", "abc"], "must be DIGEST:SIZE"),
        (["artifacts", "r", "put", "here"], "caisson artifacts r get DIR"),
        (["artifacts", "r", "get"], "caisson artifacts r get DIR"),
        (["dev", "--run", "absent.json"], "absent.json: cannot be read"),
        (["fork", "r"], 'caisson fork r --task "..."'),
        (["fork", "r", "--task", "x", "--agent", "a", "--provider", "p"], "give one of the two"),
        (["fork", "r", "--task", "x", "--id", " "], "run id ' '"),
        (["files", "r", "--cat"], "caisson files r PATH --cat"),
        (["files", "r", "p", "--cat", "--json"], "exclude each other"),
        (["diff", "r", "--to", "3", "--with", "s"], "--with RUN@STEP"),
        *(
            ([name, "\udcff"], "RUN: '\\udcff' is not UTF-8 text")
            for name in ("result", "pause", "files", "transcript", "approve")
        ),
        (["checkout", "\udcff", "d"], "RUN: '\\udcff' is not UTF-8 text"),
        (["run", "x", "--label", "k=\udcff"], "--label: 'k=\\udcff' is not UTF-8 text"),
        (["fork", "r", "--task", "x", "--label", "k=\udcff"], "--label: 'k=\\udcff' is not UTF-8 text"),
        (["message", "r", "\udcff"], "TEXT: '\\udcff' is not UTF-8 text"),
        (["result", ""], "RUN: the run's id is empty"),
        (["artifacts", "r", "get", "/dev/null"], "/dev/null: is no directory"),
    ],
)
@pytest.mark.usefixtures("no_server")
def test_options_that_cannot_be_used_are_told_at_once(arguments: list[str], told: str) -> None:
    """Each fault of an option ends with code 2 and says what to give instead."""
    code, out, err = caisson(*arguments)
    assert (code, out) == (ExitCode.BAD_INPUT, "")
    assert told in err
    assert "Traceback" not in err


@pytest.mark.usefixtures("no_server")
def test_a_server_that_is_not_there_is_told_with_its_address() -> None:
    """A person learns which address was tried and how to start a server."""
    code, _, err = caisson("run", "x")
    assert code == ExitCode.BAD_INPUT
    assert "127.0.0.1:1" in err
    assert "caisson dev" in err
    assert "Traceback" not in err


@pytest.mark.usefixtures("no_server")
def test_a_bad_setting_is_told_by_its_name() -> None:
    """The settings' own message reaches the person."""
    code, _, err = caisson("run", "x", env={"CAISSON_STOER": "x"})
    assert code == ExitCode.BAD_INPUT
    assert "CAISSON_STOER" in err
    assert "CAISSON_STORE" in err


@pytest.mark.usefixtures("no_server")
def test_debug_shows_where_an_error_arose() -> None:
    """`--debug` adds the traceback, and keeps message and code."""
    code, _, err = caisson("--debug", "run", "x", "--label", "novalue")
    assert code == ExitCode.BAD_INPUT
    assert "Traceback" in err
    assert err.rstrip().endswith("for example --label team=claims")


@pytest.mark.usefixtures("no_server")
def test_input_is_read_from_standard_input_for_a_dash() -> None:
    """`--input -` reads the same JSON; its faults name standard input."""
    code, _, err = caisson("run", "--input", "-", stdin=b'{"task": ')
    assert code == ExitCode.BAD_INPUT
    assert "standard input: line 1, column 10" in err


def test_every_fault_names_a_class_that_exists() -> None:
    """The table holds names, so a class that moves must not turn its fault into a traceback unseen."""
    for name in FAULTS:
        module, _, attribute = name.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), attribute), Exception)


def test_a_defect_of_the_program_is_not_taken_for_a_fault_of_the_person() -> None:
    """An error that nobody can mend keeps its traceback, and a closed pipe is no error at all."""
    assert fault_of(KeyError("x")) is None
    assert fault_of(BrokenPipeError()) is None


def test_a_message_cannot_write_to_the_terminal_with_escape_sequences() -> None:
    """A run's own words may stand in an error."""
    fault = fault_of(BadInput("\x1b[2Jgone"))
    assert fault is not None
    assert fault.message == "gone"


def test_every_status_has_an_exit_code() -> None:
    """A status that is added needs a code too; only `completed` is a success."""
    codes = {status: exit_code(RunResult(status=status)) for status in RunStatus}
    assert [status for status, code in codes.items() if code == 0] == [RunStatus.COMPLETED]
    assert codes[RunStatus.BUDGET_EXCEEDED] == 3
    assert codes[RunStatus.CANCELLED] == 4
    assert codes[RunStatus.FAILED] == codes[RunStatus.REFUSED] == 1


def test_agents_lists_the_good_ones_and_names_the_fault_of_a_bad_one(tmp_path: Path) -> None:
    """One broken file hides no other agent, but the exit code tells."""
    (tmp_path / "good.yaml").write_text("description: Does things.\nmodel: m-1\n")
    (tmp_path / "bad.yaml").write_text("toolz: [shell]\n")
    code, out, err = caisson("agents", env={"CAISSON_AGENTS": str(tmp_path)})
    assert code == ExitCode.BAD_INPUT
    assert out.split() == ["good", "m-1", "Does", "things."]
    assert "toolz: unknown field" in err


def test_agents_as_json_holds_whole_specs(tmp_path: Path) -> None:
    """Programs get what the YAML means, defaults included."""
    (tmp_path / "good.yaml").write_text("budget: {steps: 7}\n")
    code, out, _ = caisson("agents", "--json", env={"CAISSON_AGENTS": str(tmp_path)})
    assert code == 0
    (spec,) = json.loads(out)
    assert (spec["name"], spec["budget"]["steps"]) == ("good", 7)


def approval(approval_id: str, digest: str) -> PendingApproval:
    return PendingApproval(
        approval_id=approval_id, step=1, tool="shell", call_id="c", arguments="{}", arguments_digest=digest * 64
    )


def test_a_decision_goes_to_the_approval_that_was_shown() -> None:
    """The digest's beginning is enough to tell that it is the same call."""
    pending = (approval("1.0", "a"), approval("1.1", "b"))
    assert chosen(pending, "1.1", "b" * 12) is pending[1]


def test_a_decision_on_other_arguments_is_refused() -> None:
    """What was shown and what waits differ: nothing may be decided."""
    with pytest.raises(BadInput, match="for other arguments now"):
        chosen((approval("1.0", "a"),), "1.0", "b" * 12)


def test_a_decision_on_nothing_names_what_is_open() -> None:
    """The person sees the ids that there are."""
    with pytest.raises(BadInput, match=r"'2\.0' is not open \(open: 1\.0\)"):
        chosen((approval("1.0", "a"),), "2.0", None)


def test_typer_keeps_its_own_tracebacks_off() -> None:
    """They can show the values of variables, among them secrets."""
    assert isinstance(app, typer.Typer)
    assert app.pretty_exceptions_enable is False


def test_an_error_without_words_is_told_by_its_name() -> None:
    """An empty line after `caisson:` would tell nothing."""
    fault = fault_of(TimeoutError())
    assert fault is not None
    assert fault.message == "OSError"
