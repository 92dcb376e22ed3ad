"""HTTP in, jobs out; events in, Server-Sent Events out."""
