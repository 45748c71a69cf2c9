"""Triton without a device, so that what tunes its kernels when it is imported (Liger) can be interpreted."""

from __future__ import annotations

from types import SimpleNamespace

from triton.runtime import driver

driver.set_active(SimpleNamespace(get_benchmarker=lambda: None))
