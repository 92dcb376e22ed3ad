"""Files: `records` are their rows in the database, `uploads` are files that arrive in parts, and
`blobs` stores bytes in a directory or an object store. `free_space` watches the disk."""
