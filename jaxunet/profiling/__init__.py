"""Profiling: a trace of steady training steps, read back into operations with phases, and reported as tables, CSV, plot and trace file."""
