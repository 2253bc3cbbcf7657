"""jaxunet: diffusion UNets in JAX, trained on hand-written GPU kernels."""

from jaxunet.runtime.interrupt import quiet_while_importing

__version__ = '0.2.0'

quiet_while_importing()
