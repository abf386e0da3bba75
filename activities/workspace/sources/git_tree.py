"""What a hostile repository may hold, and what of it is refused: names, links, and the URLs of submodules. Pure."""

from __future__ import annotations

import posixpath
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from activities.workspace.sources.git_access import Remote
from contracts.base import BadInput

MOST_NAME, MOST_PATH = 255, 4095
"""Of Linux, in bytes."""
_MOST_HOPS = 40
"""As many links one after the other as Linux follows."""
_HFS_IGNORES = re.compile("[\u200c-\u200f\u202a-\u202e\u206a-\u206f\ufeff]")
"""Characters that macOS leaves out of names, so that `.g\u200cit` is `.git` there (git's utf8.c, next_hfs_char)."""
_GIT_NAMES = re.compile(r"(?:\.git|git~1)[. ]*(?::.*)?", re.IGNORECASE | re.DOTALL)
"""What Windows takes for `.git` (git's path.c, is_ntfs_dotgit): its short name, final dots and spaces, and streams."""
_SCP = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?([A-Za-z0-9][A-Za-z0-9.-]*):(?![/:])(.+)")
_REF_REFUSED = re.compile(r"[\x00-\x20~^:?*\[\\\x7f]|\.\.|@\{|//|^[-/.]|/[-.]|/$|\.$|\.lock(?:/|$)|^@$")
"""Of git-check-ref-format(1), and parts that begin with `-`."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of `ls-tree -l`. `size` is 0 for what is no file."""

    mode: int
    kind: str
    name: str
    size: int
    path: bytes

    @property
    def is_link(self) -> bool:
        """Whether it is a symbolic link."""
        return self.kind == "blob" and self.mode & 0o170000 == 0o120000

    @property
    def is_executable(self) -> bool:
        """Whether its owner may run it."""
        return bool(self.mode & 0o100)


def parse_row(line: bytes) -> Row:
    """Take a line of `ls-tree -z -l` apart."""
    head, _, path = line.partition(b"\t")
    mode, kind, name, size = head.split()
    return Row(int(mode, 8), kind.decode(), name.decode(), int(size) if size.isdigit() else 0, path)


def ref_fault(ref: str) -> str | None:
    """Say why a text names no branch or tag, or return None."""
    if ref.startswith("-"):
        return "a ref that begins with - could be taken for an option"
    return "this is no name of a branch or tag, and no commit" if _REF_REFUSED.search(ref) else None


def name_fault(name: bytes) -> str | None:
    """Say why a file of this name is not put anywhere, or return None."""
    if name in (b"", b".", b".."):
        return "a name of '', '.' or '..'"
    if b"/" in name or b"\0" in name:
        return "a name with / or NUL in it"
    if len(name) > MOST_NAME:
        return f"a name of more than {MOST_NAME} bytes"
    text = _HFS_IGNORES.sub("", name.decode(errors="surrogateescape"))
    if any(_GIT_NAMES.fullmatch(part) for part in text.split("\\")):
        return "a name that is .git, or is taken for it by some systems"
    return None


def judge_row(row: Row, path: bytes, seen: dict[bytes, bool]) -> None:
    """Refuse what no file system should be given. `seen` has the paths before it, and whether they are directories.

    Raises BadInput naming `path`, where it would lie in the entry.
    """
    folder, _, name = row.path.rpartition(b"/")
    fault = name_fault(name)
    if fault is None and len(path) > MOST_PATH:
        fault = f"a path of more than {MOST_PATH} bytes"
    # Directories are listed before what they hold: with another one before it, the / is a part of its name.
    if fault is None and not seen.get(folder, False):
        fault = "a name with / in it"
    if fault is None and row.path in seen:
        fault = "a name that is there twice"
    if fault is not None:
        raise BadInput(f"{shown(path)} is refused: it has {fault}; remove it from the repository, or name a subpath without it")
    seen[row.path] = row.kind == "tree"


def link_fault(path: bytes, links: Mapping[bytes, bytes]) -> str | None:
    """Say where a link among `links` leads out of the tree, following it as the system would, or return None.

    Other links on the way count: with `d -> .`, `d/../..` is one level higher than it reads.
    """
    here = path.split(b"/")[:-1]
    todo = deque([links[path]])
    hops = 0
    while todo:
        text = todo.popleft()
        if text.startswith(b"/"):
            return "is absolute"
        first, _, rest = text.partition(b"/")
        if rest:
            todo.appendleft(rest.lstrip(b"/"))
        if first == b"..":
            if not here:
                return "leads out of the entry's files"
            here.pop()
        elif first not in (b"", b"."):
            here.append(first)
            target = links.get(b"/".join(here))
            if target is not None:
                hops += 1
                if hops > _MOST_HOPS:
                    return None
                here.pop()
                todo.appendleft(target)
    return None


@dataclass(frozen=True, slots=True)
class Module:
    """A section of .gitmodules."""

    path: bytes
    url: str


def parse_modules(listed: bytes) -> dict[bytes, Module]:
    """Read `git config -z --get-regexp` of .gitmodules into submodules by path. Raises BadInput for a hostile name or path."""
    sections: dict[bytes, dict[bytes, bytes]] = {}
    for item in listed.split(b"\0"):
        key, _, value = item.partition(b"\n")
        section, _, variable = key.rpartition(b".")
        if not section:
            continue
        if sections.setdefault(section, {}).setdefault(variable, value) != value:
            raise BadInput(f".gitmodules: {_said(section)} has two values of {_said(variable)}")
    modules: dict[bytes, Module] = {}
    for section, values in sections.items():
        name, path = section.removeprefix(b"submodule."), values.get(b"path", b"")
        if b".." in name.split(b"/") or name.startswith(b"-"):
            raise BadInput(f".gitmodules: the submodule name {_said(name)} is refused: it could be taken for a path or an option")
        if b"path" not in values:
            continue
        if path.startswith(b"-") or any(name_fault(part) for part in path.rstrip(b"/").split(b"/")):
            raise BadInput(
                f".gitmodules: the path {_said(path)} of {_said(name)} is refused: it is no plain path inside the repository"
            )
        if path in modules:
            raise BadInput(f".gitmodules: two submodules have the path {_said(path)}")
        modules[path.rstrip(b"/")] = Module(path, values.get(b"url", b"").decode(errors="surrogateescape"))
    return modules


def module_remote(parent: Remote, module: Module) -> Remote:
    """Return where a submodule is: always on its parent's server, reached as the parent is. Only the path is the submodule's own.

    Raises BadInput for everything else, since the credential and the network's rules were given for that server.
    """
    url, where = module.url, f"the submodule {_said(module.path)}"
    if (
        not url
        or url.startswith("-")
        or not url.isprintable()
        or " " in url
        or "\\" in url
        or "::" in url
        or "?" in url
        or "#" in url
    ):
        raise BadInput(f"{where}: its URL {_cut(url)} is refused; leave it out with `submodules: false`")
    if url.startswith(("./", "../")):
        path = _relative(parent.path, url)
        if path is None:
            raise BadInput(f"{where}: its URL {_cut(url)} leads out of the server; leave it out with `submodules: false`")
        return parent.at(path)
    scp = _SCP.fullmatch(url)
    if scp is not None:
        host, path = scp[1], "/" + scp[2]
    else:
        try:
            parts = urlsplit(url)
            host, path, port = parts.hostname or "", parts.path, parts.port
        except ValueError:
            host = path = ""
            port = None
            parts = urlsplit("")
        if parts.scheme not in ("https", "http", "ssh") or not host:
            raise BadInput(f"{where}: its URL {_cut(url)} is refused: only https, ssh and relative ones are followed")
        if parts.password or (parts.username and parts.scheme != "ssh"):
            raise BadInput(f"{where}: its URL holds a credential, which is refused")
        if (
            parts.scheme == parent.scheme
            and parts.netloc.rpartition("@")[2].lower() != parent.server.rpartition("/")[2].rpartition("@")[2]
        ):
            default = {"https": 443, "http": 80, "ssh": 22}[parts.scheme]
            if host.lower() == parent.host and (port or default) != parent.port:
                raise BadInput(f"{where}: its URL {_cut(url)} is another port of {parent.host}; give it an entry of its own")
    if host.lower().removesuffix(".") != parent.host:
        raise BadInput(f"{where}: its URL {_cut(url)} is on another host than {parent.host}; give it an entry of its own")
    if ".." in unquote(path).split("/") or not path.strip("/") or path.startswith(("/-", "//")):
        raise BadInput(f"{where}: its URL {_cut(url)} is refused: its path is not plain")
    return parent.at(path)


def _relative(base: str, url: str) -> str | None:
    """Resolve as git-submodule(1) does: `..` takes away a part of the parent's path."""
    parts = base.strip("/").split("/")
    for part in url.strip("/").split("/"):
        if unquote(part) == "..":
            if not parts:
                return None
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    path = "/" + posixpath.join(*parts) if parts else ""
    return path if path and not path.startswith("/-") else None


def _said(name: bytes) -> str:
    return _cut(name.decode(errors="backslashreplace"))


def _cut(text: str) -> str:
    return ascii(text[:200])


def shown(path: bytes) -> str:
    """Return a path as messages have it: quoted, and not too long."""
    text = path.decode(errors="backslashreplace")
    return repr(text if len(text) <= 300 else text[:300] + "...")


def join(folder: bytes, name: bytes) -> bytes:
    """Join two relative paths, either of which may be empty."""
    return folder + b"/" + name if folder and name else folder or name
