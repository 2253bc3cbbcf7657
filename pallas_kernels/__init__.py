"""GPU kernels in Pallas, one folder per op; the references are in `jaxunet.ops`."""
