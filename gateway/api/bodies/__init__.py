"""Request bodies: their validation, and their conversion to jobs.

`parsing.parse` reads a body, `submission.submission` builds its job.
"""
