"""What the GPU's side costs: kernels beside their floors, steps, the engine, and the peers."""
