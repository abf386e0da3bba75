"""Run by the peers' Python: openai-agents' Docker sandboxes, of the image SANDBOX_IMAGE at DOCKER_HOST. See `session_calls`."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from session_calls import Session  # type: ignore[import-not-found]


async def main(archive: Path) -> None:
    """Serve with containers that have no network."""
    import docker  # type: ignore[import-untyped]
    from agents.sandbox.manifest import Manifest  # type: ignore[import-not-found]
    from agents.sandbox.sandboxes.docker import (  # type: ignore[import-not-found]
        DockerSandboxClient,
        DockerSandboxClientOptions,
    )

    options = DockerSandboxClientOptions(image=os.environ["SANDBOX_IMAGE"], network_mode="none")
    client = docker.from_env(timeout=120)
    try:
        await Session(DockerSandboxClient(client), options, Manifest(root="/workspace"), archive).serve()
    finally:
        client.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
