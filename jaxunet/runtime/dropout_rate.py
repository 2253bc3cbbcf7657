"""The supported rates of dropout, which compares 16 random bits per element with rate · 2¹⁶."""

from __future__ import annotations

LEVELS = 2**16  # values of 16 bits
# The threshold is rounded: rates up to this one become 0, and rates from 1 minus this one become 1.
HALF = 0.5 / LEVELS
SUPPORTED = '0, or more than 2⁻¹⁷ (7.6e-06) and less than 1 − 2⁻¹⁷'  # for messages


def is_supported(rate: float) -> bool:
    """Returns True for 0, and for rates whose threshold drops some elements and keeps others."""
    return rate == 0 or HALF < rate < 1 - HALF
