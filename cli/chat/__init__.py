"""``warren chat``: a terminal in which one talks to a model.

`command` defines the command, and `conversation` is the client of the server that answers.
"""
