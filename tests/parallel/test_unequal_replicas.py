"""Replicas with unequal numbers of microbatches in one step train as one process does on all of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mmtrain.config import config
from mmtrain.config.topology import JobLayout
from mmtrain.data.noise_batches import noise_batch
from mmtrain.modality.metadata import IterationMeta, MicrobatchMeta
from mmtrain.models.batch import Batch
from mmtrain.training.trainer import Trainer
from tests.jobs import SHALLOW, layout, metrics, world_size, write_config
from tests.parallel.parity import Case, check, layouts, run_layout
from tests.parallel.test_parity import TOLERANCE
from tests.planner.specs import microbatch
from tests.ranks import run_ranks
from tests.reference import model_config

pytestmark = pytest.mark.ranks

THREE_AND_FIVE = [[[1, 0], [0], [2]], [["i"], ["<i", 0], [0, 0], [1, "i"], ["<i"]]]
FIVE_AND_ONE = [[[0], [2, 1], [0, 0], [3], [1]], [[0, 0]]]
"""One replica has a microbatch of text alone, so half of its chunks have no work."""
RUNS = (("1F1B", 1), ("interleave", 0))
CASES = {
    "three and five": Case(model=model_config(tied=True), images=THREE_AND_FIVE, runs=RUNS),
    "five and one": Case(model=model_config(frozen=("encoder",)), images=FIVE_AND_ONE, runs=RUNS[:1]),
}


@layouts(
    dict.fromkeys((JobLayout.grid(dp_shard=2), JobLayout.grid(dp_replicate=2), JobLayout.grid(pp=2, dp_shard=2)), CASES)
)
def test_loss_and_gradients(shape, cases):
    check(run_ranks(run_layout, shape.world_size, shape, cases), TOLERANCE)


STEPS = 3
SHAPES = [[(28, 28)], [], [(28, 56), (28, 28)], [(56, 56)], [], [(28, 28)], [], [(56, 28)]]
"""Height and width in pixels of the images of each microbatch."""
OF_REPLICAS = [(0, 2, 1), (3, 4, 5, 6, 7)]
DEFERRED = {2, 5}
"""Microbatches whose images replicas encode with the microbatch before."""


class Fed(Trainer):
    """A job that gets its batches here, and not from a loader."""

    def resume_state(self) -> None:
        super().resume_state()
        mesh = self.mesh
        several = mesh.layout.dp > 1
        chosen = OF_REPLICAS[mesh.dp_rank] if several else range(len(SHAPES))
        batches = [batch_of(self.config, step, chosen, deferral=several) for step in range(STEPS)]
        self.items = iter([self.placement.data.item(*batch) for batch in batches])


def batch_of(
    job: config.Config, step: int, chosen: range | tuple[int, ...], *, deferral: bool
) -> tuple[Batch, IterationMeta]:
    """Some microbatches of a step; each has the same content, whichever others there are."""
    batch, metas = Batch(), []
    for number in chosen:
        sides = [(h // 14, w // 14) for h, w in SHAPES[number]]
        meta: MicrobatchMeta = microbatch(100 * step + number, sides, text_tokens=6 + number)
        (document,) = meta.documents
        meta = MicrobatchMeta(documents=(replace(document, deferred=deferral and number in DEFERRED),))
        metas.append(meta)
        one = noise_batch(job.model, IterationMeta(microbatches=(meta,)), seed=100 * step + number)
        batch.microbatches += one.microbatches
    return batch, IterationMeta(microbatches=tuple(metas))


def run(rank: int, path: Path, overrides: list[str]) -> None:
    Fed(config.load(path, overrides)).run()


@pytest.mark.parametrize(
    "extra",
    [layout(shard=2), [*layout(pp=2, replicate=2), "planner.enable=true", "planner.search.budget_evaluations=30"]],
)
def test_jobs_count_and_train_as_one_process(tmp_path, charts, extra):
    found = {}
    for name, more in (("one", []), ("two", extra)):
        path = write_config(tmp_path / name, charts)
        keys = [*SHALLOW, *more, f"training.steps={STEPS}", "training.global_batch_size=8"]
        keys += [f"metrics.timeline_freq={STEPS}", f"metrics.trace_freq={STEPS}"]
        run_ranks(run, world_size(more[:5]) if more else 1, path, keys)
        found[name] = {key: metrics(path.parent, key) for key in ("loss", "grad_norm", "tokens", "images", "patches")}
    one, two = found["one"], found["two"]
    for key in one:
        assert sorted(one[key]) == sorted(two[key]) == [1, 2, 3], key
        for step, value in one[key].items():
            assert abs(two[key][step] - value) <= 1e-5 * abs(value), (key, step)
    assert [metrics(tmp_path / name, "deferred_images")[STEPS] for name in ("one", "two")] == [0, 3]
    for name, deferred in (("one", []), ("two", [[0, 0, 1]])):
        folder = tmp_path / name / "run"
        timeline = json.loads((folder / "timelines" / f"step-{STEPS}.json").read_text())
        assert timeline["deferred"] == deferred, name
        for drawing in (f"timelines/step-{STEPS}.svg", f"traces/step-{STEPS}.json"):
            text = (folder / drawing).read_text().replace("&gt;", ">")
            assert ("F0.1> vision" in text) == bool(deferred), (name, drawing)
