"""Sandboxes: the provider port, the registry, and the activities that work through it."""
