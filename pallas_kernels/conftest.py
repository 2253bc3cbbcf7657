"""The settings of all tests, for those that live beside their kernels."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / 'tests'))

from settings import *  # noqa: F403
