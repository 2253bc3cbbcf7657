"""The budget of a training step: time and lower bound of each class of kernels."""
