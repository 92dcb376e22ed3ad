"""The tasks of docs/tasks.md on a real deployment: the terminal and Docker Compose that their
commands use."""
