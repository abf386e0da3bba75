"""How runs are written for people, and the live view, from made-up status reports."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from client.show import (
    approval_lines,
    clean,
    duration,
    one_line,
    print_result,
    run_page,
    size,
    step_lines,
    usage_line,
    web_ui_of,
)
from client.view import Glimpse, PlainView, Running, TerminalView, now_lines, view_for
from contracts.blob import BlobRef
from contracts.run import (
    Artifact,
    ArtifactList,
    PendingApproval,
    RunResult,
    RunState,
    RunStatus,
    StatusReport,
    StepSummary,
)
from contracts.usage import Budget, Usage

DIGEST = "0123456789abcdef" * 4


def report(**changes: Any) -> StatusReport:
    fields: dict[str, Any] = {
        "run_id": "r",
        "temporal_run_id": "t",
        "state": RunState.RUNNING,
        "step": 1,
        "agent": "analyst",
        "model": "m-1",
        "activity": "model m-1, step 1",
    }
    return StatusReport(**{**fields, **changes})


def step(number: int, *actions: str, text: str = "") -> StepSummary:
    return StepSummary(step=number, model_seconds=1.24, tokens=1234, actions=actions, text=text)


def told(*glimpses: Glimpse, run_id: str = "r") -> list[str]:
    """What the plain view writes of some looks, one after the other."""
    written = io.StringIO()
    with PlainView(Console(file=written, width=20), run_id) as view:
        for glimpse in glimpses:
            view.show(glimpse)
    return written.getvalue().splitlines()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;a title\x07rest", "rest"),
        ("\x1b]8;;http://evil\x1b\\link", "link"),
        ("\x1bc", "\ufffdc"),
        ("10 %\r50 %\r100 %", "100 %"),
        ("line\r\nnext\r\n", "line\nnext\n"),
        ("a\x00b\x07", "a\ufffdb\ufffd"),
        ("safe\u202egnp.exe", "safe\ufffdgnp.exe"),
        ("tab\tand\nnew line, ünïcode 你好", "tab\tand\nnew line, ünïcode 你好"),
        ("half \udc80", "half \ufffd"),
    ],
)
def test_text_of_models_and_commands_is_made_safe_for_a_terminal(text: str, shown: str) -> None:
    """No sequence moves the cursor, sets a title or hides what is there."""
    assert clean(text) == shown


def test_one_line_is_one_line_of_bounded_length() -> None:
    """White space is folded and what is cut is marked."""
    assert one_line("a\n  b\tc") == "a b c"
    assert one_line("x" * 50, 10) == "xxxxxxxxx…"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0.0 s"), (1.24, "1.2 s"), (42, "42 s"), (59.7, "1 min 00 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")],
)
def test_durations(seconds: float, shown: str) -> None:
    """Durations have the precision that a person cares about."""
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (999, "999 B"), (1400, "1.4 KB"), (25_900, "25.9 KB"), (23_000_000, "23 MB")]
)
def test_sizes(count: int, shown: str) -> None:
    """Sizes have the unit that fits."""
    assert size(count) == shown


def test_an_unknown_cost_is_said_and_never_shown_as_nothing() -> None:
    """`$0.0000` for a model without a price would be a lie."""
    assert "cost unknown" in usage_line(Usage(cost_usd=None), 3)
    assert "$" not in usage_line(Usage(cost_usd=None), 3)
    assert "$0.1200" in usage_line(Usage(cost_usd=0.12), 3)


def test_usage_stands_beside_its_limits() -> None:
    """What is left can be read off."""
    usage = Usage(input_tokens=1200, output_tokens=34, cached_input_tokens=1000, cost_usd=0.5)
    line = usage_line(usage, 3, Budget(steps=100, tokens=5000, cost_usd=2.5))
    assert line == "3 of 100 steps · 1,234 of 5,000 tokens (1,000 of them cached input) · $0.5000 of $2.5"


def test_a_step_is_one_line_for_each_thing_it_did() -> None:
    """What the model said comes first, then its actions; the facts stand once."""
    lines = [line.plain for line in step_lines(step(3, "$ ls → exit code 0", "apply_patch A x", text="I look."))]
    assert lines == ["step 3   I look.  (1,234 tokens, model 1.2 s)", "         $ ls → exit code 0", "         apply_patch A x"]


def test_a_step_without_anything_is_still_told() -> None:
    """An empty answer is a step too."""
    assert [line.plain for line in step_lines(step(3))] == ["step 3   no action  (1,234 tokens, model 1.2 s)"]


def test_an_approval_is_shown_with_the_commands_that_answer_it() -> None:
    """The commands bind to what is shown: they carry the digest, and the run id as a shell needs it."""
    approval = PendingApproval(
        approval_id="4.0", step=4, tool="shell", call_id="c", arguments='{"command":"\x1b[2Jrm"}', arguments_digest=DIGEST
    )
    lines = [line.plain for line in approval_lines("my run", approval)]
    assert lines[0] == 'approval 4.0 is needed for shell: {"command":"rm"}'
    assert lines[1].endswith("caisson approve 'my run' 4.0 --digest 0123456789ab --allow")
    assert lines[2].endswith("caisson approve 'my run' 4.0 --digest 0123456789ab --deny --reason \"...\"")


@pytest.mark.parametrize(
    ("address", "ui"),
    [
        ("localhost:7233", "http://localhost:8233"),
        ("127.0.0.1:7300", "http://localhost:8300"),
        ("ns.acct.tmprl.cloud:7233", "https://cloud.temporal.io"),
        ("eu-west-1.aws.api.temporal.io:7233", "https://cloud.temporal.io"),
        ("temporal.example.com:7233", None),
    ],
)
def test_the_web_ui_is_guessed_only_where_it_is_known(address: str, ui: str | None) -> None:
    """A wrong link is worse than none."""
    assert web_ui_of(address) == ui


def test_a_run_id_is_quoted_in_the_address_of_its_page() -> None:
    """A run id may hold what an address may not."""
    page = run_page("http://localhost:8233/", "default", "a b/c?")
    assert page == "http://localhost:8233/namespaces/default/workflows/a%20b%2Fc%3F"


def test_the_plain_view_tells_each_thing_once_and_in_order() -> None:
    """Looks overlap; the story does not. Lines are never broken, and hold no escape sequence."""
    first = Glimpse(open=True, report=report())
    second = Glimpse(
        open=True, report=report(step=2, model_label="scripted, not a language model"), steps=(step(1, "$ ls → exit code 0"),)
    )
    lines = told(first, first, second, second)
    assert lines == [
        "run r · agent analyst · model m-1",
        "now: model m-1, step 1",
        "the model is scripted, not a language model",
        "step 1   $ ls → exit code 0  (1,234 tokens, model 1.2 s)",
    ]


def test_steps_that_were_missed_are_said_to_be_in_the_transcript() -> None:
    """A run keeps its last steps only; the gap is not hidden."""
    lines = told(Glimpse(open=True, report=report(step=9), steps=(step(8, "$ a"), step(9, "$ b"))))
    assert "steps 1 to 7: caisson transcript r" in lines
    lines = told(Glimpse(open=True, report=report(step=2), steps=(step(2, "$ b"),)))
    assert "step 1: caisson transcript r" in lines


def test_show_returns_the_last_step_that_was_told() -> None:
    """The next look asks for what comes after it."""
    with PlainView(Console(file=io.StringIO()), "r") as view:
        assert view.show(Glimpse(open=True, report=report())) == 0
        assert view.show(Glimpse(open=True, report=report(), steps=(step(4, "$ a"),))) == 4
        assert view.show(Glimpse(open=True, trouble="away")) == 4


def test_a_worker_that_is_away_is_told_once_and_its_return_too() -> None:
    """The person learns that the run waits, and when it goes on."""
    away = Glimpse(open=True, trouble="waiting for a workflow worker on task queue caisson")
    lines = told(away, away, Glimpse(open=True, report=report()))
    assert lines[:2] == ["waiting for a workflow worker on task queue caisson", "the run answers again"]


def test_an_approval_is_told_once() -> None:
    """It stays open over many looks."""
    approval = PendingApproval(approval_id="1.0", step=1, tool="shell", call_id="c", arguments="{}", arguments_digest=DIGEST)
    waiting = Glimpse(open=True, report=report(state=RunState.AWAITING_APPROVAL, pending_approvals=(approval,)))
    assert sum("is needed for shell" in line for line in told(waiting, waiting)) == 1


def test_a_retry_is_told_once_with_its_reason_and_its_time() -> None:
    """Each attempt is news; the looks at it are not."""

    def failing(attempt: int) -> Glimpse:
        running = Running(activity="call_model", attempt=attempt, fault="429: too many\nrequests", retry_in=3.6)
        return Glimpse(open=True, report=report(), running=(running,))

    lines = told(failing(2), failing(2), failing(3))
    assert [line for line in lines if line.startswith("call_model")] == [
        "call_model: attempt 2, after: 429: too many requests; again in 3.6 s",
        "call_model: attempt 3, after: 429: too many requests; again in 3.6 s",
    ]


def test_a_running_command_shows_its_last_lines_and_its_time() -> None:
    """The tail comes from heartbeats; only its end fits, and it cannot move the cursor."""
    tail = "\n".join(f"\x1b[32mline {n}" for n in range(1, 12)) + "\n"
    lines = [
        line.plain
        for line in now_lines(
            Glimpse(open=True, report=report(activity="$ make"), running=(Running("run_shell", seconds=75, tail=tail),))
        )
    ]
    assert lines[0] == "$ make  1 min 15 s"
    assert lines[1:9] == [f"  │ line {n}" for n in range(4, 12)]
    assert lines[9] == "  1 of 100 steps · 0 tokens · $0.0000"


def test_an_activity_that_nobody_takes_up_names_the_worker_that_would() -> None:
    """A missing worker is the commonest reason for nothing to happen."""
    waiting = Glimpse(open=True, report=report(), running=(Running("call_model", seconds=None, idle=42),))
    lines = [line.plain for line in now_lines(waiting)]
    assert lines[1] == "  call_model: no worker has taken it up for 42 s (start one: caisson worker --role model)"
    quick = Glimpse(open=True, report=report(), running=(Running("call_model", seconds=None, idle=0.5),))
    assert not any("no worker" in line.plain for line in now_lines(quick))


def test_the_state_is_said_when_it_is_not_simply_running() -> None:
    """Paused and waiting runs look different from working ones."""
    (first, *_) = now_lines(Glimpse(open=True, report=report(state=RunState.PAUSED, activity="paused by ada", queued_messages=2)))
    assert first.plain == "paused: paused by ada"


def test_the_terminal_view_leaves_the_story_and_takes_its_moving_part_away() -> None:
    """Afterwards the terminal holds what happened, the cursor shows, and nothing else is left."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, color_system=None, width=100)
    with TerminalView(console, "r") as view:
        view.show(Glimpse(open=True, report=report(), running=(Running("run_shell", seconds=1, tail="halfway"),)))
        assert view.show(Glimpse(open=False, report=report(), steps=(step(1, "$ ls → exit code 0"),))) == 1
    text = written.getvalue()
    assert "halfway" in text
    assert "step 1   $ ls → exit code 0" in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0


def test_only_a_terminal_gets_the_moving_view() -> None:
    """Colours may be forced in a log; a moving picture would still fill it with noise."""
    assert isinstance(view_for(Console(file=io.StringIO()), "r"), PlainView)
    assert isinstance(view_for(Console(file=io.StringIO(), force_terminal=True), "r"), PlainView)


def printed(result: RunResult, **more: Any) -> str:
    written = io.StringIO()
    print_result(Console(file=written, width=40), "r", result, **more)
    return written.getvalue()


def test_a_result_says_how_it_ended_what_there_is_and_where() -> None:
    """Status, reason, output, artifacts, usage, transcript and page are all there, each on an unbroken line."""
    artifacts = ArtifactList(
        count=25,
        total_bytes=2500,
        first=tuple(
            Artifact(path=f"outputs/{n}.csv", blob=BlobRef(digest=DIGEST, size=100), media_type="text/csv") for n in range(25)
        ),
        skipped=("outputs/link: a symlink",),
    )
    result = RunResult(
        status=RunStatus.BUDGET_EXCEEDED,
        reason="budget.steps: 3 used of 3",
        output={"count": 5},
        artifacts=artifacts,
        usage=Usage(cost_usd=None, tool_calls=4, wall_seconds=75),
        steps=3,
        model="m-1",
        model_label="scripted, not a language model",
    )
    text = printed(result, page="http://localhost:8233/namespaces/default/workflows/r")
    for part in (
        "budget_exceeded  run r  (budget.steps: 3 used of 3)",
        "the model is scripted, not a language model",
        '{\n  "count": 5\n}',
        "artifacts: 25, 2.5 KB",
        "outputs/0.csv  100 B  sha256:0123456789ab",
        "and 5 more: caisson artifacts r",
        "not an artifact: outputs/link: a symlink",
        "3 steps · 0 tokens · cost unknown · 4 tool calls · 1 min 15 s",
        "transcript: caisson transcript r",
        "Web UI: http://localhost:8233/namespaces/default/workflows/r",
    ):
        assert part in text


def test_the_whole_output_is_printed_where_it_was_read_and_else_named() -> None:
    """A preview is never passed off as the answer."""
    result = RunResult(status=RunStatus.COMPLETED, output="begin...end", output_blob=BlobRef(digest=DIGEST, size=9))
    assert f"the whole is blob {DIGEST}" in printed(result)
    whole = printed(result, output="the whole answer")
    assert "the whole answer" in whole
    assert "begin...end" not in whole


def test_an_output_that_looks_like_markup_is_printed_as_it_is() -> None:
    """What a model wrote is data: not colours, not links, not an error of the markup parser."""
    text = printed(RunResult(status=RunStatus.COMPLETED, output="[bold red]x[/] [link=http://evil]y[/nope]"))
    assert "[bold red]x[/] [link=http://evil]y[/nope]" in text
