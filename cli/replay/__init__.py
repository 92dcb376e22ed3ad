"""``warren replay``: answers stored requests again with another model, and compares the answers.

`command` defines the command. `stored_requests` reads what the gateway has stored, `sending`
answers it again, `kinds` reads the answers, `comparison` finds where two answers part, and `report`
counts.
"""
