"""Compares training methods by quality against time: `python -m jaxunet.compare`."""
