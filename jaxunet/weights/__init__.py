"""Reads and writes weights: `.bin`, `.pt` and `.safetensors`, of this and of other programs."""

from jaxunet.weights.files import (
    EXTENSIONS,
    PROGRAMS,
    Weights,
    extension_of,
    read_classifier,
    read_weights,
    write_classifier,
    write_weights,
)
from jaxunet.weights.inference import Stated
from jaxunet.weights.names import check_tree

__all__ = [
    'EXTENSIONS',
    'PROGRAMS',
    'Stated',
    'Weights',
    'check_tree',
    'extension_of',
    'read_classifier',
    'read_weights',
    'write_classifier',
    'write_weights',
]
