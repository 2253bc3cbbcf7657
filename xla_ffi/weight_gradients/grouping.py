"""Merges the calls of a function that compute small weight gradients into one call, or a few.

At small batches, a weight gradient is too little work for the GPU, and its call takes two launches:
the kernel, and the sum of its splits. One call of `jaxunet_weight_gradients` computes many of them
in a few launches. Its last launch also adds the gradients of norms over the samples. `selection`
chooses the calls to merge.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var
from jaxtyping import Array

from jaxunet.ops.transformations import vary, varying_axes
from jaxunet.runtime import device
from xla_ffi.conv3x3 import parameter_gradients
from xla_ffi.conv3x3.split_k import MULTIPROCESSORS
from xla_ffi.weight_gradients.equations import (
    Values,
    needed,
    read,
    run,
    shape_of,
    split,
    value_of,
    variables,
)
from xla_ffi.weight_gradients.selection import LINEAR, MergedCall, WeightGradient, merged

TARGET = 'jaxunet_weight_gradients'
BLOCKS = 4  # blocks per multiprocessor whose partial sums the workspace holds

Run = TypeVar('Run', bound=Callable[..., Any])


def grouped_if_faster(function: Run, devices: int = 1) -> Run:
    """Returns `grouped(function)` where it is faster: on Hopper, with the fastest kernels.

    The portable kernels compute the weight gradients of a call one after the other.

    Args:
      devices: if there are several, they sum the gradients, so the call is cut in two: all
        gradients but those of the first level can then be summed beside the backward pass of
        that level.
    """
    if device.family() is not device.Target.HOPPER:
        return function
    return grouped(function, last_apart=devices > 1)


def grouped(function: Run, *, last_apart: bool = False) -> Run:
    """Returns a function with the same results that computes its small weight gradients together.

    It merges the calls of `CONVOLUTION` and `LINEAR` whose images have 16 bits and whose product
    has at most `MOST_FLOPS`, separately by type. If their operands take `MOST_WAITING` bytes or
    more, the first ones get a call of their own. It leaves calls alone that depend on a merged
    call, and calls inside loops, branches and functions of their own (`jax.lax.scan`,
    `jax.lax.cond`, `jax.checkpoint`, `jax.jit`).

    Calls of `NORMS` whose samples share scale and offset then return only the sums of each sample,
    and a merged call adds them. It leaves those alone whose gradients a merged call needs.

    Args:
      function: takes positional arguments, trees of arrays, and returns a tree of arrays; it is
        traced.
      last_apart: the largest images at the end of the backward pass, in a UNet those of its first
        level, get a call of their own.
    """

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        results = _evaluate(closed, jax.tree.leaves(arguments), last_apart)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run  # type: ignore[return-value]


def _evaluate(closed: ClosedJaxpr, arguments: Sequence[Array], last_apart: bool) -> list[Array]:
    """Runs a traced function with its merged calls."""
    jaxpr = closed.jaxpr
    wanted = variables(jaxpr.outvars)
    calls = merged(jaxpr.eqns, wanted, last_apart=last_apart)
    weight_gradients = [gradient.equation for call in calls for gradient in call.weight_gradients]
    norms = [(norm.equation, norm.without) for call in calls for norm in call.norms]
    before, after = split(jaxpr.eqns, weight_gradients, norms)
    after = needed(after, wanted)
    values: Values = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *arguments), strict=True)
    )
    # The parts of the function have other arguments and results than the function.
    source = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    later = wanted | read(weight_gradients) | read(after)
    later |= {norm.sums for call in calls for norm in call.norms}
    place = {id(equation): number for number, equation in enumerate(jaxpr.eqns)}
    place |= {id(without): place[id(equation)] for equation, without in norms}
    for call in calls:
        if call.blocking:
            part = [equation for equation in before if place[id(equation)] < call.end]
            before = before[len(part) :]
            run(part, values, later | read(before), source)
            _wait(part, read(before), _call(call, values), values)
    run(before, values, later, source)
    for call in calls:
        if not call.blocking:
            _call(call, values)
    run(after, values, wanted, source)
    return [value_of(atom, values) for atom in jaxpr.outvars]


def _wait(
    done: Sequence[JaxprEqn], reads: set[Var], results: Sequence[Var], values: Values
) -> None:
    """Lets equations that follow wait for the results of a call.

    Args:
      done: the equations before the call.
      reads: what the equations that follow read. The last equation that computes some of it, in a
        backward pass that of the gradients with which it goes on, becomes known with the call.
    """
    for equation in reversed(done):
        if known := [var for var in equation.outvars if var in reads]:
            given = [values[var] for var in known]
            waited, _ = jax.lax.optimization_barrier((given, values[results[0]]))
            values |= zip(known, waited, strict=True)
            return


def _call(call: MergedCall, values: Values) -> list[Var]:
    """Runs a merged call and adds its results to the values; returns their names."""
    group, norms = call.weight_gradients, call.norms
    operands = [value_of(atom, values) for gradient in group for atom in gradient.equation.invars]
    operands += [values[norm.sums] for norm in norms]
    names = [var for gradient in group for var in gradient.equation.outvars[:-1]]
    names += [var for norm in norms for var in norm.gradients]
    shapes = [*map(shape_of, names), jax.ShapeDtypeStruct((_workspace(group),), jnp.float32)]
    attributes: dict[str, Any] = {'members': np.int64(len(group)), 'norms': np.int64(len(norms))}
    for i, gradient in enumerate(group):
        attributes[f'linear_{i}'] = gradient.target == LINEAR
        attributes |= {f'{name}_{i}': value for name, value in gradient.attributes.items()}
    if group[0].kernels:
        attributes['kernels'] = group[0].kernels
    # Not by `xla_ffi.call`: the equations that make the results vary over mesh axes are among those
    # that follow.
    handler = jax.ffi.ffi_call(TARGET, shapes, vmap_method='sequential')
    with jax.named_scope('backward'):  # its phase for jaxunet.profile
        *results, _ = handler(*vary(operands, varying_axes(operands)), **attributes)
    values |= zip(names, results, strict=True)
    return names


def _workspace(group: Sequence[WeightGradient]) -> int:
    """Returns the float32 elements of the workspace of a merged call.

    It holds the gradients and the sums of dy of all layers, and partial sums of `BLOCKS` blocks
    per multiprocessor, but never more than the workspaces of the layers' own calls.
    """
    blocks = BLOCKS * device.multiprocessors(MULTIPROCESSORS)
    partial = blocks * parameter_gradients.PARTIAL_SUMS
    gradients = sum(gradient.weights + gradient.sums for gradient in group)
    return min(gradients + partial, sum(gradient.own_workspace for gradient in group))
