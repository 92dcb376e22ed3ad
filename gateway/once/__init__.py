"""Equal requests are computed once: their clients read the log of a single execution.

`sameness` decides which requests are equal, and `ids` names executions and the streams of their
clients. `executions` has the executions of this gateway; an `execution` reads its log, the copy of
another gateway or the stored answer, and `relay` passes it on to a client.
"""
