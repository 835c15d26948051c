"""Puts image features into the rows of a packed token sequence."""

from torch import Tensor

from mmtrain.errors import DataError


def scatter_tokens(x_TD: Tensor, image_VD: Tensor, slot_V: Tensor) -> Tensor:
    """x_TD with row slot_V[i] replaced by image_VD[i].

    Shapes: T packed tokens of one microbatch; V image tokens among them; D model width.
    Args: slot_V: int64 rows of x_TD, each named at most once.
    Returns: [T, D], dtype and device of x_TD; gradients reach both inputs.
    Raises: DataError: image_VD and slot_V disagree on V, or image_VD and x_TD on D.
    Source: arXiv:2304.08485, sec. 4.1.
    """
    if len(image_VD) != len(slot_V):
        raise DataError(
            f"{len(image_VD)} image features for {len(slot_V)} image tokens; the images and their placeholders disagree"
        )
    if image_VD.shape[1:] != x_TD.shape[1:]:
        raise DataError(
            f"image features have {image_VD.shape[-1]} columns and tokens {x_TD.shape[-1]}; the projector "
            "must make the language model's width"
        )
    return x_TD.index_copy(0, slot_V, image_VD.to(x_TD.dtype))
