"""The nouns of Caisson: pydantic types that cross a process boundary, and the pure functions on them.

A leaf room: it imports the standard library and pydantic only, and holds no clock, no randomness and no mutable globals,
so that workflows may import it from inside Temporal's sandbox.
"""
