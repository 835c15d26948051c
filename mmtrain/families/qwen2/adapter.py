"""The class of Qwen2 in transformers."""

from functools import partial

from mmtrain.models.adapters import Decoder

ADAPTERS = {"qwen2": partial(Decoder, "Qwen2")}
