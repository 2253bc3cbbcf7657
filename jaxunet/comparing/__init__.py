"""Training methods against each other at equal wall-clock: what they are, their runs, and what came out."""
