"""The state that outlives gateways: files and batches in a database, and the bytes of files.

`database` connects and migrates, `tables` is the schema, `files`, `uploads` and `batches` are the
operations, and `blobs` stores bytes in a directory or an object store. `state` opens all of them.
"""
