"""Commands in a local sandbox behave as people who met the opposite asked for; each test names their public reports."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time

import pytest

from activities.sandbox.port import SandboxGone
from contracts.sandbox import JobState
from tests.sandbox.local_support import Local, bash


async def test_a_background_child_does_not_hold_the_call(local: Local) -> None:
    """A child that keeps the pipe open delays nothing (coder/xum#41, anomalyco/opencode#22012)."""
    began = time.monotonic()
    result = await local.sh("sleep 75 & echo ready")
    assert (result.exit_code, result.stdout) == (0, b"ready\n")
    assert time.monotonic() - began < 2


async def test_a_timeout_ends_the_children_too(local: Local) -> None:
    """At the timeout the whole tree dies and partial output stays (openai/codex#4337, UKGovernmentBEIS/inspect_ai#2779)."""
    result = await local.sh("echo before; sleep 311.1 & sleep 311.1; echo never", timeout=0.5)
    assert (result.state, result.exit_code, result.stdout) == (JobState.TIMED_OUT, None, b"before\n")
    assert not await local.alive("311.1")


async def test_death_by_a_signal_is_told(local: Local) -> None:
    """A command killed by a signal is no success (earendil-works/pi#8992, QwenLM/qwen-code#2976)."""
    result = await local.sh("echo part; kill -9 $$")
    assert (result.state, result.exit_code, result.signal) == (JobState.SIGNALLED, None, 9)
    assert result.stdout == b"part\n"


async def test_an_unknown_command_is_a_result(local: Local) -> None:
    """A missing program gives exit code 127 and the shell's words (daytonaio/daytona#2283)."""
    result = await local.sh("no_such_tool_zz --help")
    assert result.exit_code == 127
    assert b"no_such_tool_zz" in result.stderr


async def test_a_missing_program_without_a_shell_is_a_result_too(local: Local) -> None:
    """Init tells of a missing program as a shell would (daytonaio/daytona#2283)."""
    result = await local.run("no_such_tool_zz", "--help")
    assert (result.exit_code, result.stderr) == (127, b"caisson: no_such_tool_zz: command not found\n")


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["/workspace"], 126, b"Permission denied"),
        (["./nothing"], 127, b"No such file"),
        (["a\0b"], 126, b"embedded null"),
        (["true", "\ud800"], 126, b"cannot be started"),
        ([], 126, b"cannot be started"),
        (["true", "x" * 3_000_000], 126, b"Argument list too long"),
    ],
)
async def test_what_cannot_be_executed_is_a_result(local: Local, argv: list[str], code: int, words: bytes) -> None:
    """Every way in which a command cannot start is its own failure, never the sandbox's."""
    result = await local.run(*argv)
    assert result.exit_code == code
    assert words in result.stderr


async def test_a_missing_directory_is_a_result(local: Local) -> None:
    """A working directory that is not there fails the command, not the sandbox."""
    result = await local.run("true", cwd="/workspace/nowhere")
    assert result.exit_code == 126
    assert b"/workspace/nowhere: No such file or directory" in result.stderr


async def test_a_command_that_ignores_term_is_killed(local: Local) -> None:
    """TERM is followed by KILL (daytonaio/daytona#2602, e2b-dev/E2B#500)."""
    began = time.monotonic()
    result = await local.sh("trap '' TERM INT HUP; echo armed; while :; do sleep 0.3117; done", timeout=0.3)
    assert (result.state, result.stdout) == (JobState.TIMED_OUT, b"armed\n")
    assert 2 < time.monotonic() - began < 4
    assert not await local.alive("0.3117")


async def test_output_is_bytes(local: Local) -> None:
    """Bytes that are no UTF-8 arrive as they are (strands-agents/harness-sdk#1968, openai/codex#6178)."""
    result = await local.sh(r"printf 'ok \377\376 caf\351 end\n'")
    assert result.stdout == b"ok \xff\xfe caf\xe9 end\n"


async def test_a_nul_byte_is_kept(local: Local) -> None:
    """A NUL byte in the output is no end of it (ginlix-ai/LangAlpha#190, getsentry/junior#897)."""
    assert (await local.sh(r"printf 'a\0b\n'")).stdout == b"a\0b\n"


async def test_long_output_keeps_head_and_tail(local: Local) -> None:
    """What a command says last is never lost to its length (openai/codex#6415, NousResearch/hermes-agent#27096)."""
    result = await local.sh("seq 1 200000; echo FAILED-HERE", output_limit=20_000)
    assert result.stdout.startswith(b"1\n2\n3\n")
    assert result.stdout.endswith(b"\n200000\nFAILED-HERE\n")
    assert result.stdout_bytes == 1_288_907
    assert b"\n[... 1268907 bytes left out ...]\n" in result.stdout


async def test_one_very_long_line_is_bounded(local: Local) -> None:
    """A line without an end is cut like any output (felan-ai/felan#36)."""
    result = await local.sh("printf 'A%.0s' $(seq 120000); echo Z", output_limit=10_000)
    assert len(result.stdout) < 10_100
    assert result.stdout.startswith(b"AAAA")
    assert result.stdout.endswith(b"AZ\n")


async def test_stdin_is_at_its_end_when_not_given(local: Local) -> None:
    """A command that reads its input meets the end at once (openai/codex#20919, savvagent/light-factory#19)."""
    result = await local.sh('cat; read -r x; echo "got:[$x] rc=$?"')
    assert result.stdout == b"got:[] rc=1\n"


async def test_a_heredoc_arrives_as_written(local: Local) -> None:
    """Quotes, dollars and backticks in a heredoc stay (daytonaio/daytona#4230, SWE-agent/SWE-ReX#286)."""
    text = "line \"q\" $HOME `id` \\ end\nsecond 'line'\n"
    result = await local.sh(f"cat > out.txt <<'X'\n{text}X\ncat out.txt")
    assert result.stdout.decode() == text


async def test_no_call_ends_the_session_of_the_next(local: Local) -> None:
    """`set -e` and `exit` end their own call only (gofixpoint/amika#342, daytonaio/daytona#4520)."""
    results = [await local.sh(script) for script in ("set -e; false", "exit 3", "echo alive")]
    assert [result.exit_code for result in results] == [1, 3, 0]
    assert results[2].stdout == b"alive\n"


async def test_a_dead_sandbox_is_an_error_and_no_output(local: Local) -> None:
    """A call on a dead sandbox raises, so that no engine's message passes for output (UKGovernmentBEIS/inspect_ai#4709)."""
    assert (await local.sh("echo one")).stdout == b"one\n"
    os.kill(local.init_pid(), signal.SIGKILL)
    with pytest.raises(SandboxGone):
        await local.sh("echo two")


async def test_no_output_is_a_success(local: Local) -> None:
    """A silent command succeeds at once (anthropics/claude-agent-sdk-typescript#64)."""
    result = await local.sh("true")
    assert (result.state, result.exit_code, result.stdout, result.stderr) == (JobState.EXITED, 0, b"", b"")


@pytest.mark.parametrize("size", [0, 1, 1 << 20, 5 << 20])
async def test_stdin_is_delivered_to_its_end(local: Local, size: int) -> None:
    """All of a given input arrives, and then its end, also when it is empty (openai/openai-agents-python#3718)."""
    result = await local.sh("cat | wc -c", stdin=b"a" * size)
    assert int(result.stdout) == size


async def test_a_stuck_command_holds_up_no_other(local: Local) -> None:
    """Calls run side by side, also after one hung (cloudflare/sandbox-sdk#438, e2b-dev/E2B#1074)."""
    stuck = asyncio.create_task(local.sh("sleep 314.1", timeout=0.9))
    await asyncio.sleep(0.2)
    began = time.monotonic()
    assert (await local.sh("echo ok")).stdout == b"ok\n"
    again = await local.provider.attach(local.sandbox.ref)
    assert (await again.exec(bash("again", "echo ok"))).stdout == b"ok\n"
    assert time.monotonic() - began < 0.5
    assert (await stuck).state == JobState.TIMED_OUT


async def test_streams_are_told_apart(local: Local) -> None:
    """Standard output and standard error arrive each on its own."""
    result = await local.sh("echo out; echo err >&2")
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")


async def test_a_command_gets_its_environment(local: Local) -> None:
    """The command's own variables arrive exactly, over the sandbox's (values with newlines and quotes too)."""
    values = {"A": "line\n'quoted' \"twice\"", "EMPTY": "", "UNI": "naïve ✓", "PROJECT": "over"}
    result = await local.sh("python3 -c 'import json, os; print(json.dumps(dict(os.environ)))'", env=values)
    assert values.items() <= json.loads(result.stdout).items()


async def test_commands_start_with_ordinary_settings(local: Local) -> None:
    """The umask is 022, no signal is ignored or blocked, and no file but the standard ones is open."""
    text = await local.text("umask; grep -E '^Sig(Ign|Blk)' /proc/self/status; ls /proc/self/fd | wc -w")
    umask, _, blocked, _, ignored, files = text.split()
    assert (umask, int(blocked, 16), files) == ("0022", 0, "4")
    # Signals 32 and 33 are the C library's own: it lets no program set them, and they stay as the worker's ancestors left them.
    assert int(ignored, 16) & ~(3 << 31) == 0


async def test_the_duration_is_that_of_the_command(local: Local) -> None:
    """The result says how long the command itself ran."""
    result = await local.sh("sleep 0.3; sleep 30 &")
    assert 0.3 <= result.duration_seconds < 5
