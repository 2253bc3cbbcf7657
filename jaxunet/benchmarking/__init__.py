"""Measuring: the sides that `python -m jaxunet.benchmark` compares, their timing, and the rows that measurements are kept in."""
