"""Power and clock of the GPU, with a stand-in for NVML."""

import sys
import time
import types

import jax
import pytest
from support.benchmarks import example

from jaxunet.benchmark import power
from jaxunet.benchmark.power import NO_NUMBERS, Gpu, Meter, open_gpu
from jaxunet.benchmark.table import markdown
from jaxunet.benchmark.timing import interleave


def test_energy_of_each_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, 'TURN_SECONDS', 0.02)
    used = [0]

    def work(millijoules: int, seconds: float = 0.04):
        def run(steps: int) -> None:
            used[0] += millijoules * steps
            time.sleep(seconds)

        return run

    def fail(steps: int) -> None:
        used[0] += 10**6
        raise ValueError('broken')

    meter = Meter(Gpu(lambda: used[0], lambda: 1980))
    sides = {'a': work(30), 'b': work(60, 0.0), 'broken': fail}
    interleave(sides, rounds=4, steps=5, turn=meter.turn)
    a, b = (meter.numbers(name, images=10) for name in ('a', 'b'))
    assert (a['mj_per_image'], b['mj_per_image']) == (15, 30)
    assert 0.15 / 0.08 < a['watts'] <= 0.15 / 0.04
    assert (a['clock_mhz'], b['clock_mhz']) == (1980, None)  # b's turns had no middle
    assert meter.numbers('broken', 10) == NO_NUMBERS


def test_a_cpu_has_no_numbers() -> None:
    meter = Meter(open_gpu())
    with meter.turn('a'):
        pass
    assert meter.numbers('a', 1) == NO_NUMBERS


class Nvml(types.ModuleType):
    """As pynvml of the extra, for a machine of three GPUs."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM = 1
    names = ('NVIDIA H200', 'NVIDIA L4', 'NVIDIA H200')
    uuids = ('GPU-a', 'GPU-b', 'GPU-c')

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in self.uuids:
            raise self.NVMLError
        return self.uuids.index(uuid)

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.names[handle]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        return 1000 + handle

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return 1980 * kind

    def unsupported(self, *_: int) -> int:
        raise self.NVMLError


@pytest.mark.parametrize(
    ('visible', 'energy'),
    [('', 1000), ('2,1', 1002), ('GPU-c', 1002), ('1', None), ('GPU-x', None)],
)
def test_the_gpu_of_jax(visible: str, energy: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the first visible one; a GPU of another name, or one NVML does not know, is none."""
    device = types.SimpleNamespace(local_hardware_id=0, device_kind='NVIDIA H200')
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    monkeypatch.setattr(jax, 'devices', lambda: [device])
    monkeypatch.setitem(sys.modules, 'pynvml', Nvml('pynvml'))
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
    gpu = open_gpu()
    assert (gpu and gpu.energy()) == energy
    assert gpu is None or gpu.clock() == 1980
    monkeypatch.setattr(Nvml, 'nvmlDeviceGetClockInfo', Nvml.unsupported)
    assert open_gpu() is None
    monkeypatch.setitem(sys.modules, 'pynvml', None)  # the extra is not installed
    assert open_gpu() is None


def test_the_table_has_columns_of_power_where_rows_have_numbers() -> None:
    row = {k: v for k, v in example().items() if k not in NO_NUMBERS}  # as older ones
    measured = {'watts': 695.2, 'clock_mhz': 1745, 'mj_per_image': 71.24}
    assert 'mJ' not in markdown([row])
    text = markdown([row, row | measured | {'backend': 'auto'}])
    assert '| W | MHz | mJ/image |' in text
    assert '| 695 | 1745 | 71.2 |' in text
    assert '| – | – | – |' in text
