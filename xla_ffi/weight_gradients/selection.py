"""Chooses the calls of weight gradients and norms that `grouping` merges.

A merged call comes after everything that does not need its results, and its operands stay in memory
until then. If they are large, the first ones therefore get a call of their own, which everything
else waits for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var
from jax.typing import DTypeLike

from xla_ffi.conv3x3 import parameter_gradients
from xla_ffi.linear import vjp as linear
from xla_ffi.weight_gradients.equations import read, shape_of, split

CONVOLUTION, LINEAR = 'jaxunet_conv3x3_weight_gradient', 'jaxunet_linear_weight_gradient'
NORMS = ('jaxunet_group_norm_gradient', 'jaxunet_group_norm_dropout_gradient')
# Largest product of a call that is merged; it bounds the memory in which operands wait. To refit,
# time steps of batches 64 to 256 with half and with twice as much (tools/gpu/steps.py), and compare
# their memory (tools/gpu/compile.py).
MOST_FLOPS = 120e9
# Bytes of the operands of all calls from which the first images of one size get a call of their
# own. To refit, compare times and memory as above.
MOST_WAITING = 5 * 2**30

Size = tuple[int, ...]  # height, width


class WeightGradient(NamedTuple):
    """A call that computes the weight gradient of one convolution or linear layer.

    Fields:
      target: `CONVOLUTION` or `LINEAR`.
      attributes: by name, without `kernels`.
      kernels: the attribute of that name (`xla_ffi.call`); '' if the call has none.
    """

    equation: JaxprEqn
    target: str
    attributes: dict[str, Any]
    kernels: str

    @property
    def dy(self) -> jax.ShapeDtypeStruct:
        """The gradient of the layer's output, (batch, height, width, features)."""
        return shape_of(self.equation.invars[self.attributes.get('parts', 1)])

    @property
    def results(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes and types of all results but the workspace."""
        return [shape_of(var) for var in self.equation.outvars[:-1]]

    @property
    def weights(self) -> int:
        """The number of weights, those of a shortcut included."""
        kernel, _, *others = self.results
        shortcut = others[:1] if self.attributes.get('residuals', 0) else []
        return sum(math.prod(result.shape) for result in (kernel, *shortcut))

    @property
    def waiting(self) -> int:
        """The bytes of the operands."""
        shapes = [shape_of(atom) for atom in self.equation.invars]
        return sum(shape.size * shape.dtype.itemsize for shape in shapes)

    @property
    def flops(self) -> int:
        """The floating-point operations of the matrix product."""
        return 2 * math.prod(self.dy.shape[:3]) * self.weights

    @property
    def sums(self) -> int:
        """The float32 elements of the workspace that the sums of dy take."""
        batch, *_, features = self.dy.shape
        of_dy = linear.sums_of_dy if self.target == LINEAR else parameter_gradients.sums_of_dy
        return of_dy(batch, features)

    @property
    def own_workspace(self) -> int:
        """The float32 elements of the workspace of the call itself."""
        return shape_of(self.equation.outvars[-1]).shape[0]


class NormGradient(NamedTuple):
    """A call of a norm's gradient whose sums a merged call adds over the samples.

    Fields:
      without: the same call without the gradients of scale and offset.
    """

    equation: JaxprEqn
    without: JaxprEqn

    @property
    def sums(self) -> Var:
        """The sums of each sample, (batch, 2, channels)."""
        return self.without.outvars[0]

    @property
    def gradients(self) -> list[Var]:
        """The gradients of scale and offset, both (1, channels)."""
        return self.equation.outvars[1:3]


class MergedCall(NamedTuple):
    """One merged call.

    Fields:
      norms: those whose sums it adds over the samples.
      end: the number of its last equation.
      blocking: what follows `end` should wait for this call, so that its operands become free.
    """

    weight_gradients: list[WeightGradient]
    norms: list[NormGradient]
    end: int
    blocking: bool


def merged(
    equations: Sequence[JaxprEqn], wanted: set[Var], *, last_apart: bool
) -> list[MergedCall]:
    """Returns the calls to make, in the order in which their operands are known.

    Args:
      equations: of the function.
      wanted: its results.
      last_apart: cut a call in two before the largest images at its end.
    """
    place = {id(equation): number for number, equation in enumerate(equations)}
    calls = []
    largest = _largest_images(equations) if last_apart else None
    for group in _groups(equations):
        *blocking, others = _first_images(group)
        for parts, first in ((blocking, True), (_last_images(others, largest), False)):
            calls += [MergedCall(part, [], place[id(part[-1].equation)], first) for part in parts]
    calls.sort(key=lambda call: call.end)
    weight_gradients = [gradient.equation for call in calls for gradient in call.weight_gradients]
    for norm in _norm_gradients(equations, weight_gradients, wanted) if calls else []:
        number = place[id(norm.equation)]
        later = [call for call in calls if call.end > number]
        (later or calls[-1:])[0].norms.append(norm)
    return calls


def _groups(equations: Sequence[JaxprEqn]) -> list[list[WeightGradient]]:
    """Returns the groups of calls to merge, each of at least two."""
    groups: dict[tuple[DTypeLike, str], list[WeightGradient]] = {}
    dependent: set[Var] = set()  # what depends on a weight gradient
    for equation in equations:
        gradient = _weight_gradient(equation)
        if not dependent.isdisjoint(read([equation])):
            dependent.update(equation.outvars)
        elif gradient is not None:
            groups.setdefault((gradient.dy.dtype, gradient.kernels), []).append(gradient)
            dependent.update(equation.outvars)
    return [group for group in groups.values() if len(group) > 1]


def _resized(group: Sequence[WeightGradient]) -> list[int]:
    """Returns the numbers of layers whose images differ in size from those of the one before."""
    sizes = [gradient.dy.shape[1:3] for gradient in group]
    return [i for i in range(1, len(group)) if sizes[i] != sizes[i - 1]]


def _first_images(group: list[WeightGradient]) -> list[list[WeightGradient]]:
    """Returns the group; if all operands are large, its first images of one size, and the others.

    In a UNet, the first images are those of its last layers, and the largest.
    """
    resized = _resized(group)
    if not resized or sum(gradient.waiting for gradient in group) < MOST_WAITING:
        return [group]
    return [group[: resized[0]], group[resized[0] :]]


def _last_images(group: list[WeightGradient], largest: Size | None) -> list[list[WeightGradient]]:
    """Returns the group, cut in two before its last images if they are of the size `largest`.

    In a UNet, these belong to the first level.
    """
    resized = _resized(group)
    if not resized or group[-1].dy.shape[1:3] != largest:
        return [group]
    return [group[: resized[-1]], group[resized[-1] :]]


def _largest_images(equations: Sequence[JaxprEqn]) -> Size | None:
    """Returns height and width of the largest images of weight gradients, merged or not."""
    calls = filter(None, map(_call, equations))
    return max((call.dy.shape[1:3] for call in calls), key=math.prod, default=None)


def _weight_gradient(equation: JaxprEqn) -> WeightGradient | None:
    """Returns the call that an equation is; None if it is not a call to merge."""
    gradient = _call(equation)
    if gradient is None:
        return None
    narrow = gradient.dy.dtype in (jnp.bfloat16, jnp.float16)
    return gradient if narrow and gradient.flops <= MOST_FLOPS else None


def _call(equation: JaxprEqn) -> WeightGradient | None:
    """Returns the call that an equation is; None if it computes no weight gradient."""
    if equation.primitive.name != 'ffi_call':
        return None
    target = equation.params['target_name']
    if target not in (CONVOLUTION, LINEAR):
        return None
    attributes = dict(equation.params['attributes'])
    return WeightGradient(equation, target, attributes, attributes.pop('kernels', ''))


def _norm_gradients(
    equations: Sequence[JaxprEqn], weight_gradients: Sequence[JaxprEqn], wanted: set[Var]
) -> list[NormGradient]:
    """Returns the norms whose sums the merged calls can add, in the order of the equations.

    They do not depend on weight gradients, and neither these nor the sums of other norms depend on
    their gradients.
    """
    before, _ = split(equations, weight_gradients)
    used, needed, selected = wanted | read(equations), read(weight_gradients), []
    for equation in reversed(before):
        norm = _norm_gradient(equation, used)
        if norm is not None and needed.isdisjoint(norm.gradients):
            selected.append(norm)
        elif needed.isdisjoint(equation.outvars):
            continue
        needed |= read([equation])
    return selected[::-1]


def _norm_gradient(equation: JaxprEqn, used: set[Var]) -> NormGradient | None:
    """Returns the call that an equation is; None if it is no call that adds sums over the samples.

    Args:
      used: the variables that are read or wanted. If the sums are not, they get a new variable,
        because JAX does not name results that are not used.
    """
    if equation.primitive.name != 'ffi_call' or equation.params['target_name'] not in NORMS:
        return None
    attributes = dict(equation.params['attributes'])
    sums, *results = [shape_of(var) for var in equation.outvars]
    if not attributes['samples'] or any(row.shape[0] != 1 for row in results[:2]):
        return None
    # Traced instead of copied: the other parameters of the call belong to the version of JAX.
    shapes = [sums, *results[2:]]
    method = equation.params['vmap_method']
    call = jax.ffi.ffi_call(equation.params['target_name'], shapes, vmap_method=method)
    traced = jax.make_jaxpr(functools.partial(call, **attributes | {'samples': False}))
    (alone,) = traced(*(shape_of(atom) for atom in equation.invars)).jaxpr.eqns
    own = equation.outvars[0]
    outvars = [own if own in used else alone.outvars[0], *equation.outvars[3:]]
    return NormGradient(equation, equation.replace(params=alone.params, outvars=outvars))
