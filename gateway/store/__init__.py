"""The state that outlives gateways: files, batches, responses, conversations, webhooks and usage
records in a database, and the bytes of files.

`database` connects and migrates, and `schema` declares its tables. The other modules and packages
are the operations on one kind of object each; `state` opens all of them.
"""
