"""``warren size``: how many processes a load takes, and which limit is reached next.

`command` defines the command, `model` computes the deployment, and `costs` reads what a request, an
event and an open stream cost, which `bench.fleet` measures.
"""
