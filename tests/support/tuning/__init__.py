"""Services with other times and sizes than operators get.

`options` finds the fields of a tuning among the options of a test's gateway or worker. `gateway`
runs ``warren gateway`` with a tuning in a process of its own.
"""
