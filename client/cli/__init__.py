"""The `caisson` command. Modules here import Temporal, the workers and rich only inside commands, so that `--help` is quick."""
