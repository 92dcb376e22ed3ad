"""Runs batches: claims them, checks their files, runs their lines and writes their outputs.

`batch_runner.BatchRunner` claims and runs batches, `checking` checks a file before anything runs
and `bad_lines` words the faults of its lines, `serving` runs a line like any other request,
`key_limits` admits it, `closing` gives it priority if its batch is late, `order` says which line is
next, `windows` bounds how many run and their memory, and `lines` has the formats of input and
output. The states of batches, leases and answers are in `gateway.store.batches`.
"""
