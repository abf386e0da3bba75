"""The manifest: what a fresh workspace contains and where its outputs are."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidatorFunctionWrapHandler, field_validator, model_validator

from contracts.base import Contract

_CREDENTIAL = re.compile(
    r"(?i)(^sk-[a-z0-9_-]{16,}|^gh[pousr]_[A-Za-z0-9]{20,}|^AKIA[0-9A-Z]{16}$|-----BEGIN [A-Z ]*PRIVATE KEY)"
)
_CREDENTIAL_NAME = re.compile(r"(?i)(secret|token|password|passwd|api_?key|credential|private_?key)")
_ENVIRONMENT_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


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
    if any(len(part.encode()) > 255 for part in parts):
        raise ValueError("each part of a workspace path is at most 255 bytes")
    return "/".join(parts)


def _no_nul(path: str) -> str:
    if "\0" in path:
        raise ValueError("a path holds no NUL character")
    return path


WorkspacePath = Annotated[str, AfterValidator(check_workspace_path)]


class InlineEntry(Contract):
    """A file whose text stands in the manifest itself."""

    type: Literal["inline"]
    text: str
    read_only: bool = False


class LocalEntry(Contract):
    """A file or directory of the harness's host, under one of the roots that the worker allows."""

    type: Literal["local"]
    path: Annotated[str, Field(min_length=1), AfterValidator(_no_nul)] = Field(
        description="relative to an allowed root, or absolute inside one"
    )
    read_only: bool = False


ManifestEntry = Annotated[InlineEntry | LocalEntry, Field(discriminator="type")]


class OutputSpec(Contract):
    """A file or directory of the workspace whose content becomes the run's artifacts."""

    path: WorkspacePath


class ManifestLimits(Contract):
    """Bounds on what is put into the workspace."""

    max_bytes: int = Field(default=2 * 1024**3, gt=0)
    max_files: int = Field(default=100_000, gt=0)


class Manifest(Contract):
    """What a fresh workspace contains, by workspace path, and which paths are outputs."""

    entries: dict[WorkspacePath, ManifestEntry] = Field(default_factory=dict)
    outputs: tuple[OutputSpec, ...] = (OutputSpec(path="outputs"),)
    environment: dict[str, str] = Field(default_factory=dict, description="plain values; never a credential")
    limits: ManifestLimits = ManifestLimits()

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
        paths = sorted(self.entries)
        for path in paths:
            inside = next((other for other in paths if other.startswith(path + "/")), None)
            if inside is not None:
                raise ValueError(f"entries {path!r} and {inside!r} overlap; give each its own place")
        return self

    @model_validator(mode="after")
    def _environment_is_plain(self) -> Manifest:
        for name, value in self.environment.items():
            if not _ENVIRONMENT_NAME.fullmatch(name):
                raise ValueError(f"environment name {name!r} is not a valid variable name")
            if "\0" in value:
                raise ValueError(f"environment {name} holds a NUL character")
            if _CREDENTIAL_NAME.search(name) or _CREDENTIAL.search(value):
                raise ValueError(f"environment {name} looks like a credential; the sandbox never holds one")
        return self
