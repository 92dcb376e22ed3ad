"""The ledger: writes the usage of requests to the database, and prices it.

`recorder` consumes the records of workers, `prices` is the table of prices, and `budgets` says
which tenants have spent their budgets.
"""
