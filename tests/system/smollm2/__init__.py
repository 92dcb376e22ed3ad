"""Deployments of the real model, which last as long as the tests of this package."""
