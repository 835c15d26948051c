"""The class of Mistral in transformers."""

from mmtrain.models.adapters import Decoder

ADAPTERS = {"mistral": Decoder("Mistral")}
