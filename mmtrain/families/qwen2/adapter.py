"""The class of Qwen2 in transformers."""

from functools import partial

from mmtrain.models.adapters import LanguageDecoder

ADAPTERS = {"qwen2": partial(LanguageDecoder, "Qwen2")}
