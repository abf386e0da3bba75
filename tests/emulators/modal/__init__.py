"""An emulator of Modal for tests, not Modal: its control plane and its workers, as the SDK 1.6.4 speaks to them.

It was written from the SDK's own source and stubs (`modal_proto`) and Modal's documentation, and never compared with the live
service. Each sandbox is a real one of bubblewrap (`backing.py`) without any network, with this host's `/usr`, whatever image,
network and limits were asked for. It has the calls that build an image, make, find, list and end a sandbox (of Modal's second
backend, the SDK's choice), and run commands in it (the task command router); anything else is answered with UNIMPLEMENTED.
`sandbox.filesystem` needs a program of Modal's own inside of the sandbox, which is not here.

    python -m tests.emulators.modal            # prints MODAL_SERVER_URL and a token

Faults are made in the test's own process, see `faults.py`.
"""

from tests.emulators.modal.faults import Fault
from tests.emulators.modal.server import TOKEN_ID, TOKEN_SECRET, Emulator

__all__ = ["TOKEN_ID", "TOKEN_SECRET", "Emulator", "Fault"]
