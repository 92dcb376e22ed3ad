"""Consumes jobs, runs them to their terminal event, and acknowledges, requeues or dead-letters
them.

`consumer` and `quick` consume jobs. `admission` asks gateways whether the jobs of publishers may
run, `window` orders the generation jobs that a worker holds, and `quarantine` lets a suspected job
run alone. `run` decides what happens to a job, without I/O; `runner` does it, with `delivery` to
publish and settle and `log_reader` to read. `observation` and `metrics` report on it.
"""
