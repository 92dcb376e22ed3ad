"""Simulates a request among workers, gateways and a broker that fail at random.

It drives the real runs of workers and the real readers of logs, without clock and sockets. Each
schedule has a seed.
"""
