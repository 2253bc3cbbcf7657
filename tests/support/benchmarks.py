"""Plans of benchmarks, stand-ins for their sides, and their rows."""

from __future__ import annotations

from collections.abc import Callable

from jaxunet.benchmark.cases import Benchmark, Competitor, Prepared, make_plan
from jaxunet.config import Config
from jaxunet.ops.backends import choose
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.rows import Row
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


def example(**changes: object) -> Row:
    """Returns a row of made-up numbers; those that may be null are."""
    row = {name: None for name in FIELDS | MEASURED} | {
        'kind': 'benchmark', 'device': 'GPU', 'driver': '5', 'versions': {'jax': '1'}, 'git': 'abc',
        'config': 'x', 'precision': 'float32', 'batch_size': 8, 'direction': 'step',
        'backend': 'xla', 'median_ms': 2.0, 'quartiles_ms': [1, 3], 'images_per_second': 4000.0,
        'mfu': 0.5, 'compile_s': 3.0, 'matmul_flops': 1e12, 'copy_bytes_per_s': 1e12,
        'steps_per_call': 1,
    }  # fmt: skip
    return row | changes


def fake_sides(
    fails: Callable[[str, int], bool], closed: Callable[[str], object] = str
) -> Callable[..., Competitor]:
    """Returns a stand-in for `run.make_side`, which finds no side called `missing`.

    The side `dies` runs until `fails(direction, steps)`; `closed` gets `SIDE DIRECTION` of each
    that ends.
    """

    def make(name: str, *_: object) -> Competitor:
        if name == 'missing':
            raise UserError('this machine has no such kernels')

        class Fake:
            def prepare(self, direction: str) -> Prepared:
                def work(steps: int) -> None:
                    if name == 'dies' and fails(direction, steps):
                        raise RuntimeError('out of memory')

                return Prepared(work, 0.1, 0.2, 10, 20, {}, lambda: closed(f'{name} {direction}'))

        return Fake()

    return make


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
