"""Secrets: one file each, read by name, and quoted by nobody."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from activities.governance.secrets import MOST_BYTES, Secrets
from contracts.base import BadInput

VALUE = "s3cr3t-value"


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """An operator's directory, beside which lies something that is no secret of Caisson's."""
    (tmp_path / "outside").write_text(VALUE)
    mounted = tmp_path / "secrets"
    mounted.mkdir()
    return mounted


def put(mounted: Path, name: str, value: str, mode: int = 0o600) -> None:
    """Write a secret."""
    (mounted / name).write_text(value)
    (mounted / name).chmod(mode)


def test_a_secret_is_text_without_its_line_end(mounted: Path) -> None:
    """As editors leave it."""
    put(mounted, "git-token", f"{VALUE}\n")
    assert Secrets(mounted).text("git-token") == VALUE


def test_a_changed_secret_is_used_at_once(mounted: Path) -> None:
    """Nobody restarts a worker for it."""
    secrets = Secrets(mounted)
    put(mounted, "a", "1")
    assert secrets.text("a") == "1"
    put(mounted, "a", "2")
    assert secrets.text("a") == "2"


def test_fields_come_from_json_or_yaml(mounted: Path) -> None:
    """Whatever the operator writes."""
    put(mounted, "json", '{"account_key": "k"}')
    put(mounted, "yaml", "account_key: k\n")
    for name in ("json", "yaml"):
        assert Secrets(mounted).fields(name, {"account_key", "sas_token"}) == {"account_key": "k"}


def test_links_as_kubernetes_makes_them_are_followed_but_not_out(mounted: Path) -> None:
    """`name` leads to `..data/name`, which leads to a directory of that version."""
    (mounted / "..v1").mkdir()
    put(mounted / "..v1", "token", VALUE)
    (mounted / "..data").symlink_to("..v1")
    (mounted / "token").symlink_to("..data/token")
    assert Secrets(mounted).text("token") == VALUE
    (mounted / "leak").symlink_to("../outside")
    with pytest.raises(BadInput, match=r"secret 'leak': its file is a link that leaves CAISSON_SECRETS"):
        Secrets(mounted).text("leak")


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "", ".", "..", "A", "a/b", "a\0", "-a", "x" * 64, "a\n"])
def test_what_is_no_name_is_refused(mounted: Path, name: str) -> None:
    """Nothing but a file of the directory itself can be asked for."""
    put(mounted, "a", VALUE)
    with pytest.raises(BadInput, match="not a secret's name"):
        Secrets(mounted).text(name)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "its file is empty"),
        (" \n", "its file is empty"),
        (VALUE, "is no mapping; write one with fields of account_key"),
        (f"{VALUE}: [", "neither JSON nor YAML"),
        (f"account_key: k\n{VALUE}: 1", "1 of its fields are not known; there are: account_key"),
        (f"- {VALUE}", "is no mapping"),
        (f"account_key: !!python/name:os.{VALUE} x", "neither JSON nor YAML"),
        ("x" * (MOST_BYTES + 1), "not a regular file of at most 65536 bytes"),
    ],
)
def test_a_value_that_cannot_be_used_is_not_quoted(mounted: Path, text: str, told: str) -> None:
    """Neither by the message nor by what it was raised from."""
    put(mounted, "s", text)
    with pytest.raises(BadInput) as caught:
        Secrets(mounted).fields("s", {"account_key"})
    assert told in str(caught.value)
    assert "secret 's': " in str(caught.value)
    assert VALUE not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_bytes_that_are_no_text_are_refused(mounted: Path) -> None:
    """A key in a binary form is of another kind."""
    (mounted / "s").write_bytes(b"\xff" + VALUE.encode())
    with pytest.raises(BadInput, match=r"not UTF-8 text; write it anew") as caught:
        Secrets(mounted).text("s")
    assert caught.value.__suppress_context__


def test_what_is_missing_says_where_it_was_looked_for(mounted: Path) -> None:
    """The operator's setting, or the file."""
    with pytest.raises(BadInput, match=r"set its CAISSON_SECRETS to a directory with a file aws"):
        Secrets(None).text("aws")
    with pytest.raises(BadInput, match=r"secret 'aws': there is no such file in the tools worker's CAISSON_SECRETS"):
        Secrets(mounted).text("aws")
    (mounted / "dir").mkdir()
    with pytest.raises(BadInput, match="not a regular file"):
        Secrets(mounted).text("dir")


def test_a_file_that_everybody_may_read_is_warned_of(mounted: Path) -> None:
    """By its name only."""
    put(mounted, "open", VALUE, 0o644)
    with structlog.testing.capture_logs() as logs:
        assert Secrets(mounted).text("open") == VALUE
    assert [(entry["event"], entry["secret"]) for entry in logs] == [("secret_is_world_readable", "open")]
    assert VALUE not in str(logs)
    assert VALUE not in repr(Secrets(mounted))
