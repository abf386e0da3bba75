"""Transcripts and artifacts: what the command makes of what lies in the store."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from activities.model.transcript import Entry, TranscriptStore
from activities.store.blobs import BlobStore
from activities.store.local import LocalStore
from activities.store.port import ObjectDamaged
from client.artifacts import all_artifacts, copy_artifacts
from client.cli.faults import ExitCode
from client.cli.main import app
from client.transcript import by_step, render
from contracts.base import BadInput
from contracts.blob import BlobRef
from contracts.run import Artifact, ArtifactList


def message(step: int, origin: Any, role: str, text: str) -> Entry:
    part = "output_text" if role == "assistant" else "input_text"
    return Entry(step, origin, {"type": "message", "role": role, "content": [{"type": part, "text": text}]})


def call(step: int, call_id: str, name: str, arguments: str) -> Entry:
    return Entry(step, "model", {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments})


def output(step: int, call_id: str, text: str) -> Entry:
    return Entry(step, "tool", {"type": "function_call_output", "call_id": call_id, "output": text})


CONVERSATION = (
    message(1, "user", "user", "count the files"),
    Entry(1, "model", {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I look first."}]}),
    call(1, "c1", "shell", '{"command": "ls\\nwc", "timeout_seconds": 5}'),
    output(2, "c1", "exit code 0\n\x1b[31m3 files\x1b[0m"),
    message(2, "note", "developer", "be brief"),
    message(2, "model", "assistant", "There are 3."),
)


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(LocalStore(tmp_path / "store"))


def written(*entries: Entry) -> str:
    return "\n".join(render(by_step(entries)))


def test_a_transcript_reads_as_a_conversation() -> None:
    """Who says what, in order; a command is shown as one types it; an output stands in the step that asked for it."""
    lines = [line for line in written(*CONVERSATION).splitlines() if line]
    assert lines == [
        "── step 1 " + "─" * 60,
        "user:",
        "    count the files",
        "model (reasoning):",
        "    I look first.",
        "model calls shell [c1]:",
        "    ls",
        "    wc",
        '    ({"timeout_seconds": 5})',
        "output of [c1]:",
        "    exit code 0",
        "    3 files",
        "── step 2 " + "─" * 60,
        "harness:",
        "    be brief",
        "model:",
        "    There are 3.",
    ]


@pytest.mark.parametrize(
    ("entry", "shown"),
    [
        (call(1, "c", "shell", "{not json"), "    {not json"),
        (call(1, "c", "shell", '{"command": 5}'), '    {\n      "command": 5\n    }'),
        (call(1, "c", "lookup", '{"key": "ü"}'), '    {\n      "key": "ü"\n    }'),
        (call(1, "c", "apply_patch", '{"patch": "*** Begin"}'), "    *** Begin"),
        (Entry(1, "model", {"type": "reasoning", "summary": [], "encrypted_content": "x"}), "    (not shown by the model)"),
        (Entry(1, "model", {"type": "message", "content": [{"type": "refusal", "refusal": "no"}]}), "    (refused) no"),
        (Entry(1, "user", {"type": "message", "content": [{"type": "input_image"}]}), "    (input_image)"),
        (Entry(1, "model", {"type": "web_search_call", "id": "w"}), '    {"type": "web_search_call", "id": "w"}'),
        (output(1, "c", "\x1b[2Jx\x07"), "    x\ufffd"),
    ],
)
def test_every_kind_of_item_is_shown(entry: Entry, shown: str) -> None:
    """Also one that this version does not know, and arguments that are no JSON."""
    assert written(entry).endswith(shown)


async def stored(blobs: BlobStore, entries: tuple[Entry, ...] = CONVERSATION) -> BlobRef:
    return await TranscriptStore(blobs).append(None, entries, None)


def transcript(tmp_path: Path, head: BlobRef, *options: str) -> tuple[int, str, str]:
    arguments = ["transcript", "--head", f"{head.digest}:{head.size}", *options]
    done = CliRunner().invoke(app, arguments, env={"CAISSON_STORE": str(tmp_path / "store"), "TEMPORAL_ADDRESS": "127.0.0.1:1"})
    return done.exit_code, done.stdout, done.stderr


async def test_a_transcript_is_read_from_the_store_without_temporal(tmp_path: Path, blobs: BlobStore) -> None:
    """The head is all that is needed."""
    code, out, _ = await in_thread(transcript, tmp_path, await stored(blobs))
    assert code == 0
    assert out == written(*CONVERSATION) + "\n"


async def test_one_step_of_a_transcript_holds_its_calls_and_their_outputs(tmp_path: Path, blobs: BlobStore) -> None:
    """Outputs are stored with the next model call, but belong to the step that asked."""
    head = await stored(blobs)
    code, out, _ = await in_thread(transcript, tmp_path, head, "--step", "1", "--json")
    assert code == 0
    assert [json.loads(line)["item"].get("type") for line in out.splitlines()] == [
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
    ]
    code, _, err = await in_thread(transcript, tmp_path, head, "--step", "3")
    assert (code, err) == (ExitCode.BAD_INPUT, "caisson: --step 3: the transcript has steps 1 to 2\n")


async def test_raw_lines_are_the_items_as_the_model_was_given_them(tmp_path: Path, blobs: BlobStore) -> None:
    """They can be sent to an endpoint again."""
    code, out, _ = await in_thread(transcript, tmp_path, await stored(blobs), "--raw")
    assert code == 0
    assert [json.loads(line) for line in out.splitlines()] == [entry.item for entry in CONVERSATION]


async def test_a_transcript_of_another_store_is_told_with_the_setting_to_look_at(tmp_path: Path, blobs: BlobStore) -> None:
    """The commonest reason is that the command looks into another store than the workers."""
    await stored(blobs)
    code, _, err = await in_thread(transcript, tmp_path, BlobRef(digest="0" * 64, size=5))
    assert code == ExitCode.FAILED
    assert "CAISSON_STORE" in err
    assert "Traceback" not in err


async def in_thread(work: Any, *arguments: Any) -> Any:
    """A command runs an event loop of its own, so it cannot run in the test's."""
    import asyncio

    return await asyncio.to_thread(work, *arguments)


async def artifact(blobs: BlobStore, path: str, data: bytes = b"data", mode: int = 0o644) -> Artifact:
    return Artifact(path=path, blob=await blobs.put(data), media_type="text/plain", mode=mode)


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


async def test_artifacts_are_copied_under_their_paths(tmp_path: Path, blobs: BlobStore) -> None:
    """Bytes and execute permission are those of the run, set-uid bits are not, and nothing else is left behind."""
    made = [
        await artifact(blobs, "outputs/a.txt", b"one"),
        await artifact(blobs, "outputs/deep/er/run.sh", b"two", 0o4755),
        await artifact(blobs, "outputs/back\\slash ü", b""),
    ]
    out = tmp_path / "out"
    paths = await copy_artifacts(blobs, made, out, overwrite=False)
    assert files(out) == {"outputs/a.txt": b"one", "outputs/deep/er/run.sh": b"two", "outputs/back\\slash ü": b""}
    assert paths == [out / one.path for one in made]
    assert stat.S_IMODE(paths[1].stat().st_mode) & 0o7111 == 0o111
    assert stat.S_IMODE(paths[0].stat().st_mode) & 0o7111 == 0


@pytest.mark.parametrize(
    "path", ["../up", "a/../../up", "/etc/cron.d/x", "a//b", "", ".", "./a", "a/.", "a/..", "nul\0", "..", "outputs/"]
)
async def test_an_artifact_never_leaves_the_directory(tmp_path: Path, blobs: BlobStore, path: str) -> None:
    """The list of artifacts is not trusted: a path that leads outside stops everything before anything is written."""
    made = [await artifact(blobs, "good"), await artifact(blobs, path)]
    with pytest.raises(BadInput, match="leads outside"):
        await copy_artifacts(blobs, made, tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "up").exists()


async def test_a_link_in_the_way_is_not_followed(tmp_path: Path, blobs: BlobStore) -> None:
    """A directory that is a link would let an artifact out of the directory that was named."""
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    (out / "outputs").symlink_to(elsewhere)
    with pytest.raises(BadInput, match="is a link"):
        await copy_artifacts(blobs, [await artifact(blobs, "outputs/x")], out, overwrite=True)
    assert files(elsewhere) == {}


async def test_a_link_where_a_file_goes_is_replaced_and_not_written_through(tmp_path: Path, blobs: BlobStore) -> None:
    """`--overwrite` replaces the name, never what it points to."""
    out, victim = tmp_path / "out", tmp_path / "victim"
    out.mkdir()
    victim.write_bytes(b"mine")
    (out / "x").symlink_to(victim)
    with pytest.raises(BadInput, match="is there already"):
        await copy_artifacts(blobs, [await artifact(blobs, "x")], out, overwrite=False)
    await copy_artifacts(blobs, [await artifact(blobs, "x")], out, overwrite=True)
    assert victim.read_bytes() == b"mine"
    assert (out / "x").read_bytes() == b"data"
    assert not (out / "x").is_symlink()


async def test_a_file_that_is_there_is_not_touched_unless_asked(tmp_path: Path, blobs: BlobStore) -> None:
    """Nothing at all is written when one file is in the way."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "b").write_bytes(b"mine")
    made = [await artifact(blobs, "a"), await artifact(blobs, "b")]
    with pytest.raises(BadInput, match=r"/b: is there already; nothing was written"):
        await copy_artifacts(blobs, made, out, overwrite=False)
    assert files(out) == {"b": b"mine"}
    await copy_artifacts(blobs, made, out, overwrite=True)
    assert files(out) == {"a": b"data", "b": b"data"}


@pytest.mark.parametrize(("there", "path"), [("outputs", "outputs/x"), ("x/y", "x")])
async def test_a_file_and_a_directory_cannot_have_one_name(tmp_path: Path, blobs: BlobStore, there: str, path: str) -> None:
    """Neither is removed to make room for the other, also not with overwrite."""
    out = tmp_path / "out"
    (out / there).parent.mkdir(parents=True)
    (out / there).write_bytes(b"mine")
    with pytest.raises(BadInput, match="remove it or name another directory"):
        await copy_artifacts(blobs, [await artifact(blobs, path)], out, overwrite=True)
    assert files(out) == {there: b"mine"}


async def test_two_artifacts_of_one_path_are_refused(tmp_path: Path, blobs: BlobStore) -> None:
    """A list that names a path twice would hide one of the two."""
    made = [await artifact(blobs, "a", b"one"), await artifact(blobs, "a", b"two")]
    with pytest.raises(BadInput, match="is there already"):
        await copy_artifacts(blobs, made, tmp_path / "out", overwrite=False)
    assert files(tmp_path / "out") == {"a": b"one"}


async def test_damaged_bytes_never_appear_under_an_artifacts_name(tmp_path: Path, blobs: BlobStore) -> None:
    """A blob that is not what its digest says leaves no file, not even a part of one."""
    made = await artifact(blobs, "a", b"right")
    stored_at = next(path for path in (tmp_path / "store").rglob(made.blob.digest))
    stored_at.write_bytes(b"wrong")
    with pytest.raises(ObjectDamaged):
        await copy_artifacts(blobs, [made], tmp_path / "out", overwrite=False)
    assert files(tmp_path / "out") == {}


async def test_the_whole_list_of_artifacts_comes_from_its_blob(blobs: BlobStore) -> None:
    """A result holds only the first ones."""
    made = [await artifact(blobs, f"outputs/{n}") for n in range(5)]
    index = await blobs.put_json([one.model_dump(mode="json") for one in made])
    listed = ArtifactList(count=5, total_bytes=20, first=tuple(made[:2]), index=index)
    assert await all_artifacts(blobs, listed) == tuple(made)
    assert await all_artifacts(blobs, ArtifactList(count=2, first=tuple(made[:2]), index=index)) == tuple(made[:2])
