"""The command line: every command of ``warren``, and what only commands need.

`cli.main` is the entry point. Each command imports its side when it runs, so that a gateway needs
no torch, a worker no fastapi and ``--help`` neither.
"""
