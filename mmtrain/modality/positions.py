"""Positions of packed tokens, along the text or on the axes time, height and width. Pure; from counts alone."""

from collections.abc import Iterable

import numpy as np

from mmtrain.modality.metadata import DocumentMeta
from mmtrain.modality.submesh import Indices


def token_positions(documents: Iterable[DocumentMeta], axes: int = 1) -> Indices:
    """[T] int64: the position of each packed token in its document; with three axes [3, T]: time, height, width.

    Positions begin at 0 in each document. On three axes a text token has the same position on each. An image or video
    of (t, h, w) tokens whose first position is p has the times p + floor(i * time_step), i < t, in float32, the rows
    p .. p + h - 1 and the columns p .. p + w - 1; the text after it continues at p + max(h, w), whatever t is.

    Args: axes: 1 or 3.
    Source: `get_rope_index` of the whole models in transformers 5.23. transformers 4 continued after the largest
        position on any axis, which is another one only after more than max(h, w) frames.
    """
    if axes == 1:
        return np.concatenate([np.arange(document.num_tokens) for document in documents])
    return np.concatenate([_on_three_axes(document) for document in documents], axis=1)


def _on_three_axes(document: DocumentMeta) -> Indices:
    positions = np.empty((3, document.num_tokens), np.int64)
    token = position = 0  # the next token, and its position
    for image in document.images:
        positions[:, token : image.start] = np.arange(position, position + image.start - token)
        position += image.start - token
        token = image.start + image.num_tokens
        t, h, w = image.token_grid
        times = (np.arange(t, dtype=np.float32) * np.float32(image.time_step)).astype(np.int64)
        grid = np.meshgrid(times, np.arange(h), np.arange(w), indexing="ij")
        positions[:, image.start : token] = position + np.reshape(grid, (3, -1))
        position += max(h, w)
    positions[:, token:] = np.arange(position, position + document.num_tokens - token)
    return positions
