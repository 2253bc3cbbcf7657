"""Fixtures of several rooms."""

import signal
from collections.abc import Iterator

import pytest
from absl import logging

from jaxunet.data.source import Source
from jaxunet.data.sources import open_source


@pytest.fixture(scope='session')
def source() -> Source:
    """The 8×8 digits, decoded once for each worker."""
    return open_source('digits:', image_shape=(8, 8, 1))


def _logged(monkeypatch: pytest.MonkeyPatch, *levels: str) -> list[str]:
    lines: list[str] = []
    for level in levels:
        monkeypatch.setattr(
            logging, level, lambda text, *values: lines.append(text % values if values else text)
        )
    return lines


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines that are logged as information from here on."""
    return _logged(monkeypatch, 'info')


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines that are logged as warnings from here on."""
    return _logged(monkeypatch, 'warning')


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines that are logged as information or as warnings from here on."""
    return _logged(monkeypatch, 'info', 'warning')


@pytest.fixture
def counted_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives runs steps that only count."""
    # Most workers need no training.
    from support.counting_step import count_only  # noqa: PLC0415

    from jaxunet.training.session import Session  # noqa: PLC0415

    monkeypatch.setattr(Session, 'compile', count_only)


@pytest.fixture
def hangup() -> Iterator[None]:
    """SIGHUP does what it does in a terminal, also if pytest runs under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
