"""The stream files of jobs: what is kept of an output, and how it is cut."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from activities.sandbox.providers import local_output, local_stream
from activities.sandbox.providers.local_bwrap import GUEST_MODULES
from activities.sandbox.providers.local_output import Output, open_output, whole_characters_at_end, whole_characters_at_start
from activities.sandbox.providers.local_wire import TOTAL_AT

SMALL_HEAD, SMALL_RING = 50, 30
MARKER = rb"\n\[\.\.\. \d+ bytes left out \.\.\.\]\n"


def small(patch: pytest.MonkeyPatch) -> None:
    """Make the bounds of stream files small."""
    for module in (local_stream, local_output):
        patch.setattr(module, "HEAD", SMALL_HEAD)
        patch.setattr(module, "RING", SMALL_RING)
        patch.setattr(module, "TOTAL_AT", SMALL_HEAD + SMALL_RING)


def kept(chunks: list[bytes], limit: int, directory: Path) -> tuple[bytes, bytes, int]:
    """Write chunks with small bounds as a supervisor does; return what a result holds, what a progress report, the total."""
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        with (directory / "stdout").open("w+b") as file:
            stream = local_stream.Stream(file.fileno())
            for chunk in chunks:
                stream._store(memoryview(chunk))
            os.close(stream.pipe)
            os.close(stream.writer)
            output = open_output(directory, "stdout")
            try:
                tail = output.read(output.tail_from(SMALL_RING), output.total)
                return output.bounded(limit), tail, stream.total
            finally:
                os.close(output.fd)


@settings(deadline=None)
@given(chunks=st.lists(st.binary(max_size=70), max_size=12), limit=st.integers(0, 120))
def test_a_result_is_the_output_or_its_two_ends(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes], limit: int
) -> None:
    """For any output: whole when it fits and was kept whole, else a prefix, the true count left out, and a suffix."""
    whole = b"".join(chunks)
    result, tail, total = kept(chunks, limit, tmp_path_factory.mktemp("stream"))
    assert total == len(whole)
    assert whole.endswith(tail)
    assert len(tail) == min(len(whole), SMALL_RING)
    if len(whole) <= min(limit, SMALL_HEAD + SMALL_RING):
        assert result == whole
        return
    candidates = range(len(whole) + 1)
    assert any(
        result == whole[:head] + b"\n[... %d bytes left out ...]\n" % (len(whole) - head - tail) + whole[len(whole) - tail :]
        for head in candidates
        for tail in candidates
        if head + tail <= min(limit, SMALL_HEAD + SMALL_RING)
    )


@given(text=st.text(max_size=40), cut=st.integers(0, 200))
def test_a_cut_splits_no_character(text: str, cut: int) -> None:
    """Both sides of a cut of UTF-8 text are UTF-8 text, and at most three bytes a side are dropped."""
    data = text.encode()
    cut = min(cut, len(data))
    head, tail = whole_characters_at_end(data[:cut]), whole_characters_at_start(data[cut:])
    assert text.startswith(head.decode())
    assert text.endswith(tail.decode())
    assert cut - len(head) <= 3
    assert len(data) - cut - len(tail) <= 3


@given(data=st.binary(max_size=20))
def test_a_cut_of_other_bytes_drops_at_most_three(data: bytes) -> None:
    """Bytes that are no text lose at most what could be part of a character."""
    assert data.startswith(whole_characters_at_end(data))
    assert data.endswith(whole_characters_at_start(data))
    assert len(data) - len(whole_characters_at_end(data)) <= 3
    assert len(data) - len(whole_characters_at_start(data)) <= 3


def test_what_could_not_be_written_is_still_counted() -> None:
    """An output that a full disk cut short is read as far as it goes."""
    with TemporaryFile() as file:
        stream = local_stream.Stream(file.fileno())
        os.close(stream.pipe)
        os.close(stream.writer)
        with pytest.MonkeyPatch.context() as patch:
            stream._store(memoryview(b"begun"))
            patch.setattr(stream, "file", os.open("/dev/full", os.O_WRONLY))
            stream._store(memoryview(b"x" * 90))
            os.close(stream.file)
        stream._store(memoryview(b"later"))
        assert (stream.total, stream.kept) == (100, 5)
        assert Output(file.fileno(), 5, 95).bounded(1000) == b"begun\n[... 95 bytes left out ...]\n"


def test_a_stream_file_without_its_counter_yet_is_as_long_as_it_is(tmp_path: Path) -> None:
    """A reader between the writer's two steps sees a shorter output, not an error."""
    (tmp_path / "stdout").write_bytes(b"x")
    os.truncate(tmp_path / "stdout", TOTAL_AT - 1)
    output = open_output(tmp_path, "stdout")
    os.close(output.fd)
    assert output.total == TOTAL_AT - 1


@pytest.mark.parametrize("module", GUEST_MODULES)
def test_what_runs_inside_is_python_3_9_and_imports_little(module: str) -> None:
    """Init's modules parse as Python 3.9 and import only each other and a few modules that load quickly."""
    source = (Path(local_stream.__file__).parent / f"{module}.py").read_text()
    tree = ast.parse(source, feature_version=(3, 9))
    slow = {"typing", "pathlib", "dataclasses", "subprocess", "asyncio", "shutil", "inspect", "tempfile", "logging"}
    for node in tree.body:
        if isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & slow
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.module == "__future__" or node.module.startswith("activities.sandbox.providers")


@settings(deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.integers(0, 200), st.integers(0, 200), st.integers(0, 60))
def test_a_part_is_what_was_written_there_or_a_marker(chunks: list[bytes], one: int, other: int, limit: int) -> None:
    """Between two positions every kept byte is given once, and the markers say how many are not."""
    written = b"".join(chunks)
    start, end = sorted(min(at, len(written)) for at in (one, other))
    with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        small(patch)
        with (Path(directory) / "stdout").open("w+b") as file:
            stream = local_stream.Stream(file.fileno())
            for chunk in chunks:
                stream._store(memoryview(chunk))
            os.close(stream.pipe)
            os.close(stream.writer)
        output = open_output(Path(directory), "stdout")
        try:
            part = output.part(start, end, limit)
        finally:
            os.close(output.fd)
    kept_from = max(len(written) - SMALL_RING, SMALL_HEAD)
    wanted = [n for n in range(start, end) if end - start <= limit or n < start + limit // 2 or n >= end - (limit - limit // 2)]
    wanted = [n for n in wanted if n < SMALL_HEAD or n >= kept_from]
    expected, at = b"", start
    for n in wanted:
        expected += local_output.marker(n - at) + written[n : n + 1]
        at = n + 1
    assert joined(part) == joined(expected + local_output.marker(end - at))


def joined(data: bytes) -> bytes:
    """Return `data` with markers that follow each other made one."""
    return re.sub(
        MARKER + b"(?:" + MARKER + b")+", lambda run: local_output.marker(sum(map(int, re.findall(rb"\d+", run[0])))), data
    )
