"""The class of Mistral in transformers."""

from functools import partial

from mmtrain.models.adapters import LanguageDecoder

ADAPTERS = {"mistral": partial(LanguageDecoder, "Mistral")}
