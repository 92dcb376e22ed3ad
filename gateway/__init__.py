"""The gateway: HTTP requests become jobs, events become Server-Sent Events.

`app.create_app` builds the application, `server` runs it.
"""
