"""Servers that speak the protocols of sandbox providers, for tests: emulators, not the services themselves."""
