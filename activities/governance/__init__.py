"""What keeps a run within its rules."""
