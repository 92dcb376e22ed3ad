"""One module for each group of endpoints, with a ``router`` that `gateway.app` includes."""
