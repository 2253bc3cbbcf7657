"""GroupNorm with an optional SiLU."""
