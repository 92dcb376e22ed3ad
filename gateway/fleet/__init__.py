"""The workers from a gateway's point of view: which are alive, the estimated wait for them, and the
publishing of jobs."""
