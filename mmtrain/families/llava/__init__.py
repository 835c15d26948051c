"""LLaVA: a whole model of a CLIP or SigLIP encoder, two linear layers, and one of several language models.

Source: arXiv:2310.03744.
"""

from mmtrain.families.composite import PROJECTOR, Composite, Part, language_part, removed
from mmtrain.families.family import Family
from mmtrain.families.projectors import ProjectorKind
from mmtrain.families.tensor_table import two_linears

FAMILY = Family(
    name="llava",
    projectors={
        "llava": ProjectorKind(
            norm="",
            inner="outputs",
            chooses_act=True,
            table=two_linears("projector"),
            made_by="`multi_modal_projector` of transformers' LLaVA",
        )
    },
    composites={
        "llava": Composite(
            class_name="Llava",
            encoders=("clip_vision_model", "siglip_vision_model"),
            languages=("llama", "qwen2", "qwen3", "mistral"),
            projector="llava",
            processor="LlavaProcessor",
            parts={
                "model.encoder": Part(
                    config="vision_config",
                    model_type="clip_vision_model",
                    spellings=removed(
                        "vision_tower.vision_model.",
                        "model.vision_tower.vision_model.",
                        "vision_tower.",
                        "model.vision_tower.",
                    ),
                    newer=(2, 3),
                    in_class=3,
                ),
                "model.projector": PROJECTOR,
                "model.language": language_part(model_type="llama", shared=("tie_word_embeddings",)),
            },
            defaults={
                "vision_feature_layer": -2,
                "vision_feature_select_strategy": "default",
                "projector_hidden_act": "gelu",
                "multimodal_projector_bias": True,
            },
        )
    },
)
