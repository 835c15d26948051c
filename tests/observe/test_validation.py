import json
from pathlib import Path

import pytest
import torch

from mmtrain.costs.cost_model import FlopsCosts
from mmtrain.modality.metadata import DocumentMeta, IterationMeta, MicrobatchMeta
from mmtrain.modality.typical import reference_sizes
from mmtrain.models.batch import IGNORE_INDEX
from mmtrain.observe.validation import count_answers
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.job import Job
from mmtrain.planner.partition.partition import partition
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.spec.builders import model_spec
from tests.jobs import SHALLOW, layout, metrics, train, write_config
from tests.ranks import run_ranks
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
        Job(
            spec=spec,
            partition=parts,
            section=PLANNER,
            costs=FlopsCosts.of(PLANNER),
            schedule=CATALOGUE["1F1B"],
            sub_microbatch_size=0,
            sharded=False,
        )
    )
    plan = planner.plan(meta, forward_only=True)
    labels = torch.full((12,), IGNORE_INDEX)
    labels[[1, 2, 4, 7, 9]] = torch.tensor([10, 11, 12, 13, 14])
    counts: dict[str, tuple[int, int]] = {"easy": (5, 6)}
    count_answers(plan, meta, [labels], {0: torch.tensor([10, 99, 12, 13, 14])}, counts)
    assert counts == {"easy": (6, 8), "hard": (1, 1)}


@pytest.mark.ranks
def test_the_loss_of_one_held_out_sample_does_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    """At batch size 4 over two replicas, one of them has no sample."""
    for split, count in (("train", 12), ("validation", 1)):
        rows = [
            {"messages": [{"role": "user", "content": f"count to {i}"}, {"role": "assistant", "content": "one two"}]}
            for i in range(count)
        ]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    for name, world, batch in (("one", 1, 1), ("two", 2, 4)):
        path = write_config(tmp_path / name, tmp_path)
        words = [*SHALLOW, *layout(shard=world), "training.steps=1", "lr_scheduler.warmup_steps=0"]
        words += [f"training.global_batch_size={batch}", "training.seq_len=64", "validation.enable=true"]
        run_ranks(train, world, path, words)
        found.append((metrics(tmp_path / name, "validation_loss")[0], metrics(tmp_path / name, "accuracy")[0]))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    assert found[1][1] == found[0][1]
