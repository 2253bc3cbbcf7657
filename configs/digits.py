"""Handwritten digits (UCI optdigits, 1,797 grey images of 8×8, shipped with the package), class-conditional.

    python -m jaxunet.train --config configs/digits.py

Hardware: any; written for 2 CPU cores. Expected: about 3 minutes there; recognisable digits in runs/digits/samples, a column a class.
These are jaxunet's defaults, so this file sets nothing.
"""

from ml_collections import ConfigDict

from jaxunet.config import default_config


def get_config() -> ConfigDict:
    return default_config()
