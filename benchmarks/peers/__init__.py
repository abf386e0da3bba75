"""What peers take for the same work, each in an environment of its own (`.venv-peers`), never installed beside Caisson."""
