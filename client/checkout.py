"""Writing a snapshot's workspace into a directory of this machine: verified, all of it or nothing."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from activities.store.blobs import BlobStore
from activities.workspace.restore import remove, restore_tree
from activities.workspace.tree import Directory, walk
from contracts.base import BadInput

_PART = ".caisson-checkout-"


async def check_out(blobs: BlobStore, root: Directory, directory: Path) -> int:
    """Write a whole tree into `directory`, which is made if it is not there, and return how many files it has.

    The tree is written into a directory inside first and moved up when every byte of it is there and checked; on any fault, and
    on Ctrl-C, what was made is removed. The mode, time and owner of `directory` itself are this user's business, not the tree's.
    Raises BadInput when something is in `directory`, StoreError, OSError.
    """
    _check_empty(directory)
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    part = directory / f"{_PART}{secrets.token_hex(8)}"
    _keep_own_attributes_only(root)
    try:
        _make(directory)
        files = await restore_tree(blobs, root, part)
        # In one go, without an await: Ctrl-C comes before or after it.
        _move_up(part, directory)
    except BaseException:
        for path in made:
            # One that someone else has put something into meanwhile is theirs.
            with contextlib.suppress(OSError):
                path.rmdir()
        raise
    return files


def _make(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)


def _check_empty(directory: Path, own: str = "") -> None:
    if directory.is_symlink() and not directory.exists():
        raise BadInput(f"{directory}: is a link that leads nowhere; name a new or an empty directory")
    if directory.exists() and not directory.is_dir():
        raise BadInput(f"{directory}: is a file; name a new or an empty directory")
    found = next((path.name for path in directory.iterdir() if path.name != own), None) if directory.is_dir() else None
    if found is not None:
        raise BadInput(f"{directory}: is not empty (it has {found!r}); nothing was written; name a new or an empty directory")


def _keep_own_attributes_only(root: Directory) -> None:
    # Of extended attributes only those of users say nothing to the kernel; root could set capabilities with the others.
    for node in (root, *(node for _, node in walk(root))):
        node.xattrs = tuple(pair for pair in node.xattrs if pair[0].startswith(b"user."))


def _move_up(part: Path, directory: Path) -> None:
    moved: list[Path] = []
    part.chmod(0o700)
    try:
        _check_empty(directory, part.name)
        for path in list(part.iterdir()):
            target = directory / path.name
            mode = path.lstat().st_mode
            is_closed = path.is_dir() and not path.is_symlink() and not mode & 0o200
            if is_closed:
                # A directory that is closed for writing cannot be given another parent.
                path.chmod(0o700)
            moved.append(path.rename(target))
            if is_closed:
                target.chmod(mode & 0o777)
        remove(part)
    except BaseException:
        for target in moved:
            _remove_any(target)
        remove(part)
        raise


def _remove_any(target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        remove(target)
    else:
        target.unlink(missing_ok=True)
