"""The divided vocabulary against torch on the whole one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mmtrain.models.loss import WholeVocabulary, loss_of
from mmtrain.parallel.row_shards import RowShards
from mmtrain.parallel.tensor_vocabulary import VocabularyEmbedding, VocabularyShards, token_shards
from tests.ranks import run_ranks
from tests.reference import model_config

WORDS, WIDTH = 12, 5


def tp_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def losses(rank):
    """case -> (difference of the losses, of this rank's gradient; predictions of both; dtypes)."""
    mesh, generator = tp_mesh(), torch.Generator().manual_seed(0)
    loss, part, all_tokens = (
        loss_of(model_config()),
        VocabularyShards(token_shards(mesh.get_group(), RowShards(mesh))),
        WholeVocabulary(),
    )
    ordinary = 3 * torch.randn(7, WORDS, generator=generator)
    ties = torch.zeros(4, WORDS)
    ties[1, [5, 7]] = 2.0  # in one part, or in two
    ties[2, [1, 10]] = 2.0
    ties[3, [6, 11]] = -1.0
    cases = {
        "ordinary": ordinary,
        "large": ordinary + torch.tensor([300.0] * 3 + [-300.0] * 4)[:, None],
        "ties": ties,
        "no position": ordinary[:0],
        "bfloat16": ordinary.bfloat16(),
    }
    found = {}
    for name, logits in cases.items():
        targets = torch.randint(0, WORDS, (len(logits),), generator=generator)
        whole = logits.clone().requires_grad_()
        expected, predictions = nn.functional.cross_entropy(whole.float(), targets, reduction="sum"), whole.argmax(-1)
        assert torch.equal(loss(whole, targets), expected), name
        assert torch.equal(all_tokens.most_likely(whole), predictions), name
        (2.5 * expected).backward()
        mine = logits.chunk(mesh.size(), dim=1)[rank].clone().requires_grad_()
        value, ours = loss(mine, targets, vocabulary=part), part.most_likely(mine)
        (2.5 * value).backward()
        wanted = whole.grad.chunk(mesh.size(), dim=1)[rank]
        each = nn.functional.cross_entropy(logits.float(), targets, reduction="none")
        assert torch.allclose(loss(mine, targets, reduction="none", vocabulary=part), each, atol=2e-5), name
        assert value.dtype == torch.float32
        assert mine.grad.dtype == logits.dtype
        error = (mine.grad - wanted).abs().max().item() if len(logits) else 0.0
        found[name] = (abs(float(value.detach() - expected.detach())), error, ours.tolist(), predictions.tolist())
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("tp", [2, 3])
def test_loss_gradient_and_predictions_equal_those_of_the_whole_vocabulary(tp):
    for found in run_ranks(losses, tp):
        for case, (loss, gradient, ours, theirs) in found.items():
            assert loss < 2e-5, (case, loss)
            assert gradient < (1e-2 if case == "bfloat16" else 5e-6), (case, gradient)
            assert ours == theirs, case
        assert found["ties"][2] == [0, 5, 1, 0]


def embeddings(rank, padding):
    mesh, generator = tp_mesh(), torch.Generator().manual_seed(0)
    weight = torch.randn(WORDS, WIDTH, generator=generator)
    ids = torch.tensor([0, 11, 5, 6, 7, 5, 3, 7])
    upstream = torch.randn(len(ids), WIDTH, generator=generator)
    whole = weight.clone().requires_grad_()
    expected = nn.functional.embedding(ids, whole, padding)
    (expected * upstream).sum().backward()
    mine = weight.chunk(mesh.size())[rank].clone().requires_grad_()
    rows = VocabularyEmbedding(padding, mesh, RowShards(mesh))(ids, mine)
    (rows * upstream.chunk(mesh.size())[rank]).sum().backward()
    same = torch.equal(rows, expected.chunk(mesh.size())[rank])
    return same, torch.allclose(mine.grad, whole.grad.chunk(mesh.size())[rank]), int(mine.grad.any(dim=1).sum())


@pytest.mark.ranks
def test_embedding_and_its_gradient_equal_those_of_the_whole_vocabulary():
    for padding, words in ((None, 6), (7, 5), (0, 5)):  # of the ids, without the padding
        found = run_ranks(embeddings, 2, padding)
        assert all(rows and gradient for rows, gradient, _ in found)
        assert sum(count for *_, count in found) == words
