"""The class of Qwen3 in transformers."""

from mmtrain.models.adapters import Decoder

ADAPTERS = {"qwen3": Decoder("Qwen3")}
