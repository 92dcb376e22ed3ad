"""The HTTP API: each endpoint turns a body into a job, and a log into an answer.

`routes` has the endpoints; the application includes their routers. ``warren batch`` uses `bodies`
and `render` without HTTP.
"""
