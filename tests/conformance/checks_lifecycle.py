"""How sandboxes are made, found and ended."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from activities.sandbox.port import BadSandboxSpec, ImagingProvider, PausingProvider, SandboxGone
from contracts.sandbox import RUN_LABEL
from tests.conformance.box import Box, elsewhere, labels_of, own, shared
from tests.conformance.subjects import ENVIRONMENT, Subject


async def check_one_key_is_one_sandbox(subject: Subject) -> None:
    """The same key gives the same living sandbox, also to callers that race; another key gives another one."""
    key = subject.key()
    first, again = await asyncio.gather(subject.create(key=key), subject.create(key=key))
    try:
        assert (first.id, first.nonce) == (again.id, again.nonce)
        third = await subject.create(key=key)
        assert (third.id, third.nonce) == (first.id, first.nonce)
        async with own(subject) as other:
            assert other.ref.id != first.id
            await other.sandbox.write("mark", b"")
            view = await (await subject.provider.attach(first)).look(["mark"], 0)
            assert view["mark"].kind == "missing"
    finally:
        await subject.provider.kill(first)


async def check_a_new_sandbox_is_empty(subject: Subject) -> None:
    """Its workspace holds nothing but the home directory, and commands start in it with the environment it was made with."""
    async with own(subject) as box:
        listed = {path for path, _ in await box.sandbox.walk("")}
        assert {path for path in listed if not path.startswith(".home")} == {box.name, f"{box.name}/.keep"}
        assert (await box.sh("pwd", cwd="/workspace")).stdout == b"/workspace\n"
        printed = await box.text('printf "%s|" "$HOME" "$TMPDIR" "$PROJECT" "$QUOTED" "${USER:+user}" "${LANG:+lang}"')
        assert printed == f"/workspace/.home|/tmp|{ENVIRONMENT['PROJECT']}|{ENVIRONMENT['QUOTED']}|user|lang|"
        assert "/workspace/.home/.local/bin" in (await box.text("echo $PATH")).split(":")
        assert (await box.text("echo x > /tmp/t && echo y > $HOME/h && cat /tmp/t $HOME/h")) == "x\ny\n"


async def check_another_worker_reaches_it(subject: Subject) -> None:
    """A worker that knows nothing but the handle reaches the same sandbox."""
    box = await shared(subject)
    await box.sandbox.write(box.at("note"), b"from one")
    assert await (await elsewhere(box)).content(box.at("note")) == b"from one"


async def check_a_wrong_nonce_is_gone(subject: Subject) -> None:
    """A handle whose nonce is not the sandbox's means another sandbox, which is gone; killing it ends nothing."""
    box = await shared(subject)
    wrong = box.ref.model_copy(update={"nonce": "0" * len(box.ref.nonce)})
    with pytest.raises(SandboxGone):
        await (await subject.provider.attach(wrong)).look(["."], 0)
    await subject.provider.kill(wrong)
    assert (await box.sh("echo alive")).stdout == b"alive\n"


async def check_kill_ends_all_of_it(subject: Subject) -> None:
    """After a kill it is gone for every worker, and killing again is no error; its key then gives a new, empty sandbox."""
    key = subject.key()
    first = await subject.create(key=key)
    await (await subject.provider.attach(first)).write("mark", b"")
    await subject.provider.kill(first)
    await subject.provider.kill(first)
    for provider in (subject.provider, await subject.other()):
        with pytest.raises(SandboxGone):
            await (await provider.attach(first)).look(["."], 0)
    second = await subject.create(key=key)
    try:
        assert second.nonce != first.nonce
        view = await (await subject.provider.attach(second)).look(["mark"], 0)
        assert view["mark"].kind == "missing"
        with pytest.raises(SandboxGone):
            await (await subject.provider.attach(first)).look(["."], 0)
        await subject.provider.kill(first)  # names the old one, so the new one stays
        await (await subject.provider.attach(second)).look(["."], 0)
    finally:
        await subject.provider.kill(second)


async def check_orphans_are_found(subject: Subject) -> str | None:
    """What a crashed worker left is found by its labels, by any worker, and can be ended."""
    left = await subject.create(labels={"suite": "conformance", RUN_LABEL: "run-of-a-dead-worker"})
    try:
        provider = await subject.other()
        if not subject.capabilities.listing:
            assert list(await provider.list({"suite": "conformance"})) == []
            return "the provider cannot list"
        assert labels_of(await provider.list({RUN_LABEL: "run-of-a-dead-worker"})) == {left.id}
        assert left.id in labels_of(await provider.list({"suite": "conformance"}))
        assert await provider.list({RUN_LABEL: "nobody", "suite": "conformance"}) == []
        (found,) = await provider.list({RUN_LABEL: "run-of-a-dead-worker"})
        assert (found.id, found.nonce) == (left.id, left.nonce)
        await provider.kill(found)
        assert await provider.list({RUN_LABEL: "run-of-a-dead-worker"}) == []
        return None
    finally:
        await subject.provider.kill(left)


async def check_its_life_can_be_extended(subject: Subject) -> None:
    """A sandbox is kept alive by whoever holds it, or has no end to be kept from."""
    box: Box = await shared(subject)
    await box.sandbox.extend(120)
    assert (await box.sh("echo on")).stdout == b"on\n"


async def check_a_paused_sandbox_goes_on(subject: Subject) -> str | None:
    """It is found while it is paused, and goes on with its files and processes; its lifetime begins anew."""
    if not subject.capabilities.pause:
        return "the provider cannot pause: a sandbox that is put away is ended, and comes back from the store"
    async with own(subject) as box:
        await box.sh("echo kept >kept; (sleep 618.5 >/dev/null 2>&1 &)")
        provider = cast("PausingProvider", await subject.other())
        await provider.pause(box.ref)
        assert box.ref.id in labels_of(await provider.list({"suite": "conformance"}))
        ref = await provider.resume(box.ref)
        assert (ref.id, ref.nonce, ref.queue) == (box.ref.id, box.ref.nonce, box.ref.queue)
        assert ref.expires_at is None or box.ref.expires_at is None or ref.expires_at >= box.ref.expires_at
        assert await box.text("cat kept") == "kept\n"
        assert await box.alive("618.5")
    return None


async def check_an_image_brings_the_files_back(subject: Subject) -> str | None:
    """A sandbox made of another's image has that one's files, and its own nonce; an image can be removed, and again."""
    if not subject.capabilities.native_snapshot:
        return "the provider makes no images: a new sandbox gets its files from the store"
    provider = cast("ImagingProvider", subject.provider)
    async with own(subject) as box:
        await box.sh("echo kept >kept; ln -s kept link; mkdir -m 700 shut")
        image = await provider.make_image(box.ref)
    try:
        async with own(subject, subject.spec.model_copy(update={"image": image})) as other:
            assert other.ref.nonce != box.ref.nonce
            other.name = box.name
            assert await other.text("cat kept; readlink link; stat -c %a shut") == "kept\nkept\n700\n"
    finally:
        await provider.remove_image(image)
        await provider.remove_image(image)
    return None


async def check_a_variable_that_cannot_be_is_refused(subject: Subject) -> None:
    """The environment is set as it is given, or the sandbox is not made."""
    for environment in ({"A=B": "x"}, {"A": "x\0y"}, {"": "x"}):
        with pytest.raises(BadSandboxSpec, match="environment"):
            await subject.provider.create(
                subject.spec, subject.key(), environment=environment, labels={"suite": "conformance"}, queue="q"
            )
