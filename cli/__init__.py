"""The command line: the commands of ``warren``, and modules that only commands need.

`cli.main` is the entry point. `serve` starts gateways and workers, `manage` looks after
them, and `batch`, `chat` and `doctor` are a command each. Every command imports its implementation
when it runs, so a gateway does not need torch, a worker does not need fastapi and ``--help`` needs
neither.
"""
