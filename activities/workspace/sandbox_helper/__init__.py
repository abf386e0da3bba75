"""The helpers that look at a workspace, and restore one, inside the sandbox. Sent there as text; never imported here."""
