"""Providers by name: built in, from installed packages, missing; and what a spec asks of one that cannot."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from activities.sandbox import registry
from activities.sandbox.port import BadSandboxSpec, Capabilities, SandboxProvider, refuse_what_it_cannot
from activities.sandbox.registry import GROUP, PROVIDERS, ProviderRegistry, provider_class
from contracts.sandbox import NetworkPolicy, SandboxLimits, SandboxSpec

BARE = Capabilities(host_bound=False, native_jobs=False)


def install(monkeypatch: pytest.MonkeyPatch, directory: Path, entries: str, package: str = "acme-sandboxes") -> None:
    """Make a directory look as a place where a package with these entry points is installed."""
    info = directory / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}\n")
    (directory / "acme_sandboxes.py").write_text("class Provider:\n    name = 'acme'\n")
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.delitem(sys.modules, "acme_sandboxes", raising=False)


def test_a_package_adds_a_provider(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A provider of an entry point is made when first used, by its name, without any setting of the worker."""
    install(monkeypatch, tmp_path, "acme = acme_sandboxes:Provider")
    providers = ProviderRegistry({})
    assert "acme_sandboxes" not in sys.modules
    provider = providers.get("acme")
    assert provider.name == "acme"
    assert providers.get("acme") is provider


def test_a_package_replaces_no_built_in_provider(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A name that is taken is refused, saying by which package and what to do."""
    install(monkeypatch, tmp_path, "local = acme_sandboxes:Provider")
    with pytest.raises(BadSandboxSpec, match=r"'local' is built in, and the package acme-sandboxes .* rename it"):
        provider_class("local")


def test_two_packages_cannot_share_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which one would win is nobody's to guess."""
    install(monkeypatch, tmp_path / "one", "acme = acme_sandboxes:Provider")
    install(monkeypatch, tmp_path / "two", "acme = acme_sandboxes:Provider", "other-sandboxes")
    with pytest.raises(BadSandboxSpec, match=r"offered by .*acme-sandboxes.*other-sandboxes|other-sandboxes.*acme-sandboxes"):
        provider_class("acme")


def test_an_unknown_provider_is_told_with_those_that_there_are() -> None:
    """The error lists the names."""
    with pytest.raises(BadSandboxSpec, match=rf"none is named 'nope'; there are: .*{sorted(PROVIDERS)[0]}"):
        provider_class("nope")
    with pytest.raises(BadSandboxSpec, match="this worker has no provider 'nope'"):
        ProviderRegistry({}).get("nope")


def test_a_missing_sdk_names_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The extra of a built-in provider, or the package of another one."""
    monkeypatch.setattr(registry, "PROVIDERS", {"cloud": "cloud_sdk_zz.provider:CloudProvider"})
    with pytest.raises(BadSandboxSpec, match=r"cloud needs the package cloud_sdk_zz, which .* pip install 'caisson\[cloud\]'"):
        provider_class("cloud")

    def make() -> SandboxProvider:
        importlib.import_module("cloud_sdk_zz")
        raise AssertionError

    with pytest.raises(BadSandboxSpec, match="cloud needs the package cloud_sdk_zz"):
        ProviderRegistry({"cloud": make}).get("cloud")
    install(monkeypatch, tmp_path, "acme = acme_missing.module:Provider")
    with pytest.raises(BadSandboxSpec, match="acme needs the package acme_missing, which is missing; reinstall the package"):
        provider_class("acme")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (SandboxSpec(limits=SandboxLimits(memory_mb=512)), r"sandbox.limits.memory_mb: 512: provider p does not keep this limit"),
        (SandboxSpec(image="x:1"), r"sandbox.image: x:1: provider p has no images; leave the field out"),
        (SandboxSpec(options={"gpu": "1"}), r"sandbox.options.gpu: 1: provider p has no such option; there are: none"),
        (
            SandboxSpec(network=NetworkPolicy(allow=("a.org",))),
            r"sandbox.network.allow: hosts: provider p cannot limit the network",
        ),
        (SandboxSpec(options={"network": "open"}), r"sandbox.options.network: open: provider p has no such option"),
    ],
)
def test_what_a_provider_cannot_do_is_refused(spec: SandboxSpec, words: str) -> None:
    """The refusal names the field, the value and what to do."""
    with pytest.raises(BadSandboxSpec, match=words):
        refuse_what_it_cannot("p", BARE, spec)


def test_an_open_network_must_be_accepted() -> None:
    """A provider that cannot close the network is used only by who says that this is meant."""
    capable = replace(BARE, network=frozenset({"open"}))
    with pytest.raises(BadSandboxSpec, match=r"cannot close the network .* or accept an open network with options"):
        refuse_what_it_cannot("p", capable, SandboxSpec())
    refuse_what_it_cannot("p", capable, SandboxSpec(options={"network": "open"}))
    with pytest.raises(BadSandboxSpec, match=r"hosts are named, and options.network opens"):
        refuse_what_it_cannot("p", capable, SandboxSpec(options={"network": "open"}, network=NetworkPolicy(allow=("a.org",))))


def test_what_a_provider_can_do_is_let_through() -> None:
    """Limits at their defaults, and all that the capabilities name."""
    capable = replace(BARE, limits=frozenset({"memory_mb"}), images=True, options=frozenset({"gpu"}))
    refuse_what_it_cannot("p", BARE, SandboxSpec())
    refuse_what_it_cannot("p", capable, SandboxSpec(image="x", options={"gpu": "1"}, limits=SandboxLimits(memory_mb=99)))
