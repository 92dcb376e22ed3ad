"""What the gateways of a test process share, so that each of them starts quickly."""
