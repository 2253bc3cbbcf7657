"""Fixtures of several rooms."""

import pytest

from jaxunet.data.source import Source
from jaxunet.data.sources import open_source


@pytest.fixture(scope='session')
def source() -> Source:
    """The 8×8 digits, decoded once for each worker."""
    return open_source('digits:', image_shape=(8, 8, 1))
