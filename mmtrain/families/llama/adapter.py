"""The class of Llama in transformers."""

from functools import partial

from mmtrain.models.adapters import LanguageDecoder

ADAPTERS = {"llama": partial(LanguageDecoder, "Llama")}
