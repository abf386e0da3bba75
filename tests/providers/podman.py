"""Real container engines for tests, with their storage in a temporary directory: Podman's service, and Docker's daemon.

Images come from no registry: `busybox` is Debian's static BusyBox alone, `debian-python` a minimal Debian with Python, which
debootstrap makes in a minute or two and which is kept in the user's cache directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROCESSES_OF_USER = 16_000
"""Podman raises RLIMIT_NPROC to 1048576 unless told otherwise, which a machine without CAP_SYS_RESOURCE does not allow."""
IMAGES = {"busybox": "localhost/busybox:1", "debian-python": "localhost/debian-python:1"}
_PODMAN = {"podman": "podman", "runc": "runc", "conmon": "conmon"}
_DOCKER = {"dockerd": "docker.io", "docker-init": "docker.io"}
_INITS = ("catatonit", "docker-init", "tini")


class Missing(Exception):
    """An engine or what it needs is not installed; the text names the Debian packages."""


@dataclass
class Engine:
    """A running engine."""

    kind: str
    directory: Path
    command: Sequence[str]
    """What serves its socket."""
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    client: Any = None

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self.directory / "engine.sock"

    @property
    def url(self) -> str:
        """Its address."""
        return f"unix://{self.socket}"

    @property
    def api(self) -> Any:
        """The SDK's client, for what a test does behind the provider's back."""
        if self.client is None:
            self.client = importlib.import_module("docker").APIClient(base_url=self.url, timeout=60)
        return self.client

    def start(self) -> None:
        """Serve the socket. Containers that were there go on."""
        self.socket.unlink(missing_ok=True)
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env=os.environ | self.environment, stdout=log, stderr=log, start_new_session=True
            )
        until = time.monotonic() + 60
        while not accepts(self.socket):
            assert self.process.poll() is None and time.monotonic() < until, (self.directory / "log").read_text()[-2000:]
            time.sleep(0.05)

    def stop(self) -> None:
        """Serve no more. Containers go on."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)
            self.process = None
        if self.client is not None:
            self.client.close()
            self.client = None


def accepts(path: Path) -> bool:
    """Whether something listens on a unix socket."""
    with socket.socket(socket.AF_UNIX) as one, contextlib.suppress(OSError):
        one.connect(str(path))
        return True
    return False


def need(programs: dict[str, str]) -> None:
    """Raise Missing for programs that are not installed."""
    if os.geteuid() != 0:
        raise Missing("engines with storage of their own need root here")
    packages = sorted({package for program, package in programs.items() if shutil.which(program) is None})
    if packages:
        raise Missing(f"install {' '.join(packages)}")


@contextlib.contextmanager
def podman(images: Sequence[str]) -> Iterator[Engine]:
    """Run Podman's service with some of IMAGES. Raises Missing."""
    need(_PODMAN)
    init = next((found for name in _INITS if (found := shutil.which(name))), None)
    if init is None:
        raise Missing("install catatonit")
    archives = [archive_of(image) for image in images]
    with short_directory() as directory:
        (directory / "containers.conf").write_text(
            # runc, and cgroups made directly: crun refuses the hybrid hierarchy, and there is no systemd to ask.
            '[containers]\ndefault_ulimits = ["nofile=8192:8192", "nproc=16000:16000"]\n'
            f'[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\ntmp_dir = "{directory}/tmp"\n'
            f'init_path = "{init}"\nexit_command_delay = 2\n'
        )
        environment = {"CONTAINERS_CONF": str(directory / "containers.conf")}
        base = ["podman", "--root", f"{directory}/root", "--runroot", f"{directory}/run", "--storage-driver", driver()]
        engine = Engine(
            "podman", directory, [*base, "system", "service", "--time=0", f"unix://{directory}/engine.sock"], environment
        )
        for image, archive in zip(images, archives, strict=True):
            # The SDK's import call loses the tag here.
            subprocess.run(
                [*base, "import", "--quiet", str(archive), IMAGES[image]],
                env=os.environ | environment,
                capture_output=True,
                check=True,
            )
        with serving(engine):
            yield engine


@contextlib.contextmanager
def dockerd(images: Sequence[str]) -> Iterator[Engine]:
    """Run Docker's daemon with some of IMAGES, without networks. Raises Missing."""
    need(_DOCKER)
    archives = [archive_of(image) for image in images]
    with short_directory() as directory:
        (directory / "daemon.json").write_text(json.dumps({"live-restore": True}))
        options = {
            "host": f"unix://{directory}/engine.sock",
            "data-root": f"{directory}/data",
            "exec-root": f"{directory}/exec",
            "pidfile": f"{directory}/pid",
            "config-file": f"{directory}/daemon.json",
            "bridge": "none",
            "iptables": "false",
            "ip6tables": "false",
            "storage-driver": "overlay2" if driver() == "overlay" else "vfs",
        }
        engine = Engine("docker", directory, ["dockerd", *(f"--{name}={value}" for name, value in options.items())])
        with serving(engine):
            for image, archive in zip(images, archives, strict=True):
                repository, _, tag = IMAGES[image].rpartition(":")
                engine.api.import_image(src=str(archive), repository=repository, tag=tag)
            yield engine


@contextlib.contextmanager
def serving(engine: Engine) -> Iterator[None]:
    """Serve until the block ends, then remove every container, so that nothing is left running or mounted."""
    engine.start()
    try:
        yield
    finally:
        if engine.process is None:
            engine.start()
        api = engine.api
        for one in api.containers(all=True):
            api.remove_container(one["Id"], force=True, v=True)
        for one in api.volumes()["Volumes"] or []:
            api.remove_volume(one["Name"], force=True)
        engine.stop()


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """A directory with a path that a socket's address has room for: pytest's are too long for what engines put below it."""
    directory = Path(tempfile.mkdtemp(prefix="ce-", dir="/tmp"))
    try:
        yield directory
    finally:
        # What Podman runs after each exec comes late, and mounts its storage again.
        until = time.monotonic() + 15
        while time.monotonic() < until and any(str(directory) in line for line in command_lines()):
            time.sleep(0.2)
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in sorted((one for one in mounts if one.startswith(f"{directory}/")), reverse=True):
            subprocess.run(["umount", "--lazy", mount], check=False)
        shutil.rmtree(directory, ignore_errors=True)


def command_lines() -> Iterator[str]:
    """The command lines of all processes."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_text(errors="replace")


def driver() -> str:
    """How images are stored: as layers, or where the kernel has none of those, as copies."""
    return "overlay" if "\toverlay" in Path("/proc/filesystems").read_text() else "vfs"


def archive_of(image: str) -> Path:
    """Return the file system of one of IMAGES as a tar file, which is made once. Raises Missing."""
    need({"busybox": "busybox-static"} if image == "busybox" else {"debootstrap": "debootstrap"})
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "caisson-tests"
    cache.mkdir(parents=True, exist_ok=True)
    archive = cache / f"{image}-1.tar"
    with (cache / f"{image}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            with tempfile.TemporaryDirectory(prefix="rootfs-", dir=cache) as made:
                root, part = Path(made) / "root", Path(made) / "part"
                root.mkdir()
                (fill_busybox if image == "busybox" else fill_debian)(root)
                with tarfile.open(part, "w") as tar:
                    tar.add(root, ".", filter=lambda member: None if member.name.startswith("./dev/") else member)
                part.rename(archive)
    return archive


def fill_busybox(root: Path) -> None:
    """BusyBox and its names; its /tmp is closed to others, as hand-made images have it."""
    (root / "bin").mkdir()
    (root / "tmp").mkdir(0o755)
    busybox = shutil.which("busybox")
    assert busybox is not None
    shutil.copy(busybox, root / "bin/busybox")
    for name in subprocess.run(["busybox", "--list"], capture_output=True, text=True, check=True).stdout.split():
        if name != "busybox":
            (root / "bin" / name).symlink_to("busybox")


def fill_debian(root: Path) -> None:
    """A minimal Debian with Python, without what apt keeps to install more."""
    subprocess.run(
        ["debootstrap", "--variant=minbase", "--include=python3", "bookworm", str(root), "http://deb.debian.org/debian"],
        capture_output=True,
        check=True,
    )
    for kept in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale"):
        shutil.rmtree(root / kept, ignore_errors=True)
