"""Reads and writes weights: unet.cu's `.bin`, guided-diffusion's `.pt`, and `.safetensors`."""

from jaxunet.weights.files import EXTENSIONS, Weights, read_weights, write_weights
from jaxunet.weights.names import check_tree

__all__ = ['EXTENSIONS', 'Weights', 'check_tree', 'read_weights', 'write_weights']
