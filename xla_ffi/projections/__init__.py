"""Projections of one embedding by many layers, in one launch."""
