"""The subjects of the conformance suite, and where the matrix learns how the checks went."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conformance.checks import Check, checks
from tests.conformance.subjects import NotHere, Subject, subjects

ASKED = os.environ.get("CONFORMANCE_SUBJECTS", "")
"""Names of subjects, or of the providers before their first dash, separated by commas; the usual ones where it is empty."""
USUAL = {
    "test_conformance": ("local",),
    "test_services": ("e2b",),
}
"""The subjects that every run of the tests has, by file. Container engines need packages and images of their own,
and minutes; the portable way is shown on E2B here, and in BusyBox by `make conformance PROVIDER=portable`."""
RESULTS = os.environ.get("CONFORMANCE_RESULTS", "")
"""The file that gets a line for each check that was made, for `python -m tests.conformance.matrix`."""


def is_asked_for(name: str) -> bool:
    """Tell whether a subject was named."""
    return name in ASKED.split(",") or name.partition("-")[0] in ASKED.split(",")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of every check with every subject."""
    if "check" in metafunc.fixturenames:
        file = metafunc.module.__name__.rpartition(".")[2]
        asked = [name for name in subjects() if is_asked_for(name)] if file == "test_conformance" else []
        names = asked if ASKED else [name for name in USUAL[file] if name in subjects()]
        metafunc.parametrize("subject", names, indirect=True, scope="session")
        metafunc.parametrize("check", [pytest.param(check, id=check.name) for check in checks()])


@pytest.fixture(scope="session")
async def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    """One subject, for all of its checks."""
    name: str = request.param
    try:
        async with subjects()[name](tmp_path_factory.mktemp(name.partition("-")[0][:8])) as one:
            if one.asked_for and (name not in ASKED.split(",") or os.environ.get("CONFIRM") != "yes"):
                pytest.skip(f"{name} may cost money, and runs only when asked for: make conformance PROVIDER={name} CONFIRM=yes")
            yield one
    except NotHere as missing:
        pytest.skip(f"{name}: {missing}")


def tell(subject: Subject, check: Check, outcome: str, text: str) -> None:
    """Write down how a check went, where somebody wants to know."""
    if RESULTS:
        line = {"subject": subject.name, "where": subject.where, "check": check.name, "outcome": outcome, "text": text}
        with Path(RESULTS).open("a") as file:
            file.write(json.dumps(line) + "\n")
