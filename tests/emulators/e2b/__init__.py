"""An emulator of E2B for tests, not E2B: its control API and what runs in its sandboxes (envd), as the SDK 2.63 speaks to them.

It was written from the SDK's own source, E2B's documentation and its public `infra` repository, and never compared with the live
service. Each sandbox is a real one of bubblewrap (`backing.py`; it takes root), without any network, whatever was asked for. A
paused one is stopped processes. Snapshots, forks, volumes, secrets, watching files and building templates are not there (501).

    python -m tests.emulators.e2b            # prints E2B_API_URL and E2B_SANDBOX_URL

Faults are made over HTTP at `/_emulator/`, see `faults.py`.
"""

from tests.emulators.e2b.server import Emulator

__all__ = ["Emulator"]
