"""Going back to any step of a run: its files listed, compared, written out, and gone on from."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.helpers import events, kill, sandboxes_of
from tests.integration.stack import Stack
from tests.integration.test_command import caisson, fresh


@pytest.fixture(scope="module")
async def travelled(stack: Stack) -> str:
    """A run of four steps: the first makes files, the second changes them, the third only touches one."""
    handle = await stack.start("through-time", {"sandbox": {"idle_seconds": 33}}, run_id=fresh("through-time"))
    assert (await stack.finish(handle))["status"] == "completed"
    return handle.id


async def listed(stack: Stack, *argv: str) -> dict[str, dict[str, Any]]:
    """What `files --json` says, by path."""
    code, out, err = await caisson(stack, "files", *argv, "--json")
    assert (code, err) == (0, "")
    return {entry["path"]: entry for entry in json.loads(out)["entries"]}


async def changed(stack: Stack, *argv: str) -> dict[str, str]:
    """What `diff --json` says, kinds by path."""
    code, out, err = await caisson(stack, "diff", *argv, "--json")
    assert (code, err) == (0, "")
    return {change["path"]: change["change"] for change in json.loads(out)["changes"]}


async def test_the_files_of_any_step_are_listed(stack: Stack, travelled: str) -> None:
    """Mode, size, time, links; what the snapshot leaves out; and nothing that writes to the terminal."""
    code, out, err = await caisson(stack, "files", travelled)
    assert code == 0
    names = [line[44:] for line in out.splitlines()]
    assert "outputs/link -> /etc/passwd" in names
    assert "outputs/notes.md (same file as again)" in names
    assert "bad␛[2Jname" in names
    assert names == sorted(names, key=lambda name: name.split("/"))
    assert next(line for line in out.splitlines() if line.endswith(" su")).startswith("-rwxr-xr-x      10 B  20")
    assert "\x1b" not in out + err
    assert f"run {travelled} after step 4: 7 files" in err
    assert "not in the snapshot: pipe (a FIFO)" in err
    assert "left out of snapshots: *.tmp" in err

    first = await listed(stack, travelled, "--step", "1")
    assert "gone" in first and "outputs/new.csv" not in first
    assert (first["again"]["mode"], first["again"]["size"]) == ("0644", 14)
    assert first["outputs/notes.md"]["size"] == 14, "a hard link has the size of its file"
    assert await listed(stack, travelled, "--step", "0") == {}
    assert set(await listed(stack, travelled, "outputs", "--step", "1")) == {"outputs/link", "outputs/notes.md", "outputs/zeros"}
    assert set(await listed(stack, travelled, "/workspace/gone", "--step", "1")) == {"gone"}


async def test_a_file_of_any_step_is_printed(stack: Stack, travelled: str) -> None:
    """As it is where a program reads; under its other name too; a directory and a link are no file."""
    assert (await caisson(stack, "files", travelled, "outputs/notes.md", "--cat", "--step", "1"))[1] == "one\ntwo\nthree\n"
    code, out, _ = await caisson(stack, "files", travelled, "again", "--cat")
    assert (code, out) == (0, "one\nTWO \x1b[2J\r\nthree\n")
    for path, told in (("outputs", "is a directory"), ("outputs/link", "is a link to /etc/passwd")):
        code, out, err = await caisson(stack, "files", travelled, path, "--cat")
        assert (code, out) == (2, "")
        assert told in err


async def on_a_terminal(stack: Stack, *argv: str) -> tuple[int, str]:
    """Run the command with a terminal for its output, and return its exit code and what came there."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "CAISSON_STORE": str(stack.state / "store"), "NO_COLOR": "1", "TERM": "dumb"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "client.cli.main", *argv),
        env=environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    # The kernel says EIO when the last of the other side is closed.
    with contextlib.suppress(OSError):
        while data := await asyncio.to_thread(os.read, ours, 4096):
            shown += data
    os.close(ours)
    return await process.wait(), shown.decode()


async def test_content_cannot_write_to_a_terminal(stack: Stack, travelled: str) -> None:
    """A person's terminal is given signs for what would act in it, and no binary file at all."""
    code, shown = await on_a_terminal(stack, "files", travelled, "again", "--cat")
    assert (code, shown) == (0, "one\r\nTWO ␛[2J\r\nthree\r\n")
    code, shown = await on_a_terminal(stack, "files", travelled, "outputs/zeros", "--cat")
    assert code == 2
    assert "is binary, 3 KB" in shown and "--cat > FILE" in shown
    for argv in (["diff", travelled], ["files", travelled]):
        assert "\x1b" not in (await on_a_terminal(stack, *argv))[1]


async def test_two_steps_are_compared(stack: Stack, travelled: str) -> None:
    """Added, changed and removed, with the lines of texts; from the start to the last step unless others are named."""
    code, out, err = await caisson(stack, "diff", travelled, "--from", "1", "--to", "2")
    assert code == 0, err
    assert "changed  again  14 B → 20 B, -rw-r--r-- → -rwxr-xr-x\n--- a/again\n+++ b/again\n" in out
    assert "\n one\n-two\n+TWO ␛[2J␍\n three\n" in out
    assert "removed  gone  4 B\n--- a/gone\n+++ /dev/null\n@@ -1 +0,0 @@\n-old\n" in out
    assert "changed  outputs/link -> /etc/passwd  led to notes.md\n" in out
    assert "changed  outputs/zeros  3,000 → 3,001 B\n         (binary)\n" in out
    assert err == f"from run {travelled} after step 1 to after step 2\n3 added, 3 changed, 1 removed\n"

    code, out, _ = await caisson(stack, "diff", travelled, "--from", "1", "--to", "2", "--stat")
    assert [line[:8].strip() for line in out.splitlines()] == "changed added removed changed added changed added".split()  # noqa: SIM905
    whole = await changed(stack, travelled)
    assert whole.keys() == (await listed(stack, travelled)).keys()
    assert set(whole.values()) == {"added"}
    code, out, err = await caisson(stack, "diff", travelled, "--from", "2", "--to", "3")
    assert (code, out, "nothing differs" in err) == (0, "", True), "a touched file is no change"


async def test_a_workspace_is_written_out(stack: Stack, travelled: str, tmp_path: Path) -> None:
    """Verified, into a new directory, without set-uid, and with a word of warning; what it had not is said."""
    code, out, err = await caisson(stack, "checkout", travelled, "--step", "2", str(tmp_path / "out"))
    assert code == 0, err
    assert f"{tmp_path}/out has the workspace of run {travelled} after step 2: 7 files" in out
    assert "pipe (a FIFO)" in err and "made by a model's commands" in err
    assert (tmp_path / "out/outputs/notes.md").read_bytes() == b"one\nTWO \x1b[2J\r\nthree\n"
    assert (tmp_path / "out/outputs/link").readlink() == Path("/etc/passwd")
    assert stat.S_IMODE((tmp_path / "out/su").stat().st_mode) == 0o755
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

    code, _, err = await caisson(stack, "checkout", travelled, str(tmp_path / "out"))
    assert code == 2
    assert f"{tmp_path}/out: is not empty" in err
    assert (tmp_path / "out/gone").exists() is False


async def test_a_run_is_forked(stack: Stack, travelled: str, tmp_path: Path) -> None:
    """The new run has the workspace of the step, goes its own way, and is compared with the first."""
    new = fresh("other")
    task = ("--task", "Play [another-way].")
    code, out, err = await caisson(stack, "fork", travelled, "--step", "1", *task, "--id", new, "--watch", "--label", "a=b")
    assert code == 0, err
    assert f"run {new} is started, from run {travelled} after step 1" in out
    assert "went another way" in out
    assert await changed(stack, new) == {"outputs/other": "added"}
    assert await changed(stack, travelled, "--from", "1", "--with", f"{new}@1") == {}
    assert await changed(stack, travelled, "--from", "1", "--with", new) == {"outputs/other": "added"}

    file = tmp_path / "rest.json"
    file.write_text('{"budget": {"steps": 1}}')
    code, out, err = await caisson(
        stack, "fork", travelled, "--step", "1", *task, "--input", str(file), "--provider", "local", "--json"
    )
    assert code == 0, err
    told = json.loads(out)
    assert told["run_id"].startswith("default-")
    assert (told["from"]["run_id"], told["from"]["step"]) == (travelled, 1)
    second = stack.dev.client.get_workflow_handle(told["run_id"])
    assert (await stack.finish(second))["status"] == "budget_exceeded"
    (given,) = (await events(second))[0].workflow_execution_started_event_attributes.input.payloads
    sandbox = json.loads(given.data)["sandbox"]
    assert (sandbox["provider"], sandbox["idle_seconds"]) == ("local", 33), "the first run's sandbox, but for its provider"


async def test_a_run_whose_sandbox_is_lost_is_travelled_the_same(stack: Stack, tmp_path: Path) -> None:
    """While it works, and no sandbox of it is left: everything is that of its snapshots."""
    handle = await stack.start("lost-on-the-way", run_id=fresh("lost"))
    await stack.until(handle, step=2)
    async with asyncio.timeout(30):
        while not any((sandbox / "workspace/begun").exists() for sandbox in sandboxes_of(stack, handle.id)):
            await asyncio.sleep(0.05)
    for sandbox in sandboxes_of(stack, handle.id):
        kill(sandbox)
    assert {"one"} <= set(await listed(stack, handle.id)) and "two" not in await listed(stack, handle.id)
    assert (await changed(stack, handle.id))["one"] == "added"
    code, _, err = await caisson(stack, "checkout", handle.id, str(tmp_path / "out"))
    assert code == 0, err
    assert (tmp_path / "out/one").read_text() == "one\n"
    new = fresh("lost-fork")
    code, out, err = await caisson(stack, "fork", handle.id, "--task", "Play [another-way].", "--id", new)
    assert code == 0, err
    assert f"from run {handle.id} after step 1" in out
    await handle.cancel()
    await stack.dev.client.get_workflow_handle(new).cancel()


async def test_what_is_not_there_is_told_with_what_is(stack: Stack, travelled: str, tmp_path: Path) -> None:
    """An unknown run, a step that is not there, and a store that is not the run's: code 2, and nothing is made or started."""
    target, new = str(tmp_path / "out"), fresh("never")
    commands = {
        "files": ["--step", "9"],
        "checkout": [target, "--step", "9"],
        "diff": ["--to", "9"],
        "fork": ["--task", "x", "--step", "9", "--id", new],
    }
    for command, rest in commands.items():
        code, out, err = await caisson(stack, command, travelled, *rest)
        assert (code, out) == (2, "")
        assert f"run '{travelled}' has no checkpoint of step 9; it has steps 0 to 4" in err
        code, out, err = await caisson(stack, command, "nobody", *rest)
        assert (code, out) == (2, "")
        assert "no run 'nobody' is known to this store; check the id" in err
        assert f"(here it is {stack.state}/store)" in err
    code, _, err = await caisson(stack, "diff", travelled, "--with", "nobody@3")
    assert (code, "no run 'nobody' is known" in err) == (2, True)
    code, _, err = await caisson(stack, "files", travelled, "outputs/nope")
    assert (code, "outputs/ has link, new.csv, notes.md, zeros" in err) == (2, True)
    code, _, err = await caisson(stack, "checkout", travelled, target, "--step", "0")
    assert (code, "nothing had been put into the workspace" in err) == (2, True)
    assert list(tmp_path.iterdir()) == []
    assert [one async for one in stack.dev.client.list_workflows(f'WorkflowId = "{new}"')] == []

    elsewhere = Stack(stack.dev, tmp_path / "elsewhere", [])
    for command, rest in commands.items():
        code, _, err = await caisson(elsewhere, command, travelled, *rest)
        assert code == 2
        assert f"no run '{travelled}' is known to this store" in err
        assert f"(here it is {tmp_path}/elsewhere/store)" in err
