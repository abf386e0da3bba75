"""What runs inside a sandbox that is reached through an SDK: jobs, sessions and files, in Python 3.6 and in POSIX shell.

These files are sent into the sandbox as they are (see `portable_call`); the harness itself imports none of them.
"""
