"""Who may ask, and for whom."""
