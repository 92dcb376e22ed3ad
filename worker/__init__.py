"""Jobs in, events out: the process that computes."""
