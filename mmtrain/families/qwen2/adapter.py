"""The class of Qwen2 in transformers."""

from mmtrain.models.adapters import Decoder

ADAPTERS = {"qwen2": Decoder("Qwen2")}
