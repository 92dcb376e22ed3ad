"""Request bodies: their validation, and their conversion to jobs.

`schemas.parse` reads a body, `submission.submission` builds its job.
"""
