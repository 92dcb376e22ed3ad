"""The ledger: writes what requests have used to the database, and prices it.

`recorder` consumes the records of workers, `prices` is the table of prices, and `budgets` says
which tenants have spent what they may.
"""
