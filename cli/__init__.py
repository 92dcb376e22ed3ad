"""The command line: the commands of ``warren``, and modules that only commands need.

`cli.main` is the entry point. Each command imports its implementation when it runs, so a gateway
does not need torch, a worker does not need fastapi and ``--help`` needs neither.
"""
