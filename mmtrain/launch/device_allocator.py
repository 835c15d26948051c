"""The setting of torch's allocator for devices that training wants. Pure: it must be made before CUDA starts."""

import os
from collections.abc import MutableMapping

SETTING = "expandable_segments:True"
"""Segments grow, so that batches of other sizes leave no gaps that none of them fits. Source: torch's notes on CUDA,
"Optimizing memory usage with PYTORCH_ALLOC_CONF"."""
_KEYS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The first one since torch 2.10; the others are its older names."""


def set_allocator(environment: MutableMapping[str, str] = os.environ) -> None:
    """Asks for the setting in the environment of this process and of those that it starts, unless the user set one."""
    if not any(key in environment for key in _KEYS):
        environment[_KEYS[0]] = SETTING


def allocator_setting(environment: MutableMapping[str, str] = os.environ) -> str:
    """The setting in an environment; empty: none."""
    return next((environment[key] for key in _KEYS if key in environment), "")
