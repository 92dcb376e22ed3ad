"""Published models cut to a few layers, with random weights: the time of their steps beside the
machine's limits and beside llama-server, and the memory of their sequences."""
