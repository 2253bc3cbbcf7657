"""The budget of a training step: each class of kernels beside the least time it could take."""
