"""The `caisson` command against a real stack, as a person or a script uses it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import uuid
from pathlib import Path

from tests.integration.stack import Stack


async def caisson(stack: Stack, *argv: str, seconds: float = 60) -> tuple[int, str, str]:
    """Run the command; return its exit code, standard output and standard error."""
    environ = {
        **os.environ,
        "TEMPORAL_ADDRESS": stack.dev.address,
        "CAISSON_STORE": str(stack.state / "store"),
        "CAISSON_SANDBOX_DIR": str(stack.state / "sandboxes"),
        "NO_COLOR": "1",
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "client.cli.main", *argv),
        env=environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), seconds)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def fresh(name: str) -> str:
    """A run id of the test's own."""
    return f"{name}-{uuid.uuid4().hex[:8]}"


async def test_a_run_is_shown_to_its_end(stack: Stack, tmp_path: Path) -> None:
    """Steps, usage and artifacts; then its result, its transcript and its files, each from its own command."""
    run_id = fresh("cli")
    code, out, err = await caisson(stack, "run", "Play [files].", "--id", run_id, "--label", "team=docs")
    assert code == 0, err
    assert re.search(r"step 1 .*→ exit code 0", out)
    assert "the file has one row" in out
    assert "outputs/notes.md" in out
    assert "scripted, not a language model" in out
    assert "\x1b" not in out, "no escape sequences where there is no terminal"

    code, out, _ = await caisson(stack, "result", run_id, "--json")
    assert (code, json.loads(out)["status"]) == (0, "completed")

    code, out, _ = await caisson(stack, "transcript", run_id)
    assert code == 0
    assert "Play [files]." in out
    assert "*** Update File: outputs/t.csv" in out
    assert out.index("call_1_1") < out.index("call_2_1") < out.index("the file has one row")

    code, _, err = await caisson(stack, "artifacts", run_id, "get", str(tmp_path / "got"))
    assert code == 0, err
    assert (tmp_path / "got/outputs/t.csv").read_bytes() == b"a,b\n3,4\n"


async def test_a_detached_run_is_watched_and_stopped(stack: Stack) -> None:
    """`run --detach` returns at once; `stop` ends the run after its step; `watch` then says so with exit code 4."""
    run_id = fresh("cli")
    code, out, err = await caisson(stack, "run", "Play [replay-long].", "--id", run_id, "--detach")
    assert (code, run_id in out) == (0, True), err
    watching = asyncio.create_task(caisson(stack, "watch", run_id))
    await stack.until(stack.dev.client.get_workflow_handle(run_id), state="running")
    code, _, err = await caisson(stack, "stop", run_id, "--by", "ann")
    assert code == 0, err
    code, out, _ = await watching
    assert code == 4
    assert "stopped by ann" in out


async def test_the_last_outputs_of_a_run_out_of_budget_are_in_its_transcript(stack: Stack) -> None:
    """A run that ends after its tool calls keeps what they gave; the command's exit code says why it ended."""
    handle = await stack.start("replay-long", budget={"steps": 2})
    result = await stack.finish(handle)
    assert result["status"] == "budget_exceeded"
    code, out, _ = await caisson(stack, "result", handle.id)
    assert code == 3
    _, out, _ = await caisson(stack, "transcript", handle.id)
    assert len(re.findall(r"^output of \[call_\d_1\]", out, re.M)) == 2


async def test_bad_input_starts_nothing(stack: Stack, tmp_path: Path) -> None:
    """Exit code 2, one clear message, and no workflow."""
    file = tmp_path / "run.json"
    for content, named in (('{"task": "x",}', "line 1"), ('{"task": "x", "agnt": "a"}', "agnt"), ('{"task": ""}', "task")):
        file.write_text(content)
        run_id = fresh("cli-bad")
        code, _, err = await caisson(stack, "run", "--input", str(file), "--id", run_id)
        assert code == 2, err
        assert named in err
        assert "Traceback" not in err
        started = [one async for one in stack.dev.client.list_workflows(f'WorkflowId = "{run_id}"')]
        assert started == []


async def test_a_run_that_the_workers_refuse_says_so(stack: Stack) -> None:
    """An unknown agent is known to the workers only; their message is passed on, with the exit code for bad input."""
    code, out, err = await caisson(stack, "run", "Play [hello].", "--agent", "nobody", "--id", fresh("cli"))
    assert code == 2
    assert "no agent is named 'nobody'" in out + err


async def test_a_run_id_is_used_once(stack: Stack) -> None:
    """Starting the same id again is refused, and the first run is untouched."""
    run_id = fresh("cli")
    assert (await caisson(stack, "run", "Play [hello].", "--id", run_id))[0] == 0
    code, _, err = await caisson(stack, "run", "Play [hello].", "--id", run_id)
    assert code == 2
    assert run_id in err


async def test_the_doctor_finds_a_sound_stack_sound(stack: Stack) -> None:
    """No line fails while the stack runs, and each worker is found."""
    code, out, _ = await caisson(stack, "doctor", "--json")
    assert code == 0, out
    findings = {line["check"]: line["state"] for line in json.loads(out)}
    assert findings["sandbox worker"] == "ok"
    assert "fail" not in findings.values()
