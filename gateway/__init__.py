"""HTTP in, jobs out; events in, Server-Sent Events out.

`app.create_app` is the application, `server` runs it.
"""
