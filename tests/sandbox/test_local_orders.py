"""What init tells a job's supervisor inside a local sandbox."""

from __future__ import annotations

import socket

import pytest

from activities.sandbox.providers.local import MAX_INPUT
from activities.sandbox.providers.local_job import INPUT, KILL, NOTE
from activities.sandbox.providers.local_jobs import Job


def test_an_order_to_end_arrives_behind_whatever_was_typed() -> None:
    """A supervisor that a busy machine does not let read finds it when it does; lost, the command would run to its own end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.setblocking(False)
    job = Job(1, ours, -1)
    with pytest.raises(BlockingIOError):
        while True:
            ours.send(INPUT + b"x" * MAX_INPUT)
    job.insist(KILL)
    job.insist(NOTE + b"a limit")
    typed = 0
    while (order := theirs.recv(1 << 20))[:1] == INPUT:
        typed += 1
        job.flush()
    assert typed >= 1
    assert (order, theirs.recv(100)) == (KILL, NOTE + b"a limit")
    job.insist(KILL)
    assert theirs.recv(100) == KILL
    theirs.close()
    job.insist(KILL)
    assert job.unsent == []
    ours.close()
