"""What bringing many files in, and one changed file out, costs in calls of a provider's SDK: of `run`, `put` and `get`."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from activities.sandbox.port import Command
from activities.sandbox.portable import PortableSandbox
from tests.conformance.local_machine import LocalMachine
from tests.conformance.subject_portable import subject_busybox, subject_python
from tests.conformance.subjects import NotHere
from tests.sandbox.remote_support import keeper_at

FILES = 1000
MOST = 5


@pytest.mark.parametrize("image", ["python", "busybox"])
async def test_many_files_cost_few_calls(tmp_path: Path, image: str) -> None:
    """In, out when nothing has changed, and out when one has."""
    making = contextlib.asynccontextmanager(subject_python if image == "python" else subject_busybox)
    async with contextlib.AsyncExitStack() as stack:
        try:
            subject = await stack.enter_async_context(making(tmp_path / "machine"))
        except NotHere as missing:
            pytest.skip(str(missing))
        full, empty = [await subject.provider.attach(await subject.create()) for _ in range(2)]
        fill = f"i=0; while [ $i -lt {FILES} ]; do echo $i >f$i; i=$((i+1)); done; sleep 1.1"
        await full.exec(Command("fill", ["sh", "-c", fill], timeout=60))
        keeper = keeper_at(tmp_path / "store")
        first = await keeper.snapshot(full, None)
        assert first.files == FILES

        assert isinstance(empty, PortableSandbox)
        machine = empty.machine
        assert isinstance(machine, LocalMachine)
        machine.calls.clear()
        assert await keeper.restore(empty, first) == FILES
        assert len(machine.calls) <= MOST, machine.calls

        machine.calls.clear()
        assert (await keeper.snapshot(empty, first)).id == first.id
        assert len(machine.calls) <= MOST, machine.calls

        await empty.exec(Command("change", ["sh", "-c", "echo changed >f77"], timeout=60))
        machine.calls.clear()
        assert (await keeper.snapshot(empty, first)).id != first.id
        assert len(machine.calls) <= MOST, machine.calls
