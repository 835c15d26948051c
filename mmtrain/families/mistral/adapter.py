"""The class of Mistral in transformers."""

from functools import partial

from mmtrain.models.adapters import Decoder

ADAPTERS = {"mistral": partial(Decoder, "Mistral")}
