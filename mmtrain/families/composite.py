"""A whole model whose folder holds several modules: where each one's config and weights are. Pure; no weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Spelling = Mapping[str, str]
"""How names of stored weights begin -> how they begin in the class of the part alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One module inside of a whole model."""

    config: str = ""
    """Key of its config; empty: its settings are keys of the whole model's config."""
    flat: bool = False
    """Whether older files have its settings as keys of the whole model's config."""
    older: str = ""
    """Key of a config that counts instead where older files have it."""
    model_type: str = ""
    """The `model_type` of a config that names none."""
    shared: tuple[str, ...] = ()
    """Switches that are on for the part if they are on for the whole model."""
    decided: Mapping[str, Any] = field(default_factory=dict)
    """Keys whose value in the whole model's config alone counts, with the defaults of its class."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys that the class of the whole model does not read, with the values of what it does."""
    spellings: tuple[Spelling, ...]
    """The names of the part in stored weights; the first one that occurs counts."""
    written: int = 0
    """The index of the spelling that an export of a part from elsewhere has."""
    newer: tuple[int, ...] = ()
    """The indices of the spellings that transformers 5 alone reads; an export of such a part has that `written`."""
    in_class: int
    """The index of the spelling that the class of the whole model has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composite:
    """A whole model of several modules."""

    parts: Mapping[str, Part]
    """Section -> its part. Of every encoder, also [model.modules.NAME], it is model.encoder; see `whole_section`."""
    class_name: str
    """How the names of its classes begin."""
    encoders: tuple[str, ...]
    """Families of encoders that it can have."""
    languages: tuple[str, ...]
    """Families of language models that it can have."""
    projector: str = ""
    """The kind of projector; two towers have none."""
    loss: str = ""
    """The loss of the pairs of two towers; others have none."""
    scalar: tuple[int, ...] = (1,)
    """Shape of each parameter of that loss in stored weights."""
    final_norm: bool = False
    """Whether its projector reads what the encoder's final norm makes."""
    class_in_text: bool = False
    """Whether transformers 4 looks for its class in the config of the text."""
    processor: str = ""
    """Class of a processor that counts the tokens of an image by keys of its own, and knows no tokens before and after
    them; empty: it is of another sort."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the whole model's config that concern how parts are joined, with the defaults of its class."""

    @property
    def model_class(self) -> str:
        """The class of transformers."""
        return f"{self.class_name}{'Model' if self.loss else 'ForConditionalGeneration'}"


def removed(*beginnings: str) -> tuple[Spelling, ...]:
    """Spellings in which names begin so, and go on as in the class of the part."""
    return tuple({beginning: ""} for beginning in beginnings)


PROJECTOR = Part(spellings=removed("multi_modal_projector.", "model.multi_modal_projector."), in_class=1)
"""A projector between the encoder and the language model, not a part of either."""

CONTRAST = Part(spellings=({"logit_": "logit_"},), in_class=0)
"""The parameters of the loss of two towers."""


def language_part(**fields: Any) -> Part:
    """A language model whose class is a part of the whole one's. Args: further fields."""
    spellings: tuple[Spelling, ...] = (
        {"language_model.": ""},
        {"model.language_model.": "model.", "lm_head.": "lm_head."},
    )
    return Part(config="text_config", spellings=spellings, in_class=1, **fields)
