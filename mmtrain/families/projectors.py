"""What differs between kinds of projectors, from features of an encoder to the language model's width. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mmtrain.families.tensor_table import Styles, two_linears


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorKind:
    """One kind of `[model.projector]`."""

    norm: Literal["own", "encoder", ""]
    """own: a LayerNorm of each feature comes first; encoder: a norm of the encoder's sort; empty: none."""
    inner: Literal["merged", "outputs", ""]
    """Columns between its two linear layers, if none are given: those of merged neighbours, or of the language model;
    empty: it has one layer."""
    chooses_act: bool = False
    """Whether `hidden_act` says the activation function between them."""
    table: Styles = field(default_factory=dict)
    """How tensor parallelism divides it; that of an encoder's own merger is in the encoder's table."""
    made_by: str = ""
    """What makes its module, in the words of an exported README."""


OWN: Mapping[str, ProjectorKind] = {
    "mlp": ProjectorKind(
        norm="own",
        inner="merged",
        table={"projector.norm": "whole", **two_linears("projector", "fc1", "fc2")},
        made_by="`mmtrain.models.projector.Projector`",
    ),
    "native": ProjectorKind(norm="encoder", inner="merged"),
}
"""The projectors of no family: ours, and the merger of an encoder."""
