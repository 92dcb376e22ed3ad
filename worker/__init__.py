"""The worker: consumes jobs, runs the model and publishes events.

Commands run a worker with `process.service.run_worker`, and find models with `checkpoints.store`.
"""
