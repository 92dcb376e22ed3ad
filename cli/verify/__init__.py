"""The command ``warren verify``: `command` checks a receipt, `recomputation` its answer."""
