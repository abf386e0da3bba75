"""Where a manifest's files come from: one module for each kind of source."""
