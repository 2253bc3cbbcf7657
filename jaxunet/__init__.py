"""jaxunet: diffusion UNets in JAX, trained on hand-written GPU kernels."""

__version__ = '0.1.0'
