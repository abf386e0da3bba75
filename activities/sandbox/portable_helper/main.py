"""Where the helper begins: `python3 -I -S main.py REQUEST`. Runs inside the sandbox only: Python 3.6, standard library."""

import contextlib
import json
import os
import sys
import time

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))

from activities.sandbox.portable_helper import files, jobs, reads
from activities.sandbox.portable_helper.wire import Denied, Refused, answer, is_full, keep_reserve, raw

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
OF_FILES = ("read", "look", "change", "walk")
OF_JOBS = ("exec", "await", "poll")
SMALL = 15000
"""Bytes of each stream in the answer of a job where the disk is too full for a longer one."""


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
    keep_reserve(state)
    words, body = done(state, given)
    try:
        answer(state, given["id"], words, body)
    except OSError as error:
        if not is_full(error):
            raise
        if given["op"] in OF_JOBS:
            words, body = done(state, dict(given, limit=min(given["limit"], SMALL)))
            words["note"] = ",".join(filter(None, [str(words.get("note", "")), "answer"]))
        else:
            words, body = {"fault": "file", "text": "%s: %s" % (given["state"], error.strerror)}, []
        answer(state, given["id"], words, body)


def done(state: bytes, given: "Request") -> "Tuple[Words, List[bytes]]":
    """Do what is asked and tell how it went. What nobody has thought of is no reason for a helper without a word."""
    try:
        return OPERATIONS[given["op"]](state, given)
    except Refused as error:
        return {"fault": "file", "text": str(error)}, []
    except Denied as error:
        return {"fault": "session", "text": str(error)}, []
    except OSError as error:
        return {"fault": "system", "text": error.strerror or str(error)}, []
    except Exception as error:  # noqa: BLE001 - told to the one who asked
        kind = "file" if given["op"] in OF_FILES else "system"
        return {"fault": kind, "text": "%s: %s: %s" % (given["op"], type(error).__name__, error)}, []


if __name__ == "__main__":
    main(sys.argv[1])
