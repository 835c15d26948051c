"""The class of Qwen3 in transformers."""

from functools import partial

from mmtrain.models.adapters import Decoder

ADAPTERS = {"qwen3": partial(Decoder, "Qwen3")}
