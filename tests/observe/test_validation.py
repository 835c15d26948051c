import torch

from mmtrain.modality.metadata import DocumentMeta, IterationMeta, MicrobatchMeta
from mmtrain.modality.typical import reference_sizes
from mmtrain.models.batch import IGNORE_INDEX
from mmtrain.observe.validation import count_answers
from mmtrain.planner.costs.cost_model import FlopsCosts
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.partition.partition import partition
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.spec.builders import model_spec
from tests.reference import PLANNER, model_config


def test_an_answer_is_right_if_all_of_its_tokens_are():
    document = {"num_tokens": 6, "images": ()}
    meta = IterationMeta(
        microbatches=(
            MicrobatchMeta(
                documents=(
                    DocumentMeta(sample=0, num_targets=3, grade="easy", answers=(2, 1), **document),
                    DocumentMeta(sample=1, num_targets=2, grade="hard", answers=(2,), **document),
                )
            ),
        )
    )
    spec = model_spec(model_config(None))
    parts = partition(spec, 1, {"language": 1}, reference_sizes(spec, 64))
    planner = IterationPlanner(
        spec=spec,
        partition=parts,
        section=PLANNER,
        costs=FlopsCosts.of(PLANNER),
        schedule=CATALOGUE["1F1B"],
        sub_microbatch_size=0,
        sharded=False,
    )
    plan = planner.plan(meta, forward_only=True)
    labels = torch.full((12,), IGNORE_INDEX)
    labels[[1, 2, 4, 7, 9]] = torch.tensor([10, 11, 12, 13, 14])
    counts: dict[str, tuple[int, int]] = {"easy": (5, 6)}
    count_answers(plan, meta, [labels], {0: torch.tensor([10, 99, 12, 13, 14])}, counts)
    assert counts == {"easy": (6, 8), "hard": (1, 1)}
