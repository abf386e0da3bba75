"""The object store: where bytes live that are too large for history."""
