"""Admission of requests: API keys, their scopes and limits, the number of requests, and the size of
bodies.

A request passes `keys.accepted.Keys`, `admission.Admission`, `admission.read_body` or
`multipart.read_form`, and `limits.Limits`. `signer.Signer` signs stream tokens.
"""
