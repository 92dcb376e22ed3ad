"""The ledger: writes what requests have used to the database, and prices it.

`recorder` consumes the records of workers, and `prices` is the table of prices.
"""
