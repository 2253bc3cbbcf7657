"""Plans of benchmarks, and the fields of their rows."""

from __future__ import annotations

from jaxunet.benchmark.cases import Benchmark, make_plan
from jaxunet.config import Config
from jaxunet.ops.backends import choose
from jaxunet.runtime.errors import UserError
from support.tiny import tiny_config

FIELDS = {
    'kind', 'time', 'git', 'device', 'devices', 'driver', 'versions', 'command', 'config', 'images', 'precision',  # noqa: E501
    'batch_size', 'rounds', 'steps_per_round', 'matmul_flops', 'copy_bytes_per_s', 'forward_flops', 'backend', 'direction', 'reference',  # noqa: E501
    'error',
}  # fmt: skip
MEASURED = {
    'median_ms', 'quartiles_ms', 'ratio', 'ratio_quartiles', 'images_per_second', 'mfu', 'bytes_moved', 'bandwidth_share', 'peak_bytes',  # noqa: E501
    'lower_s', 'compile_s', 'steps_per_call', 'concurrent_kernels', 'ops', 'bytes_source', 'peak_source', 'watts', 'clock_mhz', 'mj_per_image',  # noqa: E501
}  # fmt: skip


def plan(config: Config | None = None, **changes: list[str] | int) -> Benchmark:
    lists: dict[str, list[str] | int] = {
        name: [] for name in ('backends', 'peers', 'precisions', 'batch_sizes', 'directions')
    }
    return make_plan(
        'tiny', config or tiny_config(), **(lists | {'rounds': 2, 'steps': 1} | changes)
    )


def available(backend: str) -> bool:
    try:
        choose(backend)
    except UserError:
        return False
    return True
