"""Checks that plots can be drawn: matplotlib is an extra."""

from __future__ import annotations

import importlib.util

from jaxunet.runtime.errors import UserError


def check_plots(otherwise: str = 'pass --noplot') -> None:
    """Raises `UserError` unless plots can be drawn; `otherwise` is what to do without them."""
    if importlib.util.find_spec('matplotlib') is None:
        raise UserError(
            '--plot: needs matplotlib, which is not installed; pip install "jaxunet[plots]", or '
            f'{otherwise}'
        )
