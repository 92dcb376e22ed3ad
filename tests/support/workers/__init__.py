"""Workers for tests, and readers of what workers write.

`scripted_worker` answers as the test says, `batch_worker` as a function of the job, and `synthetic`
runs a real worker with the synthetic engine. `jobs` reads logs, `batch_files` the files of
`warren batch`, `faults` raises errors inside of a worker or gateway, and `connections` connects
either to a broker in memory.
"""
