"""Which kernels serve a device."""

from __future__ import annotations

import torch

from tandem.errors import ConfigError
from tandem.kernels.api import Kernels
from tandem.kernels.torch_cpu import TorchCpuKernels

__all__ = ["select_kernels"]


def select_kernels(device: str, dtype: torch.dtype) -> Kernels:
    """Raises:
    ConfigError: no kernels exist for this device.
    """
    if device != "cpu":
        raise ConfigError(f"device {device!r} has no kernels: use cpu")
    return TorchCpuKernels(dtype)
