"""Reading YAML that people wrote, as far as it says what JSON can say too."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from contracts.base import BadInput

MAX_FILE = 1024 * 1024
"""Bytes of a file."""
MAX_DEPTH = 100
MAX_VALUES = 20_000
"""Values of a file, with those of an anchor counted again for each alias."""

_TAG = "tag:yaml.org,2002:"
_KINDS = frozenset(_TAG + kind for kind in ("null", "bool", "int", "float", "str", "seq", "map"))
_MERGE = _TAG + "merge"


class _Unfit(ValueError):
    """What stands at a node is not taken."""

    def __init__(self, node: Node, message: str) -> None:
        super().__init__(f"line {node.start_mark.line + 1}: {message}")


class _Loader(yaml.SafeLoader):
    """A loader without dates, which JSON does not have: they are text. It stops at what nests too deeply."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - it is the base's, and not changed
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TAG + "timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _level = 0
    _values = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        if self._level > MAX_DEPTH:
            raise _Unfit(parent, f"nests deeper than {MAX_DEPTH} levels") if parent else RecursionError
        if self._values > MAX_VALUES:
            raise _Unfit(parent, f"holds more than {MAX_VALUES} values; write less") if parent else RecursionError
        self._values += 1
        self._level += 1
        node: Node | None = super().compose_node(parent, index)
        self._level -= 1
        return node


def read_yaml(path: Path) -> Any:
    """Return what a YAML file says, as JSON has it. Raises BadInput naming the file, the line, and what to do."""
    try:
        text = _content(path).decode("utf-8-sig")
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}; save it as UTF-8") from error
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        raise BadInput(f"{path} is not YAML: {error}") from error
    except RecursionError as error:
        raise BadInput(f"{path}: nests too deeply; write it with fewer levels") from error
    except ValueError as error:
        raise BadInput(f"{path}: {error}") from error


def parse_yaml(text: str) -> Any:
    """Return what YAML says, as JSON has it. Raises YAMLError, RecursionError, or ValueError with the line that is not taken."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _Check(loader).see(node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _content(path: Path) -> bytes:
    # Opened without waiting: a pipe that nobody writes to would be waited for for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BadInput(f"{path} is no regular file; put a file there, or remove it")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(MAX_FILE + 1)
    finally:
        os.close(descriptor)
    if len(content) > MAX_FILE:
        raise BadInput(f"{path} is larger than {MAX_FILE} bytes; take out what is no field of an agent")
    return content


class _Check:
    """Looks at a whole document before anything is made of it."""

    def __init__(self, loader: _Loader) -> None:
        self._loader = loader
        self._seen: dict[int, tuple[int, int] | None] = {}

    def see(self, node: Node, level: int = 0) -> tuple[int, int]:
        """Return how many values a node stands for, and how many levels it has. Raises _Unfit for what is not taken."""
        if id(node) in self._seen:
            known = self._seen[id(node)]
            if known is None:
                raise _Unfit(node, "an alias stands within what it is an alias of; write it out")
            size, levels = known
        else:
            self._seen[id(node)] = None
            below = [self.see(child, level + 1) for child in self._below(node)]
            size, levels = 1 + sum(one for one, _ in below), 1 + max((one for _, one in below), default=0)
            self._seen[id(node)] = size, levels
        if level + levels > MAX_DEPTH:
            raise _Unfit(node, f"nests deeper than {MAX_DEPTH} levels; write it with fewer")
        if size > MAX_VALUES:
            raise _Unfit(node, f"holds more than {MAX_VALUES} values, aliases counted each time; write less")
        return size, levels

    def _below(self, node: Node) -> Iterator[Node]:
        if node.tag not in _KINDS:
            raise _Unfit(node, f"{node.tag.replace(_TAG, '!!')} is not taken here; write plain text, numbers, lists and mappings")
        if isinstance(node, ScalarNode):
            self._check_number(node)
            return
        if not isinstance(node, MappingNode):
            yield from node.value
            return
        keys: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, ScalarNode) or key.tag not in (_TAG + "str", _MERGE):
                shown = (
                    f"{key.value!r} is read as {key.tag.replace(_TAG, '')}"
                    if isinstance(key, ScalarNode)
                    else "this is a collection"
                )
                raise _Unfit(key, f"the name of a field must be text, but {shown}; put it in quotes")
            if key.value in keys:
                raise _Unfit(key, f"{key.value[:200]!r} is given twice in one mapping; keep one of them")
            keys.add(key.value)
            yield value

    def _check_number(self, node: ScalarNode) -> None:
        if node.tag == _TAG + "int" and len(node.value) > 300:
            raise _Unfit(node, f"a number of {len(node.value)} digits is too large")
        if node.tag == _TAG + "float" and not math.isfinite(self._loader.construct_yaml_float(node)):
            raise _Unfit(node, f"{node.value!r} is no finite number; write one")
