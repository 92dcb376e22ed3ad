"""The worker process: its tasks, its health port, its metrics and its watchdog.

`service.run_worker` runs a worker, over a `prepared_queues.WorkerBus`; the command line needs
nothing else.
"""
