"""The workers from a gateway's point of view: which are alive, the estimated wait for them, and the
publishing of jobs.

`live_workers.LiveWorkers` lists workers, refuses requests that would wait too long and publishes
jobs, `affinity` chooses a worker for a conversation, `quick.QuickLane` waits for the answer to a
quick job, and `queue_watch.QueueWatch` reads the depth of queues. `gauges` exports all of this as
metrics.
"""
