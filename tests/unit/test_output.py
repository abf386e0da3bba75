"""What the model is shown of a command: never empty, never broken by a byte, bounded with both ends kept."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.sandbox.output import cut, decode, render, status_line, too_long
from contracts.sandbox import JobResult, JobState

LIMIT = 16 * 1024


def exited(stdout: bytes = b"", stderr: bytes = b"", code: int = 0) -> JobResult:
    """A command that ended by itself."""
    return JobResult(
        state=JobState.EXITED,
        exit_code=code,
        stdout=stdout,
        stderr=stderr,
        stdout_bytes=len(stdout),
        stderr_bytes=len(stderr),
        duration_seconds=0.25,
    )


def shown(stdout: bytes = b"", stderr: bytes = b"", code: int = 0, limit: int = LIMIT, spilled: str | None = None) -> str:
    """What the model is shown of it."""
    return render(exited(stdout, stderr, code), 120, limit, spilled)


def test_output_that_is_not_utf8_is_escaped_and_the_rest_kept() -> None:
    """No byte takes its line with it, and the text is valid JSON (strands-agents/harness-sdk PR#1968, openai/codex#6178)."""
    text = shown(b"\xff\xfe\nok\ncaf\xe9\n")
    assert text == "exit code 0 after 0.2 s\n\\xff\\xfe\nok\ncaf\\xe9"
    assert json.loads(json.dumps(text)) == text
    text.encode()


def test_nul_is_shown_as_its_symbol() -> None:
    """A database that stores the text later does not refuse it (ginlix-ai/LangAlpha PR#190, archestra-ai/archestra#5697)."""
    assert shown(b"a\0b\n").endswith("\na\u2400b")


def test_of_long_output_the_beginning_and_the_end_are_kept() -> None:
    """The error at the end is what the model needs (openai/codex#6415, NousResearch/hermes-agent#27096)."""
    lines = "".join(f"{n}\n" for n in range(1, 200_001)) + "FAILED-HERE\n"
    text = shown(lines.encode(), spilled="/tmp/output/step-1-0.txt")
    assert text.split("\n", 1)[1].startswith("1\n2\n")
    assert text.endswith("FAILED-HERE")
    assert "bytes left out; all of it is in /tmp/output/step-1-0.txt ..." in text
    assert len(text.encode()) < LIMIT + 300


def test_one_very_long_line_is_cut_in_its_middle() -> None:
    """Lines do not matter, bytes do (felan-ai/felan#36)."""
    text = shown(b"A" * 120_000 + b"Z\n")
    _, _, output = text.partition("\n")
    assert (output[0], output[-1]) == ("A", "Z")
    assert "bytes left out" in output
    assert len(output.encode()) < LIMIT + 100


def test_a_command_without_output_says_so() -> None:
    """An empty text would look like a tool that failed (anthropics/claude-agent-sdk-typescript#64)."""
    assert shown() == "exit code 0 after 0.2 s\n(no output)"


def test_standard_error_is_marked() -> None:
    """The model can tell the two streams apart."""
    assert shown(b"out\n", b"err\n", 3) == "exit code 3 after 0.2 s\nout\n[standard error]\nerr"


@pytest.mark.parametrize(
    ("result", "line"),
    [
        (JobResult(state=JobState.EXITED, exit_code=127, duration_seconds=1.04), "exit code 127 after 1.0 s"),
        (JobResult(state=JobState.SIGNALLED, signal=9, duration_seconds=2), "killed by signal 9 (exit code 137) after 2.0 s"),
        (JobResult(state=JobState.KILLED, duration_seconds=2), "killed after 2.0 s"),
        (JobResult(state=JobState.RUNNING), "still running"),
    ],
)
def test_the_first_line_says_how_the_command_ended(result: JobResult, line: str) -> None:
    """A signal is not an exit code of zero (earendil-works/pi#8992)."""
    assert status_line(result, 120) == line


def test_a_timeout_keeps_what_was_written_until_then() -> None:
    """The limit and what happened are said, and the partial output follows."""
    result = JobResult(state=JobState.TIMED_OUT, stdout=b"half way\n", stdout_bytes=9, duration_seconds=2)
    text = render(result, 2, LIMIT, None)
    assert text.startswith("timed out after 2 s; it and its children were killed.")
    assert text.endswith("\nhalf way")


@given(st.binary(max_size=2000))
def test_any_bytes_become_text_that_can_be_stored(data: bytes) -> None:
    """No byte is lost without a trace, and no NUL or surrogate comes out."""
    text = decode(data)
    assert "\0" not in text
    text.encode()
    assert bool(text) == bool(data)


@given(st.text(max_size=3000), st.integers(2, 500))
def test_cut_text_keeps_its_limit_and_both_ends(text: str, limit: int) -> None:
    """No character is cut in two, and the marker counts what is missing."""
    shortened = cut(text, limit, None)
    if len(text.encode()) <= limit:
        assert shortened == text
        return
    head, _, rest = shortened.rpartition("\n[... ")
    count, _, tail = rest.partition(" bytes left out ...]\n")
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head.encode()) + len(tail.encode()) <= limit
    assert len(head.encode()) + int(count) + len(tail.encode()) == len(text.encode())


@given(st.binary(max_size=6000), st.binary(max_size=6000), st.integers(1024, 4096))
def test_both_streams_together_stay_within_the_limit(stdout: bytes, stderr: bytes, limit: int) -> None:
    """Each may use what the other leaves over; only markers and headings come on top."""
    assert len(shown(stdout, stderr, limit=limit).encode()) <= limit + 600


def test_a_short_stream_is_whole_however_long_the_other_is() -> None:
    """A flood on one stream does not drown the error on the other."""
    text = shown(b"x" * 1_000_000, b"the one error\n")
    assert text.endswith("[standard error]\nthe one error")


def test_a_marker_says_that_all_is_kept_only_where_it_is() -> None:
    """Of a flood the middle is nowhere any more; the count is of all that is not shown."""
    flood = b"a" * 60_000 + b"\n[... 1000000 bytes left out ...]\n" + b"z" * 60_000
    result = exited(flood, b"e" * 20_000).model_copy(update={"stdout_bytes": 1_120_000})
    text = render(result, 120, LIMIT, "/tmp/output/step-1-0.txt")
    out, _, err = text.partition("[standard error]")
    count = int(out.partition("[... ")[2].partition(" ")[0])
    assert f"[... {count} bytes left out; its beginning and end are in /tmp/output/step-1-0.txt ...]" in out
    assert count == 1_120_000 - LIMIT // 2
    assert "[... 11808 bytes left out; all of it is in /tmp/output/step-1-0.txt ...]" in err


@pytest.mark.parametrize(("stdout", "long"), [(b"\xff" * 10_000, True), (b"\0" * 8000, True), (b"a" * 10_000, False)])
def test_output_that_grows_as_it_is_decoded_counts_as_it_is_shown(stdout: bytes, long: bool) -> None:
    """A byte that is no UTF-8 takes four, so that what fits and what is cut is measured after that."""
    assert too_long(exited(stdout), LIMIT) is long
    assert ("left out" in shown(stdout)) is long


def test_line_feeds_alone_are_no_output() -> None:
    """The text never ends with an empty line that looks like a cut."""
    assert shown(b"\n\n") == "exit code 0 after 0.2 s\n(no output)"


def test_a_note_of_the_harness_stands_before_the_output() -> None:
    """Which limit ended a command is told apart from what the command itself said."""
    result = exited(b"out\n").model_copy(update={"note": "out of memory: a process was killed at the limit of 64 MB"})
    assert render(result, 120, LIMIT, None).splitlines()[1:] == [
        "[caisson] out of memory: a process was killed at the limit of 64 MB",
        "out",
    ]
