"""Sweeps: a grid of configs, each measured in a process of its own, and what the measurements say."""
