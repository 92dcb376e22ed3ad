"""Starts the processes of tests as copies of a process that has imported their modules.

A gateway imports for more than a second of CPU time, a worker for more than two, and the suite
starts hundreds of them. `server` is the process that is copied, `client` starts copies. The tests
of `tests.system.smollm2` and of `tests.infra` start the real commands.
"""
