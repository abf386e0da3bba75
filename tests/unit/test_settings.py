"""Settings: each variable checked and named, keys hidden, and each role only with what it may hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.base import BadInput
from workers.settings import Role, Settings, check_role, inherited_environment, load_settings

KEY = "sk-secret-0123456789"


def roles(*names: Role) -> frozenset[Role]:
    """A set of roles."""
    return frozenset(names)


def test_nothing_needs_to_be_set() -> None:
    """Every setting has a default."""
    assert load_settings({}) == Settings()


def test_variables_become_settings() -> None:
    """A variable is its field's name in capitals after CAISSON_."""
    settings = load_settings({"CAISSON_TASK_QUEUE": "q", "CAISSON_MODEL_SLOTS": "7", "CAISSON_LOCAL_ROOTS": "/a::/b"})
    assert (settings.task_queue, settings.model_slots) == ("q", 7)
    assert settings.local_roots == (Path("/a"), Path("/b"))


def test_opened_ranges_are_separated_by_commas() -> None:
    """Of both families."""
    ranges = load_settings({"CAISSON_EGRESS_PRIVATE": "10.1.0.0/16, fd12::/16"}).egress_private
    assert [str(network) for network in ranges] == ["10.1.0.0/16", "fd12::/16"]


def test_an_empty_variable_is_not_set() -> None:
    """Compose files and shells leave empty ones behind."""
    assert load_settings({"CAISSON_MODEL": "", "OPENAI_API_KEY": ""}) == Settings()


def test_variables_of_others_are_none_of_our_business() -> None:
    """Only CAISSON_ is checked."""
    assert load_settings({"PATH": "/bin", "CAISSONS": "x"}) == Settings()


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("CAISSON_MODEL_SLOTS", "many", "valid integer"),
        ("CAISSON_MODEL_SLOTS", "0", "greater than 0"),
        ("CAISSON_SANDBOX_SLOTS", "1001", "less than or equal to 1000"),
        ("CAISSON_TASK_QUEUE", "a b", "letters, digits and ._- only"),
        ("CAISSON_TASK_QUEUE", "q\n", "letters, digits and ._- only"),
        ("CAISSON_LOG_LEVEL", "loud", "debug|info|warning|error"),
        ("CAISSON_LOG_FORMAT", "xml", "auto|json|console"),
        ("CAISSON_STORE", "ftp://bucket/x", "ftp:// is no store; give a directory, s3://BUCKET/PREFIX"),
        ("CAISSON_STORE", "r2://bucket", "give r2://ACCOUNT/BUCKET/PREFIX"),
        ("CAISSON_STORE", "s3://bucket/../x", "the prefix '../x' may have parts of"),
        ("CAISSON_STORE_ENDPOINT", "s3.example.com", "give http:// or https:// with a host"),
        ("OPENAI_BASE_URL", "ftp://host", "^https?://"),
        ("CAISSON_EGRESS_PRIVATE", "10.0.0.0/8,10.0.0.1/8", "not a valid IPv4 network"),
    ],
)
def test_a_bad_variable_is_named_with_its_value_and_what_is_expected(name: str, value: str, told: str) -> None:
    """Whoever starts the worker knows what to correct."""
    with pytest.raises(BadInput) as caught:
        load_settings({name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}: ")
    assert told in message
    assert f"found {value!r}" in message


def test_every_bad_variable_is_named_at_once() -> None:
    """One start shows all that is wrong."""
    with pytest.raises(BadInput) as caught:
        load_settings({"CAISSON_MODEL_SLOTS": "x", "CAISSON_LOG_LEVEL": "y"})
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == ["CAISSON_MODEL_SLOTS", "CAISSON_LOG_LEVEL"]


def test_a_misspelt_variable_is_refused_with_the_right_one() -> None:
    """A setting that has no effect is not taken for one that has."""
    with pytest.raises(BadInput, match="CAISSON_TASKQUEUE: no such setting; did you mean CAISSON_TASK_QUEUE"):
        load_settings({"CAISSON_TASKQUEUE": "q"})
    with pytest.raises(BadInput, match="CAISSON_ZZZ: no such setting; there are: CAISSON_AGENTS, "):
        load_settings({"CAISSON_ZZZ": "1"})


def test_a_key_is_shown_nowhere() -> None:
    """Neither when settings are printed or dumped, nor in the error for another variable."""
    settings = load_settings({"OPENAI_API_KEY": KEY})
    assert KEY not in f"{settings!r} {settings} {settings.model_dump_json()}"
    with pytest.raises(BadInput) as caught:
        load_settings({"OPENAI_API_KEY": KEY, "CAISSON_MODEL_SLOTS": "x"})
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("role", [Role.WORKFLOW, Role.SANDBOX, Role.TOOLS])
def test_only_the_model_worker_may_hold_the_model_key(role: Role) -> None:
    """Any other refuses to start with one, names its role and says how to unset it."""
    with pytest.raises(
        BadInput, match=f"OPENAI_API_KEY: set in the environment of a {role} worker.*env -u OPENAI_API_KEY"
    ) as caught:
        check_role(load_settings({"OPENAI_API_KEY": KEY}), roles(role))
    assert KEY not in str(caught.value)
    check_role(load_settings({}), roles(role))


def test_the_model_worker_needs_the_key() -> None:
    """It says so when it starts, not at the first call."""
    with pytest.raises(BadInput, match="OPENAI_API_KEY: the model worker needs it"):
        check_role(load_settings({}), roles(Role.MODEL))
    check_role(load_settings({"OPENAI_API_KEY": KEY}), roles(Role.MODEL))


def test_model_and_sandbox_are_never_one_process() -> None:
    """The key must not be where model-written code is started."""
    with pytest.raises(BadInput, match="model and sandbox cannot be one process"):
        check_role(load_settings({"OPENAI_API_KEY": KEY}), roles(Role.MODEL, Role.SANDBOX))


def test_a_service_of_the_dev_stack_inherits_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a program needs to run at all is passed on."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEY)
    monkeypatch.setenv("PATH", "/bin")
    inherited = inherited_environment()
    assert inherited["PATH"] == "/bin"
    assert KEY not in inherited.values()


def test_two_sandbox_directories_on_one_machine_are_two_hosts(tmp_path: Path) -> None:
    """A worker never takes over a sandbox that it cannot reach; the name is one that a task queue may have."""
    here, there = (
        load_settings({"CAISSON_HOST": "ward 3/ünit", "CAISSON_SANDBOX_DIR": str(tmp_path / name)}).sandbox_host for name in "ab"
    )
    assert here != there
    assert here.startswith("ward-3--nit-")
