"""The norms of recent gradients, by which a step detects a spike (`train.spike_sigmas`)."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

WINDOW = 200  # number of taken steps whose norms are kept
FEWEST = 20  # with fewer norms, no step counts as a spike


class RecentNorms(NamedTuple):
    """The gradient norms, before clipping, of the last `WINDOW` steps that were taken.

    Attributes:
      norms: the norm of taken step n (from 0) at n modulo `WINDOW`; 0 where there is none yet.
      taken: steps taken.
      spikes: steps that were skipped as spikes.
    """

    norms: Float[Array, ' window']
    taken: Int[Array, '']
    spikes: Int[Array, '']

    @classmethod
    def start(cls) -> RecentNorms:
        """Returns the state before step 0."""
        zero = jnp.zeros((), jnp.int32)
        return cls(jnp.zeros(WINDOW, jnp.float32), zero, zero)

    def is_spike(self, norm: Float[Array, ''], sigmas: float) -> Bool[Array, '']:
        """Returns True if the norm is more than `sigmas` standard deviations above the mean.

        With fewer than `FEWEST` norms, it returns False.
        """
        known = jnp.arange(WINDOW, dtype=jnp.int32) < self.taken
        count = jnp.clip(self.taken, 1, WINDOW).astype(jnp.float32)
        mean = jnp.sum(self.norms) / count
        variance = jnp.sum(jnp.where(known, jnp.square(self.norms - mean), 0.0)) / count
        return (self.taken >= FEWEST) & (norm > mean + sigmas * jnp.sqrt(variance))

    def after(
        self, norm: Float[Array, ''], *, taken: Bool[Array, ''], spike: Bool[Array, '']
    ) -> RecentNorms:
        """Returns the state after a step; its norm is stored only if the step was taken."""
        place = self.taken % WINDOW
        return RecentNorms(
            self.norms.at[place].set(jnp.where(taken, norm, self.norms[place])),
            self.taken + taken.astype(jnp.int32),
            self.spikes + spike.astype(jnp.int32),
        )
