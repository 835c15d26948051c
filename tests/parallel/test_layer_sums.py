"""Sums of gradients by layer, on pipelines that are cut in different places: against sums by hand."""

import pytest
import torch
from torch import nn

from mmtrain.config.topology import JobLayout
from mmtrain.errors import PlanError
from mmtrain.parallel import layer_sums
from mmtrain.parallel.grads import squared_norm
from mmtrain.parallel.layer_sums import LayerSums
from mmtrain.parallel.mesh import build_mesh
from mmtrain.spec.vocabulary import vocabulary_rows
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

LAYOUT = JobLayout(depths=(1, 2))
CUTS = [[("a", "b", "c", "d")], [("a",), ("b", "c", "d")]]
"""[pipeline][stage] -> its layers."""
FROZEN, TIED = "c", {"d.weight": "a.weight"}
SHAPES = {"a": (3, 2), "b": (5,), "c": (4,), "d": (3, 2)}


class Layer(nn.Module):
    def __init__(self, name, rank, wrong_shape):
        super().__init__()
        shape = (7,) if wrong_shape and name == "b" and rank == 2 else SHAPES[name]
        self.weight = nn.Parameter(torch.zeros(shape), requires_grad=name != FROZEN)


def chunk(names, rank, wrong_shape=False):
    return nn.ModuleDict({name: Layer(name, rank, wrong_shape) for name in names})


def gradient(name, rank):
    return torch.full(SHAPES[name], float(10 * (1 + "abcd".index(name)) + rank))


def summed(rank, how, most, dtype):
    """Name -> gradient after the sums, and the number of messages of this rank."""
    layer_sums.MOST_ELEMENTS = most
    mesh = build_mesh(LAYOUT, torch.device("cpu"))
    names = CUTS[mesh.place.pipeline][mesh.place.pp]
    stages = {mesh.place.pp: chunk(names, rank)}
    if how == "two chunks of one rank" and rank == 0:
        stages = {0: chunk(names[:2], rank), 1: chunk(names[2:], rank)}
    sums = LayerSums.of(stages, TIED, mesh, dtype)
    for _ in range(2):  # of two steps
        for index, module in stages.items():
            for name, layer in module.items():
                layer.weight.grad = gradient(name, rank) if name != FROZEN else None
                if how == "no gradient" and name == "b" and rank == 0:
                    layer.weight.grad = None
            if how != "not reduced":
                sums.stage_reduced(index)
        sums.finish()
    found = {name: layer.weight.grad for module in stages.values() for name, layer in module.items()}
    return {name: grad if grad is None else grad.clone() for name, grad in found.items()}, len(sums.sums)


HOLDERS = {"a": (0, 1), "b": (0, 2), "d": (0, 2)}


def total(name, how):
    """By hand: `a` and `d` are one matrix, with copies on ranks 0 (both), 1 and 2."""
    if name == "b":
        return gradient("b", 2) + (0 if how == "no gradient" else gradient("b", 0))
    return sum(gradient(other, rank) for other in ("a", "d") for rank in HOLDERS[other])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most", [1 << 25, 1])
@pytest.mark.parametrize("how", ["one chunk", "two chunks of one rank", "no gradient", "not reduced"])
def test_every_holder_has_the_sum(how, most, dtype):
    for grads, messages in run_ranks(summed, 3, how, most, dtype):
        assert grads.pop(FROZEN, None) is None
        assert messages == 1 + ("b" in grads)
        for name, grad in grads.items():
            assert torch.equal(grad, total(name, how)), name


def disagreeing(rank, how):
    mesh = build_mesh(LAYOUT, torch.device("cpu"))
    names = CUTS[mesh.place.pipeline][mesh.place.pp]
    if how == "a layer is missing" and rank == 2:
        names = ("c", "d")
    with pytest.raises(PlanError) as caught:
        LayerSums.of({0: chunk(names, rank, how == "another shape")}, TIED, mesh, torch.float32)
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("a layer is missing", r"equal shards of b.weight: \[\(5,\)\] on ranks \[0\]; all need one version"),
        ("another shape", r"equal shards of b.weight: \[\(5,\), \(7,\)\] on ranks \[0, 2\]"),
    ],
)
def test_pipelines_with_other_layers_are_refused_on_all_ranks(how, message):
    import re

    for said in run_ranks(disagreeing, 3, how):
        assert re.search(message, said), said


def alone(rank):
    mesh = build_mesh(JobLayout.grid(), torch.device("cpu"))
    untied = LayerSums.of({0: chunk("abcd", rank)}, {}, mesh, torch.float32)
    stages = {0: chunk("ab", rank), 1: chunk("cd", rank)}
    tied = LayerSums.of(stages, TIED, mesh, torch.float32)
    for module in stages.values():
        for name, layer in module.items():
            layer.weight.grad = gradient(name, 0)
    tied.finish()
    return len(untied.sums), len(tied.sums), stages[0]["a"].weight.grad, stages[1]["d"].weight.grad


def test_a_pipeline_alone_adds_up_its_tied_copies_only():
    ((none, one, first, last),) = run_ranks(alone, 1)
    assert (none, one) == (0, 1)
    assert torch.equal(first, gradient("a", 0) + gradient("d", 0)) and torch.equal(first, last)


def of_rows(rank):
    """The gradient after the sums, the square of the norm, and messages: 2 pipelines whose ranks have 3 rows of 6."""
    mesh = build_mesh(JobLayout(depths=(2, 2)), torch.device("cpu"))
    part = chunk("a", rank)
    part.stored_rows = {"a.weight": vocabulary_rows(6, 2)[mesh.place.pp]}
    sums = LayerSums.of({mesh.place.pp: part}, {}, mesh, torch.float32)
    parameter = part["a"].weight
    parameter.grad = gradient("a", rank)
    sums.stage_reduced(mesh.place.pp)
    sums.finish()
    own = squared_norm([parameter], mesh)
    torch.distributed.all_reduce(own)
    return parameter.grad, own.item(), len(sums.sums)


def test_rows_of_one_matrix_are_no_copies():
    """Ranks of one pipeline have rows of equal shapes, whose sum is over the pipelines alone."""
    grads = [gradient("a", rank) for rank in range(4)]
    wanted = [grads[rank % 2] + grads[rank % 2 + 2] for rank in range(4)]
    norm = sum(grad.square().sum().item() for grad in wanted[:2])
    for rank, (grad, found, messages) in enumerate(run_ranks(of_rows, 4)):
        assert torch.equal(grad, wanted[rank])
        assert found == norm
        assert messages == 1
