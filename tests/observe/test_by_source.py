import torch

from mmtrain.costs.cost_model import FlopsCosts
from mmtrain.modality.metadata import DocumentMeta, IterationMeta, MicrobatchMeta
from mmtrain.modality.typical import reference_sizes
from mmtrain.models.batch import IGNORE_INDEX
from mmtrain.observe.by_source import SourceTotals, source_sums, source_totals
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.job import Job
from mmtrain.planner.partition.partition import partition
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.spec.builders import model_spec
from tests.reference import PLANNER, model_config


class LeaderAlone:
    """What `source_sums` asks of a mesh of one rank."""

    class place:
        cp = tp = 0

    class layout:
        cp = 1

    is_leader = True


def document(sample, source, num_targets):
    return DocumentMeta(sample=sample, source=source, num_tokens=4, num_targets=num_targets, images=())


def test_each_position_belongs_to_the_source_of_its_document():
    documents = [document(0, "b", 2), document(1, "a", 1)], [document(1, "b", 1)]
    meta = IterationMeta(microbatches=tuple(MicrobatchMeta(documents=tuple(parts)) for parts in documents))
    spec = model_spec(model_config(None))
    planner = IterationPlanner(
        Job(
            spec=spec,
            partition=partition(spec, 1, {"language": 1}, reference_sizes(spec, 64)),
            section=PLANNER,
            costs=FlopsCosts.of(PLANNER),
            schedule=CATALOGUE["1F1B"],
            sub_microbatch_size=0,
            sharded=False,
        )
    )
    labels = [torch.full((8,), IGNORE_INDEX), torch.full((4,), IGNORE_INDEX)]
    labels[0][[1, 2, 5]] = labels[1][0] = 7
    losses = {0: torch.tensor([1.0, 2.0, 4.0]), 1: torch.tensor([8.0])}
    plan = planner.plan(meta, forward_only=True)
    sums = source_sums(("a", "b", "c"), plan, meta, labels, losses, LeaderAlone())
    assert source_totals(("a", "b", "c"), sums) == {
        "a": SourceTotals(1, 4, 1, 4.0),
        "b": SourceTotals(2, 8, 3, 11.0),
        "c": SourceTotals(0, 0, 0, 0.0),
    }
    assert [totals.loss for totals in source_totals(("a", "b", "c"), sums).values()] == [4.0, 11 / 3, None]
    assert source_totals((), source_sums((), plan, meta, labels, {}, LeaderAlone())) == {}
