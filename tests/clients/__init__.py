"""Clients that applications use, each in an environment of its own, against real deployments."""
