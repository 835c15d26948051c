"""How often an image's caption is found among all held-out captions, and a caption's image among all images.

Shape legend: N pairs; I different images; C different captions; D width of an embedding; Q queries at once.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmtrain.modality.metadata import IterationMeta
from mmtrain.models.batch import Batch

FIRST = (1, 5)
"""Numbers of candidates among which the right one is looked for."""
_ROWS = 1024
"""Queries whose similarities exist at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldOutPairs:
    """Held-out pairs of one replica, in the order of their batches; a rank has the parts that exist on it."""

    replica: int
    embeddings: Sequence[Tensor]
    """[2, n, D] each, float32, normalised, of images and their captions."""
    contents: Sequence[Tensor]
    """[2, n] int64 each, which numbers images and captions by their content: equal ones have equal numbers."""


def contents(batch: Batch, meta: IterationMeta) -> Tensor:
    """[2, n] int64: the content of each pair's image and caption as a number, of all pairs of a batch.

    A document without a label, of a blank microbatch, is no pair.
    """
    images = [pixels for tensors in batch.microbatches for pixels in tensors.pixel_values]
    captions = [
        ids
        for tensors, counts in zip(batch.microbatches, meta.microbatches, strict=True)
        for document, ids in zip(counts.documents, tensors.input_ids.split(list(counts.lengths)), strict=True)
        if document.num_targets
    ]
    return torch.tensor([list(map(_number, images)), list(map(_number, captions))], dtype=torch.int64)


def _number(content: Tensor) -> int:
    digest = hashlib.blake2b(content.contiguous().numpy().tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


def recalls(parts: Iterable[HeldOutPairs]) -> dict[str, tuple[int, int]]:
    """What is looked for, as "captions@1" -> (found, looked for).

    Of each different image, one of its captions is looked for among the most similar of all different captions; of each
    different caption one of its images likewise. Of a tie the wrong candidates come first, so that towers which give
    everything one embedding find nothing.

    Args: parts: of all ranks.
    """
    own = sorted(parts, key=lambda part: part.replica)
    embeddings = [x for part in own for x in part.embeddings]
    if not embeddings:
        return {}
    x_2ND, numbers_2N = torch.cat(embeddings, dim=1), torch.cat([x for part in own for x in part.contents], dim=1)
    assert x_2ND.shape[1] == numbers_2N.shape[1], "each pair has an embedding and a content"
    (x_ID, of_image_N), (x_CD, of_caption_N) = (_different(x, n) for x, n in zip(x_2ND, numbers_2N, strict=True))
    return {
        f"{name}@{first}": (int((num_better < first).sum()), len(num_better))
        for name, num_better in (
            ("captions", _num_better(x_ID, x_CD, of_image_N, of_caption_N)),
            ("images", _num_better(x_CD, x_ID, of_caption_N, of_image_N)),
        )
        for first in FIRST
    }


def _different(x_ND: Tensor, numbers_N: Tensor) -> tuple[Tensor, Any]:
    """The embeddings of different contents, and [N] which of them is each pair's."""
    _, first, which_N = np.unique(numbers_N.numpy(), return_index=True, return_inverse=True)
    return x_ND[torch.from_numpy(first)], which_N


def _num_better(queries: Tensor, candidates: Tensor, query_N: Any, candidate_N: Any) -> Tensor:
    """[queries] int64: wrong candidates at least as similar as the most similar right one.

    Args: query_N, candidate_N: of each pair.
    """
    found = []
    for start in range(0, len(queries), _ROWS):
        similarity_QC = queries[start : start + _ROWS] @ candidates.T
        pairs = (query_N >= start) & (query_N < start + _ROWS)
        right_QC = torch.zeros_like(similarity_QC, dtype=torch.bool)
        right_QC[torch.from_numpy(query_N[pairs] - start), torch.from_numpy(candidate_N[pairs])] = True
        best_Q1 = similarity_QC.masked_fill(~right_QC, -torch.inf).amax(dim=1, keepdim=True)
        found.append(((similarity_QC >= best_Q1) & ~right_QC).sum(dim=1))
    return torch.cat(found)
