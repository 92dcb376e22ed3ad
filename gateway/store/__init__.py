"""What outlives the gateways: files, batches, webhooks, responses and conversations, in a database,
and the bytes of files.

`database` connects and migrates, `tables` is the schema, `files`, `uploads`, `batches`, `webhooks`,
`responses` and `conversations` are the operations, and `blobs` stores bytes in a directory or an
object store. `state` opens all of them.
"""
