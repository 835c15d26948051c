"""The class of Llama in transformers."""

from functools import partial

from mmtrain.models.adapters import Decoder

ADAPTERS = {"llama": partial(Decoder, "Llama")}
