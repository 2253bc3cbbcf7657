"""Compares samples with real images, and averages of a model: `python -m jaxunet.evaluate`."""

from jaxunet import is_function_too

is_function_too(__name__)
