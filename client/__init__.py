"""What people and services use: the typed client (`client.sdk`), the live view of a run, and the `caisson` command.

Services embed `client.sdk` alone: it imports contracts and Temporal's client, nothing else. Everything here also works with the
plain Temporal client or the `temporal` command; this room only makes it comfortable.
"""
