"""Weights in and out: unet.cu `.bin`, guided-diffusion `.pt` and `.safetensors` <-> our parameter tree."""

from jaxunet.weights.files import EXTENSIONS, Weights, read_weights, write_weights
from jaxunet.weights.names import check_tree

__all__ = ['EXTENSIONS', 'Weights', 'check_tree', 'read_weights', 'write_weights']
