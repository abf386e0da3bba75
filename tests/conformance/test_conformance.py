"""Every check with every subject that is here. The checks of one subject are made some at a time, as most of them only wait."""

from __future__ import annotations

import asyncio

import pytest

from tests.conformance.checks import Check, checks
from tests.conformance.conftest import tell
from tests.conformance.subjects import NotShown, Subject, subjects

UNREACHABLE = "an_unreachable_service_is_unavailable"
AT_ONCE = 4
"""Checks of one subject that are made at the same time."""

_Outcomes = dict[str, "asyncio.Task[str | None]"]
_begun: dict[str, _Outcomes] = {}


def begin(subject: Subject, request: pytest.FixtureRequest) -> _Outcomes:
    """Begin all the checks of a subject that this run was asked for."""
    if subject.name not in _begun:
        turn = asyncio.Semaphore(AT_ONCE)

        async def one(check: Check) -> str | None:
            async with turn:
                return await check.run(subject)

        name = request.node.callspec.params["subject"]
        params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
        wanted: list[Check] = [each["check"] for each in params if each.get("subject") == name and "check" in each]
        # What cuts the service off would break the checks beside it, so it comes after all of them.
        cutting = [check for check in wanted if check.name == UNREACHABLE]
        tasks = {check.name: asyncio.create_task(one(check)) for check in wanted if check not in cutting}

        async def last(check: Check) -> str | None:
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            return await check.run(subject)

        _begun[subject.name] = {**tasks, **{check.name: asyncio.create_task(last(check)) for check in cutting}}
    return _begun[subject.name]


async def test_conformance(subject: Subject, check: Check, request: pytest.FixtureRequest) -> None:
    """What the check's docstring says."""
    try:
        refusal = await begin(subject, request)[check.name]
    except NotShown as reason:
        tell(subject, check, "not run", str(reason))
        pytest.skip(f"{subject.name}: {reason}")
    except BaseException as error:
        tell(subject, check, "failed", repr(error)[:300])
        raise
    tell(subject, check, "pass" if refusal is None else "refused", refusal or "")


def test_every_check_says_what_it_shows() -> None:
    """Checks have names of their own and a docstring, since the matrix is made of them."""
    names = [check.name for check in checks()]
    assert len(set(names)) == len(names)
    assert all(check.text for check in checks())


def test_the_subjects_are_found_by_their_files() -> None:
    """A provider joins the suite by one file."""
    assert {"local", "portable-python", "portable-busybox"} <= set(subjects())
