"""Fixtures of several rooms."""

import pytest

from jaxunet.data.source import Source
from jaxunet.data.sources import open_source


@pytest.fixture(scope='session')
def source() -> Source:
    """The 8×8 digits, decoded once for each worker."""
    return open_source('digits:', image_shape=(8, 8, 1))


@pytest.fixture
def counted_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives runs steps that only count."""
    # Most workers need no training.
    from support.counting_step import count_only  # noqa: PLC0415

    from jaxunet.training.session import Session  # noqa: PLC0415

    monkeypatch.setattr(Session, 'compile', count_only)
