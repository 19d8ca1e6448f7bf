"""
The models that can be exported: plain, golf and recursive.

    config values -> read_config -> new_model
"""

from collections.abc import Mapping
from typing import Any

import torch

from nanochat.golf.model import new_model as new_golf_model
from nanochat.golf.model import read_config as read_golf_config
from nanochat.gpt import GPT, GPTConfig
from nanochat.recursion.model import RecursiveConfig, RecursiveGPT


def read_config(values: Mapping[str, Any]) -> GPTConfig:
    """Rebuild the configuration of a model from its `asdict`."""
    return RecursiveConfig(**values) if "n_loops" in values else read_golf_config(values)


def new_model(cfg: GPTConfig, dtype: torch.dtype = torch.float32) -> GPT:
    """Return a model with uninitialized weights."""
    is_recursive = isinstance(cfg, RecursiveConfig)
    return RecursiveGPT(cfg, dtype) if is_recursive else new_golf_model(cfg, dtype)
