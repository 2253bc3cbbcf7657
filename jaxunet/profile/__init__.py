"""Profiles training steps: `python -m jaxunet.profile`."""
