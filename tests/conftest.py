"""Shared test set-up: deterministic, single-threaded, no leftovers between tests."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "deep", deadline=None, max_examples=500, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _fresh_state():
    """Seed, reset Dynamo, and run as for inference (the ops refuse gradients)."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch.no_grad():
        yield
