"""The workers as seen by a gateway: which are alive, how long their queues are, and jobs for
them."""
