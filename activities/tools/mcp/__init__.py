"""Tools of MCP servers: the operator's file, connections, what servers say of their tools, and calling these."""
