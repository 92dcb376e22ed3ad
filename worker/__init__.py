"""The worker: consumes jobs, runs the model and publishes events."""
