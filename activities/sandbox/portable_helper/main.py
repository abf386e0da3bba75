"""Where the helper begins: `python3 -I -S main.py REQUEST`. Runs inside the sandbox only: Python 3.6, standard library."""

import contextlib
import json
import os
import sys
import time

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))

from activities.sandbox.portable_helper import files, jobs, reads
from activities.sandbox.portable_helper.wire import Denied, Refused, answer, raw

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Dict, List, Tuple

    from activities.sandbox.portable_helper.wire import Request, Words

OPERATIONS: "Dict[str, Callable[[bytes, Request], Tuple[Words, List[bytes]]]]" = {
    "exec": jobs.run,
    "await": jobs.await_end,
    "poll": reads.poll,
    "tell": jobs.tell,
    "progress": jobs.progress,
    "kill": jobs.kill,
    "read": files.read,
    "look": files.look,
    "change": files.change,
    "walk": files.walk,
}


def clean(state: bytes) -> None:
    """Remove what callers that were killed have left between a file and its use."""
    for folder in (os.path.join(state, b"in"), os.path.join(state, b"out")):
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                if time.time() - os.lstat(path).st_mtime > 600:
                    os.unlink(path)


def main(request: str) -> None:
    """Do what one request asks; `@PATH` names a file that holds it."""
    if request.startswith("@"):
        with open(request[1:]) as file:
            text = file.read()
        os.unlink(request[1:])
    else:
        text = request
    given: "Request" = json.loads(text)
    os.umask(0o022)
    state = raw(given["state"])
    clean(state)
    try:
        words, body = OPERATIONS[given["op"]](state, given)
    except Refused as error:
        words, body = {"fault": "file", "text": str(error)}, []
    except Denied as error:
        words, body = {"fault": "session", "text": str(error)}, []
    except OSError as error:
        words, body = {"fault": "system", "text": error.strerror or str(error)}, []
    answer(state, given["id"], words, body)


if __name__ == "__main__":
    main(sys.argv[1])
