"""What the scripts of `provider_calls` share: openai-agents' sandbox session does what is asked for on standard input.

A line of JSON in, with what to `do` or `run` and the sizes; a line out, with the `fault` or null. Imports nothing of Caisson.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import tarfile
from pathlib import Path
from typing import Any


class Session:
    """A client, and the session that it was asked to make."""

    def __init__(self, client: Any, options: Any, manifest: Any, archive: Path) -> None:
        self._client, self._options, self._manifest, self._archive = client, options, manifest, archive
        self._session: Any = None

    async def serve(self) -> None:
        """Answer until standard input ends, and end what was made."""
        try:
            while line := await asyncio.to_thread(sys.stdin.readline):
                fault = None
                try:
                    await self._answer(json.loads(line))
                except Exception as error:  # noqa: BLE001 - whatever a peer raises is told
                    causes = [error, error.__cause__, getattr(error, "context", None)]
                    fault = " / ".join(repr(cause) for cause in causes if cause)[:600]
                print(json.dumps({"fault": fault}), flush=True)
        finally:
            if self._session is not None:
                await self._end(self._session)

    async def _answer(self, asked: dict[str, Any]) -> None:
        if "run" in asked:
            await self._sh(asked["run"])
            return
        match asked["do"]:
            case "warm_up":
                session = await self._make()
                await session.exec("true", shell=False)
                await self._end(session)
            case "create":
                self._session = await self._make()
            case "attach" | "attach_again":
                # As a process would that knows the session by its state alone.
                state = self._client.deserialize_session_state(self._client.serialize_session_state(self._session.state))
                self._session = await self._client.resume(state)
                await self._session.start()
            case "true":
                _check((await self._session.exec("true", shell=False)).exit_code, 0)
            case "output_1mb":
                _check(len((await self._sh(asked["output"])).stdout), asked["output_bytes"])
            case "read_1mb":
                _check(len((await self._session.read(Path("big"))).read()), asked["read_bytes"])
            case "write_1kb":
                await self._session.write(Path("small"), io.BytesIO(os.urandom(asked["write_bytes"])))
            case "put_in":
                with self._archive.open("rb") as archive:
                    await self._session.hydrate_workspace(archive)
            case "first" | "unchanged" | "one_changed":
                _check(_files(await self._session.persist_workspace()), asked["files"])
            case "close":
                session, self._session = self._session, None
                await self._end(session)

    async def _make(self) -> Any:
        session = await self._client.create(manifest=self._manifest, options=self._options)
        await session.start()
        return session

    async def _end(self, session: Any) -> None:
        await session.shutdown()
        await self._client.delete(session)

    async def _sh(self, script: str) -> Any:
        result = await self._session.exec("sh", "-c", script, shell=False)
        if result.exit_code != 0:
            raise RuntimeError(f"{script!r} ended with {result.exit_code}: {result.stderr[-300:]!r}")
        return result


def _files(archive: Any) -> int:
    """Read an archive to its end, as a snapshot's store does, and return how many files it has."""
    with archive:
        data = archive.read()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return sum(member.isfile() for member in tar)


def _check(found: int, wanted: int) -> None:
    if found != wanted:
        raise RuntimeError(f"{found} instead of {wanted}")
