"""Qwen2, a language model."""

from mmtrain.families.decoders import DECODER, WINDOWS
from mmtrain.families.family import Family

FAMILY = Family(name="qwen2", languages={"qwen2": DECODER.like({"use_sliding_window": False}, WINDOWS, qkv_bias=True)})
