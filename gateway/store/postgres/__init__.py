"""What is special about PostgreSQL: `url` translates what libpq takes in its URLs."""
