"""Weights and images to compare two implementations of FID's Inception; the same on every machine.

This command writes the golden numbers again; besides the package it needs torch and pytorch_fid:

    python tests/support/inception_case.py
"""

from __future__ import annotations

import pathlib
from unittest import mock

import numpy as np

from jaxunet.metrics.inception import torch_shapes

COLUMNS = {'features': 2048, 'logits': 64}  # leading columns that the golden numbers have
GOLDEN = pathlib.Path(__file__).parents[1] / 'fixtures' / 'inception_golden.npz'


def random_state(seed: int = 0) -> dict[str, np.ndarray]:
    """A state dict of the right shapes whose activations neither vanish nor explode."""
    random = np.random.default_rng(seed)
    state = {}
    for name, shape in torch_shapes().items():
        uniform = random.random(shape, np.float32)
        if name.endswith('running_var'):
            state[name] = 0.5 + uniform
        elif name.endswith('bn.weight'):
            state[name] = 0.8 + 0.4 * uniform
        elif len(shape) == 1:
            state[name] = 0.4 * uniform - 0.2
        else:
            fan_in = np.prod(shape[1:])
            state[name] = ((2 * uniform - 1) * np.sqrt(6 / fan_in)).astype(np.float32)
    return state


def images() -> np.ndarray:
    """uint8 (2, 40, 56, 3); not square, so that swapped height and width are noticed."""
    return np.random.default_rng(1).integers(0, 256, (2, 40, 56, 3), dtype=np.uint8)


def summary(activations: np.ndarray) -> np.ndarray:
    """Six numbers for a (2, height, width, channels) activation.

    They are the mean, the deviation, the largest, and three of the values.
    """
    flat = activations.astype(np.float64).reshape(-1)
    return np.array([flat.mean(), flat.std(), flat.max(), *flat[[0, len(flat) // 3, -1]]])


def of_pytorch_fid(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns every layer's output (NHWC), `features` and `logits` by name.

    They are those of pytorch-fid's network with these weights on `images`.
    """
    # Not in any of the extras, because torch is larger than everything else.
    import pytorch_fid.inception as theirs  # noqa: PLC0415
    import torch  # noqa: PLC0415

    counters = {
        name.replace('weight', 'num_batches_tracked'): torch.tensor(0)
        for name in state
        if name.endswith('bn.weight')
    }
    tensors = {**{name: torch.from_numpy(value) for name, value in state.items()}, **counters}
    with mock.patch.object(theirs, 'load_state_dict_from_url', return_value=tensors):
        network, whole = theirs.InceptionV3([3]).eval(), theirs.fid_inception_v3().eval()
    inner = [
        'Conv2d_1a_3x3 Conv2d_2a_3x3 Conv2d_2b_3x3 maxpool1',
        'Conv2d_3b_1x1 Conv2d_4a_3x3 maxpool2',
    ]
    inner += [
        'Mixed_5b Mixed_5c Mixed_5d Mixed_6a Mixed_6b Mixed_6c Mixed_6d Mixed_6e',
        'Mixed_7a Mixed_7b Mixed_7c',
    ]
    outputs: dict[str, np.ndarray] = {}

    def watch(name: str, module: torch.nn.Module) -> None:
        module.register_forward_hook(
            lambda _module, _input, output: outputs.__setitem__(
                name, output.permute(0, 2, 3, 1).numpy().copy()
            )
        )

    for block, names in zip(network.blocks, inner, strict=True):
        for name, module in zip(names.split(), block, strict=False):
            watch(name, module)
            if name.startswith('Mixed'):
                for child, convolution in module.named_children():
                    watch(f'{name}.{child}', convolution)
    with torch.no_grad():
        features = network(torch.from_numpy(images()).permute(0, 3, 1, 2).float() / 255)[0][
            :, :, 0, 0
        ]
        return {**outputs, 'features': features.numpy(), 'logits': whole.fc(features).numpy()}


def write_golden() -> None:
    outputs = of_pytorch_fid(random_state())
    numbers = {
        name: value[:, : COLUMNS[name]] if name in COLUMNS else summary(value)
        for name, value in outputs.items()
    }
    np.savez_compressed(GOLDEN, **numbers)  # type: ignore[arg-type]


if __name__ == '__main__':
    write_golden()
