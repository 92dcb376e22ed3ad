"""Texts and tokens for tests: small tokenizers, and public chat templates with conversations for
them."""
