"""Host copies of the fp8 scales: one wait for the device, none in the hot path."""

from __future__ import annotations

import gc

import pytest
import torch

from fusion.backends.aiter.scales import HostScales, ScaleNotOnHostError


class Device:
    """A device whose reads are counted and which may be capturing."""

    def __init__(self) -> None:
        self.reads, self.capturing = 0, False
        self.scales = HostScales(self.read, lambda: self.capturing, lambda t: False)

    def read(self, scale: torch.Tensor) -> torch.Tensor:
        assert not self.capturing, "a device was read under capture"
        self.reads += 1
        return scale.detach().to(torch.float32).reshape(1).clone()


def test_one_read_for_many_steps() -> None:
    device, scale = Device(), torch.tensor(0.25)
    values = [float(device.scales.get(scale)) for _ in range(5)]
    assert values == [0.25] * 5
    assert device.reads == 1


def test_a_changed_scale_is_read_again() -> None:
    device, scale = Device(), torch.tensor([0.25])
    device.scales.get(scale)
    scale.fill_(3.0)
    assert float(device.scales.get(scale)) == 3.0
    scale.data.copy_(torch.tensor([4.0]))  # behind autograd's back, so the version may not move
    assert device.reads == 2


def test_two_scales_are_two() -> None:
    device = Device()
    k, v = torch.tensor(0.25), torch.tensor(3.0)
    assert [float(device.scales.get(s)) for s in (k, v, k, v)] == [0.25, 3.0, 0.25, 3.0]


def test_capture_takes_the_copy_of_the_warm_up() -> None:
    device, scale = Device(), torch.tensor(0.25)
    device.scales.get(scale)
    device.capturing = True
    assert float(device.scales.get(scale)) == 0.25
    scale.fill_(3.0)
    with pytest.raises(ScaleNotOnHostError, match="once before the capture"):
        device.scales.get(scale)
    with pytest.raises(ScaleNotOnHostError):
        device.scales.get(torch.tensor(1.0))


def test_inference_tensors_have_no_version() -> None:
    """Their changes cannot be seen, so they are read each time, but for a capture."""
    device = Device()
    with torch.inference_mode():
        scale = torch.tensor(0.25)
        device.scales.get(scale)
        scale.fill_(3.0)
        assert float(device.scales.get(scale)) == 3.0
        device.capturing = True
        assert float(device.scales.get(scale)) == 3.0


def test_a_dead_scale_is_forgotten() -> None:
    device, scale = Device(), torch.tensor(0.25)
    device.scales.get(scale)
    del scale
    gc.collect()
    assert len(device.scales) == 0
    for value in range(50):  # a new tensor may get the old identity
        assert float(device.scales.get(torch.tensor(float(value)))) == value


def test_host_scales_and_none() -> None:
    scales = HostScales(is_capturing=lambda: True)
    assert float(scales.get(None)) == 1.0
    host = scales.get(torch.tensor(0.25, dtype=torch.float64))
    assert host.dtype == torch.float32
    assert host.shape == (1,)
    assert float(host) == 0.25


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_real_device() -> None:
    """No wait after the first read, proved by torch's own alarm; and under a real capture."""
    scales, scale = HostScales(), torch.tensor(3.0, device="cuda")
    scales.get(scale)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert float(scales.get(scale)) == 3.0
        with pytest.raises(RuntimeError):
            scale.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert float(scales.get(scale)) == 3.0
        with pytest.raises(ScaleNotOnHostError):
            scales.get(torch.ones((), device="cuda"))
