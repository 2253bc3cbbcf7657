"""XLA's flags in tests and in the processes that they start."""

import jaxlib.version

# Quick compiling, as most of the time goes there.
QUICK = '--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1'
if jaxlib.version.__version_info__ < (0, 11):
    QUICK += ' --xla_cpu_use_fusion_emitters=false'  # halves it; later versions have no such choice
