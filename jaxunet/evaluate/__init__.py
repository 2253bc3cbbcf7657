"""Compares samples with real images, and models by them: `python -m jaxunet.evaluate`."""
