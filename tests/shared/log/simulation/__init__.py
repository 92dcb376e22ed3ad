"""Simulates one request among workers, gateways and a broker that fail at random.

It uses only the rules of `shared.log` and `shared.log.attempt`, without clock and sockets. Each
schedule has one seed.
"""
