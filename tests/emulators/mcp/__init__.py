"""MCP servers for tests: one over HTTP that is built on the SDK, and one on standard input and output that misbehaves."""
