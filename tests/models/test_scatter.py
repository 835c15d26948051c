import pytest
import torch

from mmtrain.errors import DataError
from mmtrain.models.scatter import scatter_tokens


def test_rows_are_replaced_and_gradients_reach_both_inputs():
    x = torch.arange(8.0).reshape(4, 2).requires_grad_()
    image = torch.tensor([[10.0, 11.0], [20.0, 21.0]], requires_grad=True)
    out = scatter_tokens(x, image, torch.tensor([3, 1]))
    assert out.tolist() == [[0, 1], [20, 21], [4, 5], [10, 11]]
    (out * torch.tensor([[1.0], [2.0], [3.0], [4.0]])).sum().backward()
    assert x.grad.tolist() == [[1, 1], [0, 0], [3, 3], [0, 0]]
    assert image.grad.tolist() == [[4, 4], [2, 2]]


def test_no_image_changes_nothing():
    x = torch.randn(3, 2)
    assert torch.equal(scatter_tokens(x, torch.empty(0, 2), torch.empty(0, dtype=torch.int64)), x)


def test_features_take_the_dtype_of_the_tokens():
    out = scatter_tokens(torch.zeros(2, 2, dtype=torch.bfloat16), torch.ones(1, 2), torch.tensor([0]))
    assert out.dtype == torch.bfloat16
    assert out[0].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.ones(2, 2), "2 image features for 1 image tokens"),
        (torch.ones(1, 3), "image features have 3 columns and tokens 2"),
    ],
)
def test_disagreement_is_refused(image, message):
    with pytest.raises(DataError, match=message):
        scatter_tokens(torch.zeros(4, 2), image, torch.tensor([0]))
