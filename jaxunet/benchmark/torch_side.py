"""The PyTorch side of a benchmark: the same network, loss, optimizer and averages, run three ways.

Importing this module needs PyTorch (extra `peers`).
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import time
from collections.abc import Callable

import jax
import numpy as np
import torch

from jaxunet.benchmark.cases import PYTORCH, Prepared
from jaxunet.benchmark.torch_loss import make_loss
from jaxunet.benchmark.torch_unet import build_torch_unet
from jaxunet.config import Config
from jaxunet.data import pipeline
from jaxunet.data.source import Source
from jaxunet.model.unet import Params
from jaxunet.runtime.errors import UserError
from jaxunet.weights.fields import NVLABS_ONLY
from jaxunet.weights.guided_diffusion import from_tree

EAGER, COMPILED, BEST = PYTORCH
# Fields that have only one value in the peer.
ONLY = {
    'diffusion.rescale_timesteps': False,
    'diffusion.kl_loss': False,
    'timesteps.sampler': 'uniform',
    'loss.weighting': 'uniform',
    **{f'model.{name}': value for name, value in NVLABS_ONLY.items()},
    'model.remat': False,
    'model.low_res_size': (),
    'data.noise_candidates': 1,
    'data.noise_assignment': 'none',
    'data.bits': 8,
    'ema.widths': (),
}
WARM_UP = 3  # calls before capture or measurement, as PyTorch's notes on CUDA graphs advise

# x0, t, noise, labels.
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


class TorchSide:
    """One of `cases.PYTORCH` at one batch size and precision, under autocast for 16-bit types.

    It does the same work as our training step. Three things differ in their values, not in their
    cost: the learning rate and the decay of the averages are constant, and batches are drawn with
    replacement.

    Args:
      config: from `cases.benchmark_config`, with the precision and batch size of the case.
      source: the images, which are copied to the device.
      params: our parameters, which the network starts from.

    Raises:
      UserError: the mode needs a GPU that PyTorch does not see, or the config needs a feature that
        the peer lacks.
    """

    def __init__(self, config: Config, mode: str, source: Source, params: Params) -> None:
        check(config, mode, source)
        self.config, self.best, self.gpu = config, mode == BEST, jax.default_backend() == 'gpu'
        self.device = torch.device('cuda:0' if self.gpu else 'cpu')
        torch.set_float32_matmul_precision('high')  # TF32, as in JAX
        torch.manual_seed(config.seed)

        def put(value: np.ndarray) -> torch.Tensor:
            return torch.tensor(value, device=self.device)

        images, labels = pipeline.load_all(source, progress=False)
        self.images = put(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
        self.labels = put(labels.astype(np.int64))
        self.model = build_torch_unet(config)
        state = from_tree(jax.device_get(params), config, new_attention_order=False)
        self.model.load_state_dict(
            {name: torch.from_numpy(value.copy()) for name, value in state.items()}
        )
        self.model.to(
            self.device, memory_format=torch.channels_last if self.best else torch.contiguous_format
        )
        self.parameters = list(self.model.parameters())
        self.averages = [[p.detach().clone() for p in self.parameters] for _ in config.ema.rates]
        o = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=o.learning_rate,
            betas=(o.betas[0], o.betas[1]),
            eps=o.eps,
            weight_decay=o.weight_decay,
            fused=self.best,
            capturable=self.best,
        )
        loss = make_loss(config, self.model, put)
        self.loss = loss if mode == EAGER else torch.compile(loss, dynamic=False, fullgraph=True)

    def prepare(self, direction: str) -> Prepared:
        """Compiles (for `best`, captures) one of `cases.DEFAULT_DIRECTIONS` and runs it once."""
        began = time.perf_counter()
        inputs = self.draw()
        call, peak = self._ready(
            {
                'forward': torch.no_grad()(lambda: self.loss(*inputs)),
                'forward+backward': lambda: self.backward(inputs),
                'step': self.step,
            }[direction],
            whole=direction == 'step',
        )
        seconds = time.perf_counter() - began
        held = [call]

        def run(steps: int) -> None:
            for _ in range(steps):
                held[0]()
            self._wait()

        def close() -> None:
            held.clear()
            self.optimizer.zero_grad(set_to_none=True)

        notes = (
            {
                'peak_source': "PyTorch's allocator: this side's tensors and the most that a "
                'call adds'
            }
            if self.gpu
            else {}
        )
        return Prepared(run, None, seconds, None, peak, notes, close)

    def draw(self) -> Inputs:
        """Draws a batch: x0 and noise (batch, channels, height, width), t and labels (batch,)."""
        config, device, size = self.config, self.device, self.config.data.batch_size
        rows = torch.randint(len(self.images), (size,), device=device)
        x0 = self.images[rows].float() / 127.5 - 1
        if config.data.augment == 'flip':
            x0 = torch.where(torch.rand(size, 1, 1, 1, device=device) < 0.5, x0.flip(-1), x0)
        t = torch.randint(config.diffusion.steps, (size,), device=device)
        noise = torch.randn(x0.shape, device=device)
        if self.best:
            x0, noise = (v.contiguous(memory_format=torch.channels_last) for v in (x0, noise))
        if not config.model.num_classes:
            return x0, t, noise, None
        dropped = torch.rand(size, device=device) < config.model.label_dropout
        return x0, t, noise, torch.where(dropped, -1, self.labels[rows])

    def backward(self, inputs: Inputs) -> torch.Tensor:
        """Returns the loss and leaves its gradients in the parameters."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(*inputs)
        loss.backward()
        return loss

    def step(self) -> torch.Tensor:
        """Runs one whole training step and returns its loss."""
        loss = self.backward(self.draw())
        if self.config.optimizer.clip_norm:
            torch.nn.utils.clip_grad_norm_(
                self.parameters, self.config.optimizer.clip_norm, foreach=True
            )
        self.optimizer.step()
        with torch.no_grad():
            for rate, average in zip(self.config.ema.rates, self.averages, strict=True):
                torch._foreach_lerp_(average, self.parameters, 1 - rate)
        return loss

    def _ready(
        self, call: Callable[[], object], *, whole: bool
    ) -> tuple[Callable[[], object], int | None]:
        """Returns the warmed-up (for `best`, captured) call and its peak device memory in bytes."""
        if not self.gpu:
            call()
            return call, None
        stream = torch.cuda.Stream() if self.best else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), self._tuned():
            for _ in range(WARM_UP):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        self._wait()
        # Without gradients, a captured backward pass allocates them in the graph's own memory.
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if self.best:
            graph = torch.cuda.CUDAGraph()
            # JAX's threads may call CUDA meanwhile, which in the default mode breaks the capture.
            with torch.cuda.graph(graph, capture_error_mode='thread_local'), self._tuned():
                call()
            call = graph.replay
        call()
        self._wait()
        return call, torch.cuda.max_memory_allocated() - before + self._own_bytes(whole)

    def _tuned(self) -> contextlib.AbstractContextManager[None]:
        """Lets cuDNN choose its fastest convolutions by timing for `best`, as XLA does."""
        return (
            torch.backends.cudnn.flags(enabled=True, benchmark=True)
            if self.best
            else contextlib.nullcontext()
        )

    def _own_bytes(self, whole: bool) -> int:
        """Returns the bytes of the parameters, or of everything that a whole step keeps."""
        kept: list[torch.Tensor] = [*self.parameters]
        if whole:
            states = [v for state in self.optimizer.state.values() for v in state.values()]
            kept += [v for v in states if isinstance(v, torch.Tensor)]
            kept += [*itertools.chain(*self.averages), self.images, self.labels]
        return sum(v.nbytes for v in kept)

    def _wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()


def check(config: Config, mode: str, source: Source) -> None:
    """Raises UserError if the peer cannot run here, or lacks a feature that the config needs."""
    on_gpu = jax.default_backend() == 'gpu'
    if on_gpu and not torch.cuda.is_available():
        raise UserError('JAX runs on a GPU that PyTorch does not see; install a PyTorch for CUDA')
    if not on_gpu and mode != EAGER:
        raise UserError(
            f'needs an NVIDIA GPU, found JAX on {jax.default_backend()}, where only {EAGER} runs'
        )
    if config.precision == 'float16':
        raise UserError(
            'runs float32 and bfloat16, found precision=float16, whose loss scaling the peer '
            'does not have'
        )
    if config.diffusion.continuous:
        raise UserError(
            f'trains epsilon, x0 and v, found diffusion.objective={config.diffusion.objective}'
        )
    if config.optimizer.name == 'muon':
        raise UserError('trains with AdamW, found optimizer.name=muon')
    if config.data.augment == 'edm':
        raise UserError('augments only by flips, found data.augment=edm')
    for field, expected in ONLY.items():
        if (value := operator.attrgetter(field)(config)) != expected:
            raise UserError(f'trains with {field}={expected}, found {value}; set it to that')
    if pipeline.choose_cache(config, source) != 'device':
        raise UserError(
            'keeps its images on the device, found a config that streams them; set '
            'data.cache=device'
        )


def release() -> None:
    """Frees the compiled code and cached memory of sides that are no longer used."""
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
