"""One module for each group of endpoints, with a `router` for the application."""
