"""The class of Llama in transformers."""

from mmtrain.models.adapters import Decoder

ADAPTERS = {"llama": Decoder("Llama")}
