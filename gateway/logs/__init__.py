"""The logs of requests: declared, read, passed on and left."""
