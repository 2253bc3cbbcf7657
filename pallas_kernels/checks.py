"""Checks the surrounding `jax.shard_map`; every op of the package calls this."""

from __future__ import annotations

from jaxunet.ops.transformations import is_checked


def check_shard_map(op: str) -> None:
    """Checks that no surrounding `jax.shard_map` tracks how results vary over the devices.

    Raises:
      ValueError: it has `check_vma=True`, for which Pallas's calls have no rule.
    """
    if is_checked():
        raise ValueError(
            f'{op}: the Pallas kernels run under jax.shard_map with check_vma=False only; '
            f'pass that, or use the cuda or xla backend'
        )
