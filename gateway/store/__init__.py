"""What outlives the gateways: files, batches and webhooks, in a database, and the bytes of files.

`database` connects and migrates, `tables` is the schema, `files`, `uploads`, `batches` and
`webhooks` are the operations, and `blobs` stores bytes in a directory or an object store. `state`
opens all of them.
"""
