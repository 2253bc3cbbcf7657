"""The state of a run, its checkpoints, and models loaded from any path."""
