"""The workers from a gateway's point of view: which are alive, the estimated wait for them, and the
publishing of jobs.

`live_workers.LiveWorkers` lists workers and admits requests, `affinity` chooses a worker for a
conversation, `publishing.JobPublisher` publishes a job, `quick.QuickLane` waits for the answer to a
quick one, and `queue_watch.QueueWatch` reads the depth of queues. `gauges` exports all of this as
metrics.
"""
