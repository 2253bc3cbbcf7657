"""Trains a model: one pure step, data parallelism, and the loop around them."""
