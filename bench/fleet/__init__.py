"""A fleet of synthetic workers: its throughput, its open streams, and what each process costs."""
