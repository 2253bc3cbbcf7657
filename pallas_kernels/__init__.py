"""GPU kernels, one folder an op, each beside its plain reference."""
