"""The tasks of docs/tasks.md on a real deployment: the terminal, Docker Compose and the store of
traces that their commands use."""
