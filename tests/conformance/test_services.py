"""The same checks with the emulators of hosted services; a file of its own, so that both halves run beside each other."""

from __future__ import annotations

from tests.conformance.test_conformance import test_conformance as test_conformance
