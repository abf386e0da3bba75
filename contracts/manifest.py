"""The manifest: what a fresh workspace contains and where its outputs are."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator, Field, ValidatorFunctionWrapHandler, field_validator, model_validator

from contracts.base import CREDENTIAL_NAME, NOT_BOOLEAN, Contract
from contracts.blob import BlobRef

_CREDENTIAL = re.compile(
    r"(?i)(^sk-[a-z0-9_-]{16,}|^gh[pousr]_[A-Za-z0-9]{20,}|^AKIA[0-9A-Z]{16}$|-----BEGIN [A-Z ]*PRIVATE KEY)"
)
_ENVIRONMENT_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
MAX_PATH = 4000
MAX_ENVIRONMENT_VALUE = 100 * 1024
"""Bytes of one variable: Linux starts no program with one of more than 128 KB."""


def check_workspace_path(path: str) -> str:
    """Return a workspace path in its normal form; refuse one that is absolute, empty, or could leave the workspace.

    Raises ValueError, which pydantic turns into an error naming the field.
    """
    if not path or path != path.strip():
        raise ValueError("a workspace path is not empty and has no white space around it")
    if path.startswith("/") or "\\" in path or "\0" in path:
        raise ValueError("a workspace path is relative, with / between its parts, for example inputs/notes.md")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or ".." in parts:
        raise ValueError("a workspace path stays inside the workspace: no '..', and not the workspace itself")
    if len(path.encode()) > MAX_PATH or any(len(part.encode()) > 255 for part in parts):
        raise ValueError(f"a workspace path is at most {MAX_PATH} bytes, and each part of it at most 255")
    return "/".join(parts)


def _no_nul(path: str) -> str:
    if "\0" in path:
        raise ValueError("a path holds no NUL character")
    return path


def _not_blank(command: str) -> str:
    if not command.strip():
        raise ValueError("a command is not blank; write it, or leave the line out")
    return command


def check_url(url: str) -> str:
    """Refuse a URL that holds a credential, or something that could be taken for an option or another scheme."""
    parts = urlsplit(url)
    if url != url.strip() or any(ord(character) < 33 for character in url):
        raise ValueError("no white space and no control characters")
    if parts.scheme not in ("https", "http", "ssh") or not parts.hostname or parts.hostname.startswith("-"):
        raise ValueError("give a URL such as https://host/path or ssh://git@host/path")
    if parts.password or (parts.scheme != "ssh" and parts.username):
        raise ValueError("a URL holds no credential: put it into a secret, and name that in `secret`")
    if _CREDENTIAL.search(url) or any(CREDENTIAL_NAME.search(name) for name, _ in parse_qsl(parts.query)):
        raise ValueError("it looks as if it held a credential; put that into a secret, and name it in `secret`")
    return url


WorkspacePath = Annotated[str, AfterValidator(check_workspace_path)]
FileMode = Annotated[str, Field(pattern=r"^0?[0-7]{3}$", description="in octal, such as '0755'")]
GitUrl = Annotated[str, Field(max_length=2000), AfterValidator(check_url)]
EndpointUrl = Annotated[str, Field(max_length=2000, pattern=r"^https?://"), AfterValidator(check_url)]
BucketName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{1,254}$")]
SetupCommand = Annotated[str, Field(min_length=1, max_length=16_384), AfterValidator(_no_nul), AfterValidator(_not_blank)]
Count = Annotated[int, Field(gt=0), NOT_BOOLEAN]
SecretName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")]
"""The name of a secret. Its value is known to the tools worker alone."""
Glob = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_no_nul)]
"""A pattern of paths below an entry's source, as .gitignore has them: `*.pdf`, `2026/`, `/top/*.csv`, `**/notes/*.md`."""
MAX_GLOBS = 100


class EntryOptions(Contract):
    """What every entry may say."""

    read_only: bool = False
    mode: FileMode | None = Field(default=None, description="of every file; null: 0644, and 0755 for what is executable")
    description: str = Field(default="", max_length=1000, description="told to the model beside the entry's path")


class SelectedEntry(EntryOptions):
    """An entry that may bring many files."""

    include: tuple[Glob, ...] = Field(
        default=(), max_length=MAX_GLOBS, description="only files that one of these fits; none: all"
    )
    exclude: tuple[Glob, ...] = Field(default=(), max_length=MAX_GLOBS, description="no files that one of these fits")
    max_bytes: Count | None = Field(default=None, description="of this entry, within the manifest's limits")
    max_files: Count | None = Field(default=None, description="of this entry, within the manifest's limits")


class InlineEntry(EntryOptions):
    """A file whose text stands in the manifest itself."""

    type: Literal["inline"]
    text: str


class LocalEntry(SelectedEntry):
    """A file or directory of the harness's host, under one of the roots that the worker allows."""

    type: Literal["local"]
    path: Annotated[str, Field(min_length=1), AfterValidator(_no_nul)] = Field(
        description="relative to an allowed root, or absolute inside one"
    )


class GitEntry(SelectedEntry):
    """The files of one commit of a git repository. The repository itself, and the credential, stay with the harness."""

    type: Literal["git"]
    url: GitUrl
    ref: str = Field(default="HEAD", min_length=1, max_length=250, description="a branch, a tag, or a commit in full")
    subpath: WorkspacePath | None = Field(default=None, description="only this directory or file of it")
    submodules: bool = Field(default=False, description="also the files of its submodules, from the same host only")
    secret: SecretName | None = Field(default=None, description="a token (https) or a private key (ssh)")


class BucketPlace(Contract):
    """A place in an object store."""

    bucket: BucketName
    prefix: str = Field(default="", max_length=1024, description="a hard boundary: nothing outside it is read or written")
    secret: SecretName | None = Field(default=None, description="null: what the tools worker's own surroundings give it")
    endpoint: EndpointUrl | None = Field(default=None, description="of a service that is not the provider's own")
    region: str | None = Field(default=None, pattern=r"^[a-z0-9-]{1,64}$")
    account: str | None = Field(default=None, pattern=r"^[a-zA-Z0-9-]{1,64}$", description="of Azure or R2")
    allow_whole_bucket: bool = Field(default=False, description="consent to an empty prefix")

    @model_validator(mode="after")
    def _prefix_is_a_boundary(self) -> Self:
        if not self.prefix and not self.allow_whole_bucket:
            raise ValueError("prefix: empty, which is the whole bucket; name a prefix, or say allow_whole_bucket: true")
        if self.prefix.startswith("/") or any(part in ("..", ".") for part in self.prefix.split("/")) or "\0" in self.prefix:
            raise ValueError("prefix: no / at its beginning, and no '.' or '..' in it; it is compared with keys letter by letter")
        return self


class BucketEntry(BucketPlace, SelectedEntry):
    """The objects of a bucket whose keys start with a prefix, each under the rest of its key.

    A prefix that does not end in `/` is taken as a directory, or as the one object of that key: `claims/2026` never brings
    `claims/2026-old/x`.
    """

    type: Literal["s3", "r2", "gcs", "azure"]
    mode: Literal["copy", "lazy", "presigned"] | FileMode | None = Field(
        default="copy",
        description="lazy: names only, the content with the tool `fetch_file`; presigned: a short-lived URL of the one object in "
        "`<path>.url`; or the mode of every file",
    )
    presigned_seconds: int = Field(default=3600, ge=60, le=12 * 3600)


class SnapshotEntry(SelectedEntry):
    """Files of another run's workspace, as they were after one of its steps."""

    type: Literal["snapshot"]
    run_id: str = Field(min_length=1, max_length=1000)
    step: int | None = Field(default=None, ge=0, description="null: the last one that there is")
    path: WorkspacePath | None = Field(default=None, description="only this directory or file of it")


ManifestEntry = Annotated[InlineEntry | LocalEntry | GitEntry | BucketEntry | SnapshotEntry, Field(discriminator="type")]


class BucketTarget(BucketPlace):
    """Where outputs go. `{run_id}` in the prefix stands for the run's id, in which what is no letter, digit or ._- becomes _."""

    type: Literal["s3", "r2", "gcs", "azure"]
    overwrite: bool = Field(default=False, description="replace objects that are there already, whoever made them")


class OutputSpec(Contract):
    """A file or directory of the workspace whose content becomes the run's artifacts."""

    path: WorkspacePath
    to: BucketTarget | None = Field(default=None, description="also put them there")


class ManifestLimits(Contract):
    """Bounds on what is put into the workspace."""

    max_bytes: Count = 2 * 1024**3
    max_files: Count = 100_000
    setup_seconds: float = Field(default=600, gt=0, le=24 * 3600, description="for each command of `setup`")


class Manifest(Contract):
    """What a fresh workspace contains, by workspace path, and which paths are outputs."""

    entries: dict[WorkspacePath, ManifestEntry] = Field(default_factory=dict)
    outputs: tuple[OutputSpec, ...] = (OutputSpec(path="outputs"),)
    environment: dict[str, str] = Field(default_factory=dict, description="plain values; never a credential")
    setup: tuple[SetupCommand, ...] = Field(
        default=(), max_length=20, description="commands run in the workspace, in order, before the model is asked for anything"
    )
    limits: ManifestLimits = ManifestLimits()
    pins: BlobRef | None = Field(
        default=None, description="the `inputs` of an earlier run's result: every source must give exactly what it gave then"
    )

    @field_validator("entries", mode="wrap")
    @classmethod
    def _places_differ(cls, raw: Any, check: ValidatorFunctionWrapHandler) -> Any:
        # Two spellings of one place would otherwise become one entry, without a word about the other.
        entries = check(raw)
        if isinstance(raw, dict) and len(raw) != len(entries):
            twice = sorted(path for path in raw if path not in entries)
            raise ValueError(f"entries {', '.join(map(repr, twice))}: another entry is at the same place; give each its own")
        return entries

    @model_validator(mode="after")
    def _entries_do_not_overlap(self) -> Manifest:
        # Sorted by their parts, what lies inside a path follows right after it.
        paths = sorted(self.entries, key=lambda path: path.split("/"))
        for path, inside in pairwise(paths):
            if inside.startswith(path + "/"):
                raise ValueError(f"entries {path!r} and {inside!r} overlap; give each its own place")
        return self

    @model_validator(mode="after")
    def _outputs_differ(self) -> Manifest:
        twice = next((output.path for output, times in Counter(self.outputs).items() if times > 1), None)
        if twice is not None:
            raise ValueError(f"outputs: {twice!r} is given more than once for the same place; remove one of them")
        return self

    @model_validator(mode="after")
    def _environment_is_plain(self) -> Manifest:
        for name, value in self.environment.items():
            if not _ENVIRONMENT_NAME.fullmatch(name):
                raise ValueError(f"environment name {name!r} is not a valid variable name")
            if name == "HOME":
                raise ValueError(
                    "environment HOME is the sandbox's own; take it out, or set it within a command: HOME=/tmp/x make"
                )
            if len(value) > MAX_ENVIRONMENT_VALUE or len(value.encode()) > MAX_ENVIRONMENT_VALUE:
                raise ValueError(
                    f"environment {name} is longer than {MAX_ENVIRONMENT_VALUE} bytes, which no program could be started with; "
                    "put it into a file with an entry of type inline"
                )
            if "\0" in value:
                raise ValueError(f"environment {name} holds a NUL character")
            if CREDENTIAL_NAME.search(name) or _CREDENTIAL.search(value):
                raise ValueError(f"environment {name} looks like a credential; the sandbox never holds one")
        return self
