"""Compares samples with real images, and averages of a model: `python -m jaxunet.evaluate`."""
