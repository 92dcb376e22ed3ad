"""The state that outlives gateways: files, batches, responses, conversations, webhooks and usage
records in a database, and the bytes of files.

`database` connects and migrates, `tables` is the schema, and `blobs` stores bytes in a directory or
an object store. The other modules are the operations on one kind of object each; `state` opens all
of them.
"""
