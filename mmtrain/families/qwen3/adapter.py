"""The class of Qwen3 in transformers."""

from functools import partial

from mmtrain.models.adapters import LanguageDecoder

ADAPTERS = {"qwen3": partial(LanguageDecoder, "Qwen3")}
