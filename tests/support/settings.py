"""XLA's flags in tests and in the processes that they start."""

import jaxlib.version

# Compile quickly, because tests spend most of their time compiling.
QUICK = '--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1'
if jaxlib.version.__version_info__ < (0, 11):
    QUICK += ' --xla_cpu_use_fusion_emitters=false'  # halves it; later versions lack this flag
