"""Poolers between gateways and PostgreSQL."""
