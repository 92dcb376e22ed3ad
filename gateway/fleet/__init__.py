"""The workers behind the broker: which are alive, how long their queues take, and jobs for them."""
