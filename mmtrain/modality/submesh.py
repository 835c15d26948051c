"""The division of a pipeline stage's work over its ranks (context x tensor parallel)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmtrain.config.config import Config
from mmtrain.config.model import ModelConfig
from mmtrain.families.catalogue import LANGUAGES
from mmtrain.modality.bitfield import LanguageMask
from mmtrain.modality.token_split import SplitPolicy
from mmtrain.spec.model_configs import language_config
from mmtrain.spec.rows import padded

Indices = npt.NDArray[np.int64]


def language_mask(model: ModelConfig) -> LanguageMask:
    """The mask of the language model, which tokens of a document see which: as the config says, unless its class
    decides."""
    family = LANGUAGES[language_config(model.language)["model_type"]]
    return "bidirectional" if family.bidirectional else model.language.attention_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Submesh:
    """The ranks of a submesh, and how they divide the work of each module."""

    cp: int = 1
    tp: int = 1
    whole_rows: bool = False
    """Whether tp ranks each have all rows between layers, and do not divide them."""
    split: SplitPolicy = "balanced"
    block_size: int = 128
    share_patches: bool = False
    """Whether cp ranks divide the patches of each image, not the images."""
    data_encoder: bool = False
    """Whether tp ranks divide the images, not the encoder's layers."""
    head_groups: int = 1
    """Groups of heads whose keys cp ranks gather one after the other."""
    attention_mask: LanguageMask = "causal"

    @classmethod
    def of(cls, config: Config) -> "Submesh":
        """The submesh of a job."""
        section = config.parallelism
        return cls(
            cp=section.context_parallel_degree,
            tp=section.tensor_parallel_degree,
            whole_rows=section.tensor_parallel_rows == "whole",
            split=section.context_parallel_split,
            block_size=section.context_parallel_block_size,
            share_patches=section.encoder_context_parallel == "patches" and section.context_parallel_degree > 1,
            data_encoder=config.data_encoder,
            head_groups=section.context_parallel_head_groups,
            attention_mask=language_mask(config.model),
        )

    @property
    def size(self) -> int:
        """Number of ranks of the submesh."""
        return self.cp * self.tp

    @property
    def encoder_tp(self) -> int:
        """Number of ranks that divide the layers of the encoder."""
        return 1 if self.data_encoder else self.tp

    @property
    def row_parts(self) -> int:
        """Number of tp ranks that divide the rows between two layers."""
        return 1 if self.whole_rows else self.tp

    @property
    def encoder_row_parts(self) -> int:
        """Number of tp ranks that divide the rows between two layers of the encoder."""
        return 1 if self.data_encoder else self.row_parts

    @property
    def holders(self) -> list[tuple[int, int]]:
        """The (cp rank, tp rank) of the ranks that get whole images; of ranks that divide patches, the first one."""
        return [
            (c, t)
            for c in range(1 if self.share_patches else self.cp)
            for t in range(self.tp if self.data_encoder else 1)
        ]


def pad_indices(indices: Indices, degree: int) -> Indices:
    """[padded] int64: the indices [n], padded with -1 to a multiple of `degree`."""
    missing = padded(len(indices), degree) - len(indices)
    return np.concatenate([indices, np.full(missing, -1, dtype=np.int64)]) if missing else indices
