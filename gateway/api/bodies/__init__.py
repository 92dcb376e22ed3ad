"""Bodies in, jobs out: what a body may say, checked, and the job that it stands for.

`schemas.parse` reads a body, `draft.draft` builds its job.
"""
