"""The rooms and their import rules: read from the sources, and from what a fresh interpreter really loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("contracts", "workflows", "activities", "workers", "client")
PROVIDERS = "activities.sandbox.providers"
PORT = {f"activities.sandbox.{name}" for name in ("port", "machine", "portable")}
"""What a provider builds on."""
HEAVY = ("openai", "boto3", "e2b", "modal", "httpx", "httpx2", "aiohttp", "jsonschema", "yaml", "rich", "typer", "starlette")

ALLOWED_ROOMS = {
    "contracts": set(),
    "workflows": {"contracts"},
    "activities": {"contracts"},
    "workers": {"contracts", "workflows", "activities"},
    "client": {"contracts", "workers", "activities"},
}
"""What each room may import besides itself. `client` reads the store through what `workers` opens for it."""


def sources(room: str) -> Iterator[Path]:
    """Every Python file of a room."""
    return (path for path in sorted((ROOT / room).rglob("*.py")) if "__pycache__" not in path.parts)


def imports(path: Path) -> set[str]:
    """The full names of all modules that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            # `from package import module` imports a module of the package.
            is_package = module in (PROVIDERS, "activities.sandbox")
            found |= {f"{module}.{alias.name}" for alias in node.names} if is_package else {module}
    return found


def tops(path: Path) -> set[str]:
    """The top-level packages that a file imports."""
    return {name.partition(".")[0] for name in imports(path)}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_depend_one_way(room: str) -> None:
    """contracts ← workflows, activities ← workers ← client, and nothing else."""
    for path in sources(room):
        assert (tops(path) & set(ROOMS)) - {room} <= ALLOWED_ROOMS[room], path


def test_contracts_are_a_leaf() -> None:
    """Contracts import the standard library and pydantic only, and nothing that tells time or throws dice."""
    for path in sources("contracts"):
        outside = {name for name in tops(path) if name not in sys.stdlib_module_names} - {"contracts"}
        assert outside <= {"pydantic"}, path
        assert not tops(path) & {"random", "uuid", "time", "secrets", "os"}, path


def test_contracts_hold_no_mutable_globals() -> None:
    """Contracts are shared between workflow runs, so a list or dict that one run changes would reach another."""
    for path in sources("contracts"):
        for node in ast.parse(path.read_text()).body:
            value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
            assert not isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp)), f"{path}:{node.lineno}"


def test_workflows_import_only_contracts_and_temporalio() -> None:
    """No workflow can reach the world by import."""
    for path in sources("workflows"):
        outside = {name for name in tops(path) if name not in sys.stdlib_module_names}
        assert outside <= {"contracts", "workflows", "temporalio", "pydantic"}, path
        assert not tops(path) & {"os", "random", "uuid", "time", "secrets", "socket", "subprocess", "threading"}, path


def test_workflows_load_no_heavy_module() -> None:
    """Importing every workflow in a fresh interpreter loads no provider, store or model SDK."""
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sources("workflows")]
    code = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\nprint(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded & set(HEAVY)
    assert not {name for name in loaded if name.partition(".")[0] in ("activities", "workers", "client")}


def test_workflow_modules_stay_inside_the_sandbox() -> None:
    """Only contracts and pydantic are passed through; no workflow leaves the sandbox."""
    for room in (*ROOMS, "tests"):
        for path in sources(room):
            if path == Path(__file__):
                continue
            text = path.read_text()
            assert "sandboxed=False" not in text, path
            assert 'passthrough_modules("workflows' not in text, path


def test_providers_import_neither_temporal_nor_each_other() -> None:
    """A provider file knows contracts, the port, the portable sandbox, threads, its own helpers (by its name), and its SDK."""
    for path in sources("activities/sandbox/providers"):
        own = path.stem.partition("_")[0]
        for name in imports(path):
            assert not name.startswith(("temporalio", "workers", "workflows")), path
            if name.startswith("activities."):
                prefix = f"activities.sandbox.providers.{own}"
                assert name in {*PORT, "activities.threads"} or name.startswith(prefix), f"{path}: {name}"


def test_only_settings_reads_the_environment() -> None:
    """One place reads os.environ; the code that runs inside the sandbox is no part of the harness."""
    inside = {"local_init.py", "local_job.py", "local_process.py", "local_files.py", "local_wire.py"}
    for room in ROOMS:
        for path in sources(room):
            if path == ROOT / "workers/settings.py" or path.name in inside or path.parent.name == "portable_helper":
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute):
                    assert node.attr not in ("environ", "getenv", "environb"), f"{path}:{node.lineno}"


def test_the_embeddable_client_is_light() -> None:
    """`client/sdk` imports contracts and temporalio alone, so that any service can embed it."""
    outside = {name for name in tops(ROOT / "client/sdk.py") if name not in sys.stdlib_module_names}
    assert outside <= {"contracts", "temporalio", "pydantic"}


def test_files_stay_short() -> None:
    """No Python file is longer than 400 lines."""
    for room in (*ROOMS, "tests", "benchmarks", "examples"):
        for path in sources(room):
            assert len(path.read_text().splitlines()) <= 400, path
