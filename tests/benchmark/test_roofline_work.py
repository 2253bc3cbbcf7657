"""The work of a training step: counted by hand, and against the network's own products."""

from __future__ import annotations

import functools
import math

import jax
import pytest

from jaxunet.benchmark.roofline.work import (
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    CONVOLUTIONS,
    FEW_CHANNELS,
    FORWARD,
    INPUT_GRADIENT,
    LINEAR,
    NORM_BACKWARD,
    NORM_FORWARD,
    UPDATE,
    WEIGHT_GRADIENT,
    Work,
    step_work,
)
from jaxunet.config import OPS, Config, resolve, to_dict
from jaxunet.model import cost

BATCH, BASE = 2, 16


def network(**model: object) -> Config:
    """Two levels of 8×8 and 4×4 pixels, with attention on the lower one."""
    fields = {
        'base_channels': BASE,
        'channel_mult': (1, 2),
        'attention_resolutions': (4,),
        'num_head_channels': 8,
        'norm_groups': 4,
        'num_classes': 0,
        'label_dropout': 0.0,
    } | model
    changes: dict[str, dict[str, object]] = {'model': fields, 'data': {'batch_size': BATCH}}
    return resolve(to_dict(Config().replace(precision='bfloat16', **changes)))


@functools.cache
def work_of(config: Config) -> list[Work]:
    return step_work(config)


def total(work: list[Work], kind: str, level: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The number of ops of a class, their FLOPs and bytes."""
    found = [w for w in work if w.kind == kind and level in (None, w.level)]
    return len(found), sum(w.flops for w in found), sum(w.bytes for w in found)


def test_work_by_hand() -> None:
    """The 8×8 level has a block of 16 channels on the way down; on the way up one of 32 + 16 and
    one of 16 + 16, which a shortcut projects to 16; then the norm and the convolution to the image.
    """
    work = work_of(network())
    pixels, level = BATCH * 8 * 8, (8, 8)
    products = 4 * 16 * 16 + 48 * 16 + 32 * 16
    shortcuts = 48 * 16 + 32 * 16
    flops = 2 * 9 * pixels * products + 2 * pixels * shortcuts
    # Input, output and weights of each convolution: four of 16 channels, one of 48, one of 32.
    plain = 4 * (pixels * 32 + 9 * 256) + pixels * (48 + 32 + 2 * 16) + 9 * shortcuts
    projected = pixels * (48 + 32) + shortcuts
    forward = total(work, FORWARD, level)
    assert forward == (6, flops, 2 * (plain + 16 * pixels + projected))
    # The shortcuts' gradients read dy again; the plain residual's is dy itself.
    moved = 2 * (plain + projected + 2 * 16 * pixels)
    assert total(work, INPUT_GRADIENT, level) == (8, flops, moved)
    assert total(work, WEIGHT_GRADIENT, level) == (6, flops, 2 * (plain + projected))
    # conv_in has no input gradient.
    few = 2 * 9 * pixels * 16
    assert total(work, FEW_CHANNELS) == (5, 5 * few, 5 * 2 * (17 * pixels + 9 * 16))
    channels = 16 + 16 + 48 + 16 + 32 + 16 + 16
    assert total(work, NORM_FORWARD, level) == (7, 0, 2 * pixels * channels)
    # Their inputs have a shortcut or residual, and the first block's also a skip connection.
    others = 2 * 16 + 48 + 32
    assert total(work, NORM_BACKWARD, level) == (7, 0, 2 * pixels * (3 * channels + others))


def test_work_of_attention_and_update() -> None:
    config = network()
    work = work_of(config)
    tokens, channels, attentions = 16, 32, 4
    flops = 4 * BATCH * tokens**2 * channels
    assert total(work, ATTENTION_FORWARD) == (4, 4 * flops, 4 * 2 * 4 * BATCH * tokens * channels)
    assert total(work, ATTENTION_BACKWARD) == (4, 10 * flops, 4 * 2 * 8 * BATCH * tokens * channels)
    # The norms before attention write their result: qkv is no convolution.
    blocks = [w for w in work if w.kind == NORM_FORWARD and w.level == (4, 4)]
    assert [w.bytes for w in blocks].count(2 * 2 * BATCH * tokens * channels) >= attentions
    # A linear layer has three products, and so have qkv, proj, the embeddings and their projection.
    assert total(work, LINEAR)[0] == 3 * (2 * attentions + 2 + 1)
    kernels = others = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(cost.param_shapes(config)):
        name = jax.tree_util.keystr(path)
        narrow = 'kernel' in name and 'time_embed' not in name
        kernels += math.prod(leaf.shape) * narrow
        others += math.prod(leaf.shape) * (not narrow)
    # Both read of the gradient, then weights, moments and average in and out, and the 16-bit copy.
    moved = kernels * (2 * 2 + 2 * 16 + 2) + others * (2 * 4 + 2 * 16)
    assert total(work, UPDATE) == (1, 0, moved)


@pytest.mark.parametrize(
    'model',
    [
        {'dropout': 0.1, 'conv_resample': True, 'num_heads': 1, 'num_head_channels': 0},
        {'resblock_updown': True, 'scale_shift_norm': True, 'dropout': 0.1, 'num_classes': 10},
    ],
    ids=['ddpm', 'adm'],
)
def test_flops_are_those_of_the_network(model: dict[str, object]) -> None:
    """Two products in the backward pass for each of the forward pass; none for the images; and
    attention's backward pass recomputes one of its two. Of the convolution that upsampling comes
    before, kernels need four of nine.
    """
    config = network(**model)
    by_xla, work = step_work(config, OPS), work_of(config)
    upsampled = 3 * 2 * 9 * BATCH * 8 * 8 * (2 * BASE) ** 2
    assert sum(w.flops for w in by_xla) - sum(w.flops for w in work) == upsampled * 5 // 9
    images = 2 * 9 * BATCH * 8 * 8 * BASE
    recomputed = total(work, ATTENTION_FORWARD)[1] // 2
    whole = 3 * BATCH * cost.forward_flops(config) - images + recomputed
    assert sum(w.flops for w in by_xla) == whole


def test_work_that_xla_does() -> None:
    """It stays, but for the norms, in the classes that XLA's kernels have. What remat recomputes
    is nobody's work.
    """
    config = network()
    flops = sum(w.flops for w in work_of(config))
    by_xla = step_work(config.replace(model={'remat': True}), OPS)
    assert sum(w.flops for w in by_xla) == flops
    assert {w.kind for w in by_xla} == {*CONVOLUTIONS, LINEAR, UPDATE}
