"""The supported model families, a line each, and their networks by `model_type`. Pure; no weights."""

from collections.abc import Mapping

from mmtrain.families import (
    autoencoder_kl,
    autoencoder_kl_wan,
    clip,
    llama,
    llava,
    mistral,
    qwen2,
    qwen2_5_vl,
    qwen2_audio,
    qwen2_vl,
    qwen3,
    qwen3_vl,
    siglip,
    siglip2,
    vit,
    wan,
    whisper,
)
from mmtrain.families.composite import Composite
from mmtrain.families.family import Encoder, Family, Language, Network, Vae
from mmtrain.families.projectors import OWN, ProjectorKind
from mmtrain.families.tensor_table import TensorTable

FAMILIES: tuple[Family, ...] = (
    qwen2.FAMILY,
    llama.FAMILY,
    qwen3.FAMILY,
    mistral.FAMILY,
    qwen2_vl.FAMILY,
    qwen2_5_vl.FAMILY,
    qwen3_vl.FAMILY,
    siglip.FAMILY,
    siglip2.FAMILY,
    clip.FAMILY,
    vit.FAMILY,
    whisper.FAMILY,
    llava.FAMILY,
    qwen2_audio.FAMILY,
    wan.FAMILY,
    autoencoder_kl.FAMILY,
    autoencoder_kl_wan.FAMILY,
)
"""The families in the order in which messages name them."""

ENCODERS: Mapping[str, Encoder] = {name: value for family in FAMILIES for name, value in family.encoders.items()}
LANGUAGES: Mapping[str, Language] = {name: value for family in FAMILIES for name, value in family.languages.items()}
DITS: Mapping[str, Network] = {name: value for family in FAMILIES for name, value in family.dits.items()}
VAES: Mapping[str, Vae] = {name: value for family in FAMILIES for name, value in family.vaes.items()}
COMPOSITES: Mapping[str, Composite] = {name: value for family in FAMILIES for name, value in family.composites.items()}
"""The whole models by their `model_type`."""
NETWORKS: Mapping[str, Network] = {name: value for family in FAMILIES for name, value in family.networks.items()}
TABLES: Mapping[str, TensorTable] = {name: value.table for name, value in NETWORKS.items() if value.table is not None}
PROJECTORS: Mapping[str, ProjectorKind] = {
    **OWN,
    **{name: value for family in FAMILIES for name, value in family.projectors.items()},
}
FOLDERS: Mapping[str, str] = {
    name: family.name for family in FAMILIES for name in (*family.networks, *family.projectors)
}
"""`model_type` of a network, or kind of a projector -> the folder of its family."""
