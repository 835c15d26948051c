import pytest
import torch

from mmtrain.models.adapters import block_positions
from mmtrain.models.projector import Projector, merge_neighbours

GRIDS = ((1, 4, 6), (2, 2, 4))


def patches(order: str) -> torch.Tensor:
    """Features that name their image, frame, row and column."""
    rows = []
    for n, (t, h, w) in enumerate(GRIDS):
        place = [(r, c) for r in range(h) for c in range(w)]
        if order == "squares":
            place.sort(key=lambda p: (p[0] // 2, p[1] // 2, p[0] % 2, p[1] % 2))
        rows += [[n, f, r, c] for f in range(t) for r, c in place]
    return torch.tensor(rows, dtype=torch.float32)


@pytest.mark.parametrize("order", ["squares", "rows"])
def test_a_token_holds_one_square_of_one_frame(order):
    merged = merge_neighbours(patches(order), GRIDS, 2, row_major=order == "rows").unflatten(1, (4, 4))
    expected = [
        [[n, f, r + dr, c + dc] for dr in (0, 1) for dc in (0, 1)]
        for n, (t, h, w) in enumerate(GRIDS)
        for f in range(t)
        for r in range(0, h, 2)
        for c in range(0, w, 2)
    ]
    assert merged.tolist() == expected


def test_equal_images_are_merged_at_once_as_one_by_one():
    x = torch.randn(2 * 24, 3)
    together = merge_neighbours(x, ((1, 4, 6),) * 2, 2, row_major=True)
    single = [merge_neighbours(part, ((1, 4, 6),), 2, row_major=True) for part in x.split(24)]
    assert torch.equal(together, torch.cat(single))


def test_sound_is_merged_along_its_row():
    """Two recordings of six and four frames, by two."""
    x = torch.arange(10.0)[:, None]
    merged = merge_neighbours(x, ((1, 1, 6), (1, 1, 4)), 2, row_major=True)
    assert merged.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    projector = Projector(3, 5, merge=2, hidden_size=0, row_major=True, one_row=True)
    assert projector.fc1.in_features == projector.fc1.out_features == 6
    assert projector(torch.randn(10, 3), ((1, 1, 6), (1, 1, 4))).shape == (5, 5)


def test_merge_of_one_keeps_the_rows():
    x = torch.randn(40, 3)
    assert torch.equal(merge_neighbours(x, GRIDS, 1, row_major=True), x)


def test_the_projector_normalises_each_feature_before_the_merge():
    projector = Projector(4, 5, merge=2, hidden_size=0, row_major=False)
    x = torch.randn(40, 4)
    expected = projector.fc2(torch.nn.functional.gelu(projector.fc1(projector.norm(x).reshape(10, 16))))
    assert torch.equal(projector(x, GRIDS), expected)
    assert projector.fc1.out_features == 16
    assert Projector(4, 5, merge=2, hidden_size=7, row_major=False).fc1.out_features == 7


def test_positions_follow_the_squares():
    assert torch.equal(block_positions(GRIDS, 2), patches("squares")[:, 2:].long())
    assert torch.equal(block_positions(GRIDS, 1), patches("rows")[:, 2:].long())
