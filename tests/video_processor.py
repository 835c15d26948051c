"""transformers' own video processors. They need torchvision, of which they get the few functions that they call."""

import enum
import importlib.machinery
import sys
import types
from typing import Any

import pytest
import torch
from PIL import Image


class InterpolationMode(enum.Enum):
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


def resize(image: torch.Tensor, size: Any, *, interpolation: InterpolationMode, antialias: bool) -> torch.Tensor:
    """As torchvision 0.2x does it on the CPU: bytes are resized as bytes."""
    out = torch.nn.functional.interpolate(
        image.flatten(0, -4), size=list(size), mode=interpolation.value, align_corners=False, antialias=antialias
    )
    return out.unflatten(0, image.shape[:-3])


def normalize(image: torch.Tensor, mean: Any, std: Any, inplace: bool = False) -> torch.Tensor:
    mean, std = (torch.as_tensor(values, dtype=image.dtype).view(-1, 1, 1) for values in (mean, std))
    return (image - mean) / std


def video_processor_class(monkeypatch: pytest.MonkeyPatch, family: str = "qwen2_vl") -> Any:
    """The class of transformers' video processor for Qwen2-VL and Qwen2.5-VL, or for Qwen3-VL."""
    from transformers import image_processing_backends

    tv: Any = types.ModuleType("torchvision.transforms.v2.functional")
    tv.resize, tv.normalize, tv.InterpolationMode = resize, normalize, InterpolationMode
    tv.grayscale_to_rgb = lambda image: image
    parent = None
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", tv.__name__):
        module = tv if name == tv.__name__ else types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
        if parent is not None:
            setattr(parent, name.rpartition(".")[2], module)
        parent = module
    own = f"transformers.models.{family}.video_processing_{family}"
    monkeypatch.delitem(sys.modules, own, raising=False)
    from transformers import video_processing_utils

    for module in (image_processing_backends, video_processing_utils):
        monkeypatch.setattr(module, "tvF", tv, raising=False)
    mapping = {Image.Resampling.BICUBIC: InterpolationMode.BICUBIC}
    monkeypatch.setattr(image_processing_backends, "pil_torch_interpolation_mapping", mapping)
    found = importlib.import_module(own)
    monkeypatch.setitem(sys.modules, own, found)  # so that it is forgotten again
    return getattr(found, {"qwen2_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor"}[family])
