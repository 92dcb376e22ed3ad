"""Jobs: taken from their queues, run to their terminal event, acknowledged or put aside.

`consumer` and `unary` take them; `run` answers a generation.
"""
