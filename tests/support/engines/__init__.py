"""Servers of other engines: `scripted_server` speaks their protocols and fails as it is told,
`frames` has what real servers answered, and `real_servers` finds the servers that the environment
names. `places` has a worker of each engine, and `brake` holds Warren's own engine.
"""
