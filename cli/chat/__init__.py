"""``warren chat``: a conversation with a model in the terminal.

`command` defines the command, and `conversation` is the client of the server that answers.
"""
