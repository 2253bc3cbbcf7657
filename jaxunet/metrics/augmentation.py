"""Random changes to the classifier's training images: mirroring, crops, cutout and CutMix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxunet.metrics.classifier_recipe import Recipe

Maps = Float[Array, 'images height width colours']


def augment(x: Maps, key: Array, recipe: Recipe) -> Maps:
    """Mirrors each image, crops it out of its reflection-padded copy and blanks a square.

    Source of the blank square: DeVries and Taylor 2017 (arXiv 1708.04552).

    Args:
      x: normalised images; blank pixels are 0.
      key: a JAX random key.
      recipe: its `flip`, `crop` and `cutout` are used.
    """
    height, width = x.shape[1:3]
    pads = [round(recipe.crop * side) for side in (height, width)]
    holes = [round(recipe.cutout * side) for side in (height, width)]
    padded = x
    if max(pads):
        edges = ((0, 0), (pads[0], pads[0]), (pads[1], pads[1]), (0, 0))
        padded = jnp.pad(x, edges, mode='reflect')

    def one(image: Array, key: Array) -> Array:
        flip, *places = jax.random.split(key, 5)
        top, left = (
            jax.random.randint(k, (), 0, 2 * pad + 1)
            for k, pad in zip(places[:2], pads, strict=True)
        )
        image = lax.dynamic_slice(image, (top, left, jnp.int32(0)), (height, width, image.shape[2]))
        if recipe.flip:
            image = jnp.where(jax.random.bernoulli(flip), image[:, ::-1], image)
        if min(holes):
            # The whole square lies inside the image.
            starts = [
                jax.random.randint(k, (), 0, side - hole + 1)
                for k, side, hole in zip(places[2:], (height, width), holes, strict=True)
            ]
            inside = [
                (jnp.arange(n) >= s) & (jnp.arange(n) < s + hole)
                for n, s, hole in zip((height, width), starts, holes, strict=True)
            ]
            image = jnp.where((inside[0][:, None] & inside[1][None])[:, :, None], 0.0, image)
        return image

    return jax.vmap(one)(padded, jax.random.split(key, x.shape[0]))


def mix(
    x: Maps,
    target: Float[Array, 'images classes'],
    key: Array,
    probability: float | Float[Array, ''],
) -> tuple[Maps, Float[Array, 'images classes']]:
    """Applies CutMix (Yun et al. 2019, arXiv 1905.04899, α = 1) with this probability.

    In every image of the batch, the same rectangle is replaced by that of its neighbour in the
    batch, and its target takes the same share of the neighbour's target. The batch is in random
    order, so neighbours are random. The rectangle's centre is uniform, and so is its share of the
    area before the image's edges clip it.
    """
    happens, area, *places = jax.random.split(key, 4)
    # The rectangle's side as a share of the image's.
    share = jnp.where(
        jax.random.bernoulli(happens, probability), jnp.sqrt(jax.random.uniform(area)), 0.0
    )
    down, across = (
        jnp.abs(jnp.arange(side, dtype=jnp.float32) + 0.5 - side * jax.random.uniform(k))
        < share * side / 2
        for k, side in zip(places, x.shape[1:3], strict=True)
    )
    hole = down[:, None] & across[None]
    taken = jnp.mean(hole.astype(jnp.float32))
    mixed = jnp.where(hole[None, :, :, None], jnp.roll(x, 1, 0), x)
    return mixed, (1 - taken) * target + taken * jnp.roll(target, 1, 0)
