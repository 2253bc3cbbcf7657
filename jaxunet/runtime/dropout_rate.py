"""The rates of dropout, which compares 16 random bits of an element with rate · 2¹⁶, rounded."""

from __future__ import annotations

LEVELS = 2**16  # values of 16 bits
# Rates from 0 to this one are rounded to 0, and those from 1 minus this one to 1.
HALF = 0.5 / LEVELS
SUPPORTED = '0, or more than 2⁻¹⁷ (7.6e-06) and less than 1 − 2⁻¹⁷'  # for messages


def is_supported(rate: float) -> bool:
    """Returns True for 0, and for rates whose threshold drops some elements and keeps others."""
    return rate == 0 or HALF < rate < 1 - HALF
