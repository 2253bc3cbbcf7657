"""Reads and writes weights of this and of other programs: files, and folders of diffusers.

In all of these modules, `source` is the name of a file, with which the messages of errors begin.
"""

from jaxunet.weights.diffusers_folder import is_folder
from jaxunet.weights.diffusers_output import names_folder
from jaxunet.weights.diffusers_output import write as write_folder
from jaxunet.weights.files import (
    EXTENSIONS,
    PROGRAMS,
    WRITTEN,
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
    'WRITTEN',
    'Stated',
    'Weights',
    'check_tree',
    'extension_of',
    'is_folder',
    'names_folder',
    'read_classifier',
    'read_weights',
    'write_classifier',
    'write_folder',
    'write_weights',
]
