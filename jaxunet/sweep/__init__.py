"""Measures many settings, each in its own process: `python -m jaxunet.sweep`."""
