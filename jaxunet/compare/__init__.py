"""Compares training methods by quality against time: `python -m jaxunet.compare`."""

import time

# `time.perf_counter()` at the start of a command of this package: its imports take seconds.
BEGAN = time.perf_counter()
