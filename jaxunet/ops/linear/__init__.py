"""A linear layer at every pixel."""
