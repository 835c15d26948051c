"""Recall of pairs, against a loop over all of them."""

import pytest
import torch

from mmtrain.observe import recall
from mmtrain.observe.recall import HeldOutPairs, contents, recalls
from tests.models.towers import make_pairs, two_towers


def of_one(x, images, captions):
    return HeldOutPairs(replica=0, embeddings=[x], contents=[torch.tensor([images, captions])])


def by_hand(queries, candidates, of_query, of_candidate, first):
    """(found, looked for): different queries of which a right candidate is before all wrong ones but `first` - 1."""
    found, pairs = 0, set(zip(of_query, of_candidate, strict=True))
    different = {number: candidates[of_candidate.index(number)] for number in of_candidate}
    for number in set(of_query):
        query = queries[of_query.index(number)]
        similar = {other: float(query @ candidate) for other, candidate in different.items()}
        best = max(value for other, value in similar.items() if (number, other) in pairs)
        found += sum(v >= best for other, v in similar.items() if (number, other) not in pairs) < first
    return found, len(set(of_query))


def noisy_pairs(num_pairs):
    """[2, N, 6] embeddings, of which those of the first half of the pairs are similar."""
    generator = torch.Generator().manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(2, num_pairs, 6, generator=generator), dim=-1)
    half = num_pairs // 2
    x[1, :half] = torch.nn.functional.normalize(x[0, :half] + 0.3 * x[1, :half], dim=-1)
    return x


@pytest.mark.parametrize("rows", [3, 1024])
@pytest.mark.parametrize(("num_images", "num_captions"), [(20, 20), (13, 20), (20, 11), (9, 7)])
def test_counts_are_those_of_a_loop(rows, num_images, num_captions, monkeypatch):
    monkeypatch.setattr(recall, "_ROWS", rows)
    images, captions = [n % num_images for n in range(20)], [n % num_captions for n in range(20)]
    x = noisy_pairs(20)
    x = torch.stack([x[0, images], x[1, captions]])
    of_query = {"captions": (x[0], x[1], images, captions), "images": (x[1], x[0], captions, images)}
    assert recalls([of_one(x, images, captions)]) == {
        f"{name}@{first}": by_hand(*sides, first) for name, sides in of_query.items() for first in (1, 5)
    }


def test_parts_of_ranks_are_joined_by_replica():
    """Of each replica one rank has the embeddings of groups, and another the contents of batches."""
    x, numbers = noisy_pairs(20), torch.arange(20).expand(2, 20)
    whole = recalls([of_one(x, list(range(20)), list(range(20)))])
    parts = [
        HeldOutPairs(replica=1, embeddings=[x[:, 9:]], contents=[]),
        HeldOutPairs(replica=0, embeddings=[], contents=[numbers[:, :9]]),
        HeldOutPairs(replica=1, embeddings=[], contents=[numbers[:, 9:12], numbers[:, 12:]]),
        HeldOutPairs(replica=0, embeddings=[x[:, :7], x[:, 7:9]], contents=[]),
    ]
    assert recalls(parts) == whole
    assert 0 < whole["captions@1"][0] < whole["captions@5"][0] < 20


def test_an_equal_caption_is_right_and_a_repeated_pair_counts_once():
    x = torch.eye(3).expand(2, 3, 3)[:, [0, 1, 2, 0]].clone()
    x[1, 2] = x[1, 1]  # one caption of two images
    x[0, 1] = x[0, 2] = x[1, 1]
    found = recalls([of_one(x, [0, 1, 2, 0], [0, 1, 1, 0])])
    assert found["captions@1"] == (3, 3)
    assert found["images@1"] == (2, 2)


def test_towers_that_give_one_embedding_find_nothing():
    x = torch.nn.functional.normalize(torch.ones(2, 8, 4), dim=-1)
    assert recalls([of_one(x, list(range(8)), list(range(8)))]) == {
        f"{name}@{first}": (0, 8) for first in (1, 5) for name in ("captions", "images")
    }


def test_without_pairs_nothing_is_found():
    assert recalls([HeldOutPairs(replica=0, embeddings=[], contents=[])]) == {}


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_contents_are_equal_where_pixels_and_captions_are(kind):
    """The microbatch between the others is blank."""
    batch, meta = make_pairs(two_towers(kind), [2, 0, 3], seed=0)
    again, _ = make_pairs(two_towers(kind), [2, 0, 3], seed=0)
    numbers = contents(batch, meta)
    assert numbers.shape == (2, 5) and len(set(numbers.flatten().tolist())) == 10
    again.microbatches[2].pixel_values[0] = again.microbatches[0].pixel_values[1]
    again.microbatches[2].input_ids[0] += 1
    changed = contents(again, meta)
    assert changed[0].tolist() == [*numbers[0, :2].tolist(), numbers[0, 1], *numbers[0, 3:].tolist()]
    assert [n for n in range(5) if changed[1, n] != numbers[1, n]] == [2]
