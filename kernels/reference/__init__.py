"""Plain torch: the specification of every operation."""
