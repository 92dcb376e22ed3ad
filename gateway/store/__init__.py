"""The state that outlives gateways: files, batches, responses, conversations, webhooks and usage
records in a database, and the bytes of files.

`database` connects and migrates, and `schema` declares its tables. Each of the other modules and
packages has the operations on a kind of object; `state` opens all of them.
"""
