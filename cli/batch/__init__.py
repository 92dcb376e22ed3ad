"""``warren batch``: a file of requests in, a file of answers out, through a model's batch queue.

`command` is the command, `pipeline.run_batch` does the work.
"""
