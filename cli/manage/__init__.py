"""The commands that manage a running deployment: its API keys, batches, dead letters and status."""
