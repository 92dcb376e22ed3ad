"""The HTTP API: for each endpoint a body to a job, and a log to an answer.

`routes` has the endpoints; the application includes their routers. A batch on the command line uses
`bodies` and `render` without HTTP.
"""
