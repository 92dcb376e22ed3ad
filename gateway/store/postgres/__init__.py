"""The specifics of PostgreSQL: `url` translates the parameters that libpq takes in its URLs."""
