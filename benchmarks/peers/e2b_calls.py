"""Run by the peers' Python: openai-agents' E2B sandboxes, where E2B_API_URL and E2B_SANDBOX_URL say. See `session_calls`.

The workspace is in the user's home, since the emulator makes directories as the user, who cannot make /workspace. As many calls.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from session_calls import Session  # type: ignore[import-not-found]


async def main(archive: Path) -> None:
    """Serve with sandboxes of the template `base`."""
    from agents.extensions.sandbox.e2b import E2BSandboxClient, E2BSandboxClientOptions  # type: ignore[import-not-found]
    from agents.sandbox.manifest import Manifest  # type: ignore[import-not-found]

    options = E2BSandboxClientOptions(sandbox_type="e2b", template="base", allow_internet_access=False)
    await Session(E2BSandboxClient(), options, Manifest(root="/home/user/workspace"), archive).serve()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
