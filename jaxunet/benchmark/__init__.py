"""Times whole training steps and their parts, side by side: `python -m jaxunet.benchmark`."""
