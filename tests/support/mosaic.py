"""Mosaic GPU's kernels on a CPU: their bodies run as plain Python on simulated memory and barriers.

Every warpgroup is a thread; a thread runs until it waits. The simulation takes the most harmful
order that the hardware allows: products and stores read their operands as late as possible, when
the kernel waits for them, and TMA writes as early or as late as possible. Shared memory and results
begin as NaN. So a missing wait or a slot that is released too early gives a wrong result, and a
deadlock or a lost phase an error. Registers have no layouts, and swizzles are left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxunet.runtime import device
from pallas_kernels import hopper_views, jax_modules
from pallas_kernels.conv3x3 import hopper_weight_gradient_inline as inline
from pallas_kernels.jax_modules import mosaic_gpu as plgpu

Task = Callable[[], None]
_thread = threading.local()  # of a simulated warpgroup: its `Program`, place, products and stores


@contextlib.contextmanager
def simulated(*, late: bool = False) -> Iterator[None]:
    """Runs Hopper's kernels on the CPU in the block.

    Call them inside of one `jax.jit` with what follows: JAX lets a CPU run 32 programs at a time.
    If 31 wait for the result of a kernel, its own operations may never begin.

    Args:
      late: TMA writes when the kernel waits for it, not at once.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module, names in _stand_ins(late).items():
            for name, value in names.items():
                patch.setattr(module, name, value, raising=name != 'store')
        jax.clear_caches()  # of functions that were traced for a GPU
        with _on_cpu(), device.use(device.Target.HOPPER):
            yield
    jax.clear_caches()


def kernels_of_this_machine() -> contextlib.AbstractContextManager[None]:
    """Takes this machine's GPU, or the simulation if it has none.

    Skips the test on a GPU that does not run the kernels.
    """
    if jax.default_backend() != 'gpu':
        return simulated()
    if lacks := jax_modules.unavailable():
        pytest.skip(lacks)
    return contextlib.nullcontext()


def _on_cpu() -> contextlib.AbstractContextManager[object]:
    return jax.default_device(jax.local_devices(backend='cpu')[0])


@dataclasses.dataclass(frozen=True)
class Ref:
    """A part of memory.

    Fields:
      memory: a view of it, without what lies outside.
      outside: elements before and after it on every axis, which TMA reads as zeros.
      shape: what the kernel sees: the rows are joined differently from the memory's.
      transposed: the kernel sees the transpose of this shape.
    """

    memory: np.ndarray
    outside: tuple[tuple[int, int], ...] = ()
    joined: tuple[int, ...] | None = None
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        every = self.outside or ((0, 0),) * self.memory.ndim
        whole = tuple(n + a + b for n, (a, b) in zip(self.memory.shape, every, strict=True))
        shape = self.joined or whole
        return shape[::-1] if self.transposed else shape

    @property
    def dtype(self) -> np.dtype:
        return self.memory.dtype

    @property
    def T(self) -> Ref:
        return dataclasses.replace(self, transposed=not self.transposed)

    @property
    def at(self) -> _At:
        return _At(self)

    def reshape(self, *shape: int) -> Ref:
        assert math.prod(shape) == math.prod(self.shape), f'{self.shape} has no shape {shape}'
        return dataclasses.replace(self, joined=shape)

    def part(self, index: Any) -> Ref:
        """Returns a part; it may extend beyond the memory."""
        memory = self.memory if self.joined is None else self.memory.reshape(self.joined)
        assert np.shares_memory(memory, self.memory), 'the rows are not contiguous'
        assert not self.transposed
        assert not self.outside
        index = index if isinstance(index, tuple) else (index,)
        index += (slice(None),) * (memory.ndim - len(index))
        pairs = list(zip(index, memory.shape, strict=True))
        gone = any(
            not isinstance(place, (slice, pl.Slice)) and not 0 <= int(place) < size
            for place, size in pairs
        )  # all of it is outside
        inside: list[int | slice] = []
        outside = []
        for place, size in pairs:
            if isinstance(place, (slice, pl.Slice)):
                start, stop = _bounds(place, size)
                low, high = (0 if gone else min(max(end, 0), size) for end in (start, stop))
                before = min(max(-start, 0), stop - start)
                inside.append(slice(low, high))
                outside.append((before, stop - start - before - (high - low)))
            else:
                inside.append(0 if gone else int(place))
        return Ref(memory[tuple(inside)], tuple(outside) if any(map(any, outside)) else ())

    def read(self, outside: float = 0.0) -> np.ndarray:
        value = self.memory
        if self.outside:
            value = np.pad(value, self.outside, constant_values=outside)
        value = value.reshape(self.joined or value.shape)
        return np.array(value.T if self.transposed else value)

    def write(self, value: Any) -> None:
        value = np.asarray(value)
        assert value.dtype == self.dtype, f'{value.dtype} into {self.dtype}'
        value = value.T if self.transposed else value
        if self.outside:
            value = value[
                tuple(slice(a, n - b) for n, (a, b) in zip(value.shape, self.outside, strict=True))
            ]
        self.memory[...] = value.reshape(self.memory.shape)

    def __getitem__(self, index: Any) -> jax.Array:
        ref = self if index is Ellipsis else self.part(index)
        return jnp.asarray(ref.read(outside=np.nan))

    def __setitem__(self, index: Any, value: Any) -> None:
        ref = self if index is Ellipsis else self.part(index)
        assert not ref.outside, 'only TMA may write outside'
        assert value.shape == ref.shape, f'{value.shape} into {ref.shape}'
        ref.write(value)


@dataclasses.dataclass(frozen=True)
class _At:
    ref: Ref

    def __getitem__(self, index: Any) -> Ref:
        return self.ref.part(index)


def _bounds(place: Any, size: int) -> tuple[int, int]:
    if isinstance(place, slice):
        return place.indices(size)[:2]
    return int(place.start), int(place.start) + place.size


@dataclasses.dataclass
class Barrier:
    """A barrier: each phase is complete after `arrivals` arrivals.

    Fields:
      copies: what TMA writes late, and the phase that it belongs to.
      waited: the phases that each thread waited for.
    """

    arrivals: int
    arrived: int = 0
    copies: list[tuple[int, Task]] = dataclasses.field(default_factory=list)
    waited: dict[int, int] = dataclasses.field(default_factory=dict)

    def pending(self, thread: int) -> bool:
        return self.arrived // self.arrivals == self.waited.get(thread, 0)

    def passed(self, thread: int) -> None:
        self.waited[thread] = phase = self.waited.get(thread, 0) + 1
        # A phase is one bit: a thread may be at most one behind.
        assert self.arrived // self.arrivals == phase, 'a thread lost a phase of a barrier'
        ready = [copy for number, copy in self.copies if number < phase]
        self.copies = [(number, copy) for number, copy in self.copies if number >= phase]
        for copy in ready:
            copy()


class _Barriers(list):
    """Barriers, of which a kernel takes one by `at`."""

    @property
    def at(self) -> _Barriers:
        return self


class Program:
    """The threads of one program of a grid. The thread that holds `turn` runs."""

    def __init__(self) -> None:
        self.turn = threading.Condition()
        self.waiting: dict[int, Barrier] = {}
        self.running = 0
        self.error: BaseException | None = None

    def run(self, body: Task, places: Sequence[dict[str, int]]) -> None:
        self.running = len(places)
        threads = [
            threading.Thread(target=self._thread, args=(body, number, place), daemon=True)
            for number, place in enumerate(places)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def wait(self, barrier: Barrier) -> None:
        me = _thread.number
        self.waiting[me] = barrier
        self._check()
        self.turn.wait_for(lambda: self.error is not None or not barrier.pending(me))
        del self.waiting[me]
        if self.error is not None:
            raise SystemExit
        barrier.passed(me)

    def _thread(self, body: Task, number: int, place: dict[str, int]) -> None:
        _thread.program, _thread.number, _thread.place = self, number, place
        _thread.products, _thread.stores = [], []
        with _on_cpu(), self.turn:
            try:
                body()
                assert not _thread.stores, 'a store is not waited for'
            except SystemExit:
                pass
            except BaseException as error:
                self.error = self.error or error
            self.running -= 1
            self._check()
            self.turn.notify_all()

    def _check(self) -> None:
        blocked = [thread for thread, barrier in self.waiting.items() if barrier.pending(thread)]
        if blocked and len(blocked) == self.running and self.error is None:
            self.error = AssertionError(f'deadlock: the threads {blocked} wait')
            self.turn.notify_all()


def _arrive(barrier: Barrier | _Barriers) -> None:
    _one(barrier).arrived += 1
    _thread.program.turn.notify_all()


def _one(barrier: Barrier | _Barriers) -> Barrier:
    if isinstance(barrier, Barrier):
        return barrier
    (only,) = barrier
    return only


class Accumulator:
    """The registers of a product."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.value = np.zeros(shape, np.float32)

    def __getitem__(self, index: Any) -> jax.Array:
        assert index is Ellipsis
        _finish(_thread.products, 0)
        return jnp.asarray(self.value)


def _multiply(accumulator: Accumulator, left: Any, right: Ref) -> None:
    if not isinstance(left, Ref):
        left = Ref(np.asarray(left))

    def run() -> None:
        accumulator.value += left.read().astype(np.float32) @ right.read().astype(np.float32)

    assert left.shape[0] % 64 == 0
    assert accumulator.value.shape == (left.shape[0], right.shape[1])
    _thread.products.append(run)


def _finish(tasks: list[Task], pending: int) -> None:
    while len(tasks) > pending:
        tasks.pop(0)()


def _store(source: Ref, target: Ref) -> None:
    _thread.stores.append(lambda: target.write(source.read().reshape(target.shape)))


def _load(late: bool, source: Ref, target: Ref, barrier: Barrier | _Barriers) -> None:
    def copy() -> None:
        target.write(source.read().reshape(target.shape))

    found = _one(barrier)
    if late:
        found.copies.append((found.arrived // found.arrivals, copy))
    else:
        copy()
    _arrive(found)


def _multiply_taps(
    rows: int, _columns: int, block: int, taps: int, products: Sequence[tuple[int, int]]
) -> Callable[..., jax.Array]:
    """Stands in for `hopper_weight_gradient_inline.multiply_taps`."""

    def step(row: int, column: int, x: Ref, dy: Ref, total: jax.Array) -> jax.Array:
        found = np.array(total)
        for x_half, dy_half in products:
            left = dy.memory[dy_half].reshape(-1, block).astype(np.float32)
            for tap in range(taps):
                first = column + tap
                pixels = x.memory[x_half, row : row + rows, first : first + 8].reshape(-1, block)
                found[:, tap * block : (tap + 1) * block] += left.T @ pixels.astype(np.float32)
        return jnp.asarray(found)

    return step


def _kernel(
    body: Callable[..., None],
    *,
    out_type: Any,
    scratch_types: Sequence[Callable[[], Any]],
    grid: tuple[int, ...],
    grid_names: tuple[str, ...],
    num_threads: int = 1,
    thread_name: str = '',
    **_: object,
) -> Callable[..., Any]:
    """Stands in for `plgpu.kernel`."""

    def run(*operands: Any) -> Any:
        inputs = [Ref(np.asarray(operand)) for operand in operands]
        results = jax.tree.map(lambda s: _uninitialised(s.shape, s.dtype), out_type)
        outputs = [Ref(result) for result in jax.tree.leaves(results)]
        for index in np.ndindex(*grid):
            scratch = [make() for make in scratch_types]
            places = [
                dict(zip(grid_names, map(int, index), strict=True)) | {thread_name: thread}
                for thread in range(num_threads)
            ]
            Program().run(functools.partial(body, *inputs, *outputs, *scratch), places)
        return results

    return functools.partial(jax.pure_callback, run, out_type, vmap_method='sequential')


def _uninitialised(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.full(shape, np.nan, jnp.dtype(dtype))


def _here(simulation: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that simulates in a kernel's body, and is the original elsewhere."""

    def call(*arguments: Any, **options: Any) -> Any:
        inside = hasattr(_thread, 'program')
        return (simulation if inside else original)(*arguments, **options)

    return call


def _when(condition: Any) -> Callable[[Task], None]:
    return lambda body: body() if condition else None


def _fori_loop(start: Any, stop: Any, body: Callable[[np.int32, Any], Any], state: Any) -> Any:
    for n in range(int(start), int(stop)):
        state = body(np.int32(n), state)
    return state


def _pl_loop(start: Any, stop: Any) -> Callable[[Callable[[np.int32], None]], None]:
    return lambda body: _fori_loop(start, stop, lambda n, _: body(n), None)


def _nothing(*_: object, **__: object) -> None:
    pass


def _stand_ins(late: bool) -> dict[Any, dict[str, Any]]:
    """Returns what replaces the names of modules."""
    return {
        lax: {
            'axis_index': _here(lambda name: _thread.place[name], lax.axis_index),
            'fori_loop': _here(_fori_loop, lax.fori_loop),
        },
        pl: {
            'when': _here(_when, pl.when),
            'loop': _here(_pl_loop, pl.loop),
            'run_scoped': lambda body, *scratch: body(*(make() for make in scratch)),
        },
        hopper_views: {'matrix': lambda ref: ref.reshape(math.prod(ref.shape[:-1]), ref.shape[-1])},
        inline: {
            'multiply_taps': _multiply_taps,
            'store_transposed': lambda target, value: target.write(np.asarray(value).T),
        },
        plgpu: {
            'kernel': _kernel,
            'SMEM': lambda shape, dtype, **_: lambda: Ref(_uninitialised(shape, dtype)),
            'Barrier': lambda num_barriers=1, num_arrivals=1: (
                lambda: _Barriers(Barrier(num_arrivals) for _ in range(num_barriers))
            ),
            'ACC': lambda shape, dtype=None: lambda: Accumulator(shape),
            'load': lambda ref, *_, **__: ref[...],
            'store': lambda ref, value, **_: ref.__setitem__(..., value),
            'layout_cast': lambda value, _: value,
            'broadcasted_iota': lambda dtype, shape, axis, **_: lax.broadcasted_iota(
                dtype, shape, axis
            ),
            'wgmma': _multiply,
            'wgmma_wait': lambda pending: _finish(_thread.products, pending),
            'copy_gmem_to_smem': functools.partial(_load, late),
            'copy_smem_to_gmem': _store,
            'wait_smem_to_gmem': lambda pending, **_: _finish(_thread.stores, pending),
            'barrier_wait': lambda barrier: _thread.program.wait(_one(barrier)),
            'barrier_arrive': _arrive,
            'commit_smem': _nothing,
            'set_max_registers': _nothing,
        },
    }
