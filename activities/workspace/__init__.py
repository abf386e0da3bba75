"""The workspace: filling it from a manifest, and taking results out of it."""
