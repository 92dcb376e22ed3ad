"""What builds the documentation, and generates the parts that the code decides."""
