"""Reading the services of a Compose file: the part of the format that `temporal-dev.yml` uses.

Source: the Compose specification (services, command, environment, profiles; interpolation of `${NAME:-default}`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from contracts.base import BadInput

_VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")


@dataclass(frozen=True)
class Service:
    """One service: what it runs, with which environment, and in which profiles (none: always)."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    profiles: frozenset[str]


def read_services(file: Path, variables: Mapping[str, str]) -> dict[str, Service]:
    """Return the services of a Compose file, with `variables` put in. Raises BadInput naming file and service."""
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{file}: {error.strerror}; run from the project's directory, or give --file") from error
    except yaml.YAMLError as error:
        raise BadInput(f"{file} is not YAML: {error}") from error
    services = document.get("services") if isinstance(document, dict) else None
    if not isinstance(services, dict):
        raise BadInput(f"{file}: has no `services`; it must be a Compose file")
    return {name: _service(file, name, raw, variables) for name, raw in services.items()}


def _service(file: Path, name: str, raw: Any, variables: Mapping[str, str]) -> Service:
    command, environment = raw.get("command"), raw.get("environment") or {}
    if not isinstance(command, list) or not all(isinstance(part, str) for part in command):
        raise BadInput(f"{file}: services.{name}.command must be a list of strings")
    if not isinstance(environment, dict):
        raise BadInput(f"{file}: services.{name}.environment must be a mapping")
    values = {key: _interpolated(str(value), variables) for key, value in environment.items()}
    return Service(
        name=name,
        command=tuple(_interpolated(part, variables) for part in command),
        # An empty variable means "not set" everywhere in Caisson's settings.
        environment={key: value for key, value in values.items() if value},
        profiles=frozenset(raw.get("profiles") or ()),
    )


def _interpolated(text: str, variables: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: variables.get(match["name"]) or match["default"] or "", text)
