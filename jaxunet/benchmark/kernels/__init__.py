"""Times each kernel beside XLA: `python -m jaxunet.benchmark.kernels`."""
