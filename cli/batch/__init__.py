"""``warren batch``: answers a file of requests through a model's batch queue.

`command` defines the command; `pipeline.run_batch` does the work.
"""
