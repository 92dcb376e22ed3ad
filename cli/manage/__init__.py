"""The commands that manage a running deployment: its API keys, batches, dead letters and status.

`cli.main` adds what each module defines: the groups of commands `keys`, `batches`, `dead`, `usage`
and `webhooks`, and the commands in `status` and `drain`.
"""
