"""Secrets: one file each, in a directory that the operator mounts for the tools worker alone.

Values are given to those who connect with them and to nobody else: no message here quotes one, and the parsers' own errors, which
do, are not passed on.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection
from pathlib import Path

import structlog
import yaml

from contracts.base import BadInput

MOST_BYTES = 64 << 10
_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
_log = structlog.stdlib.get_logger("caisson.secrets")


class Secrets:
    """Reads secrets. Each is read anew when it is needed, so that one that was changed is used at once."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def text(self, name: str) -> str:
        """Return a secret without the white space around it. Raises BadInput naming the secret, what is wrong and the remedy."""
        try:
            text = self._read(name).decode()
        except UnicodeDecodeError:
            raise BadInput(f"secret {name!r}: its file is not UTF-8 text; write it anew") from None
        if not text.strip():
            raise BadInput(f"secret {name!r}: its file is empty; write the secret into it")
        return text.strip()

    def fields(self, name: str, known: Collection[str]) -> dict[str, object]:
        """Return a secret that is a mapping, in JSON or YAML, with `known` fields only. Raises BadInput as `text` does."""
        there_are = ", ".join(sorted(known))
        try:
            value = yaml.safe_load(self.text(name))
        except yaml.YAMLError:
            # The error quotes the line.
            raise BadInput(f"secret {name!r}: neither JSON nor YAML; write a mapping with fields of {there_are}") from None
        if not isinstance(value, dict):
            raise BadInput(f"secret {name!r}: is no mapping; write one with fields of {there_are}")
        unknown = len(value.keys() - set(known))
        if unknown:
            # Not by their names: a value may stand where a name should.
            raise BadInput(f"secret {name!r}: {unknown} of its fields are not known; there are: {there_are}")
        return value

    def _read(self, name: str) -> bytes:
        if not _NAME.fullmatch(name):
            raise BadInput(f"secret {name!r}: not a secret's name; use small letters, digits and ._- between them")
        if self._directory is None:
            raise BadInput(
                f"secret {name!r}: the tools worker has no secrets; set its CAISSON_SECRETS to a directory with a file {name}"
            )
        top = os.path.realpath(self._directory)
        # Kubernetes mounts each secret as a link to a file in a directory beside it, so links are followed, but not out.
        path = os.path.realpath(os.path.join(top, name))  # noqa: PTH118 - a link is to be resolved as text
        if os.path.commonpath([top, path]) != top:
            raise BadInput(f"secret {name!r}: its file is a link that leaves CAISSON_SECRETS; put the file itself there")
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise BadInput(
                f"secret {name!r}: there is no such file in the tools worker's CAISSON_SECRETS; add it, or correct the name"
            ) from None
        except OSError as error:
            raise BadInput(f"secret {name!r}: its file cannot be read ({error.strerror}); let the tools worker read it") from None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
                raise BadInput(f"secret {name!r}: not a regular file of at most {MOST_BYTES} bytes; replace it by one")
            if status.st_mode & 0o004:
                _log.warning("secret_is_world_readable", secret=name, remedy="chmod o-r, or mount it with mode 0440")
            return os.read(fd, MOST_BYTES)
        finally:
            os.close(fd)
