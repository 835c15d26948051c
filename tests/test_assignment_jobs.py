"""Jobs with [assignment] train as jobs without: the same sets of samples, losses and gradients, also after a kill."""

import pytest
import torch

from mmtrain.config import config
from mmtrain.config.data import TokenizerConfig
from mmtrain.data.tokenizer import load_tokenizer
from mmtrain.data.toy.charts import make_charts
from mmtrain.errors import DataError
from mmtrain.local.parity import check_parity
from tests.jobs import SHALLOW, die_at, failing, finished, layout, metrics, train, world_size, write_config
from tests.ranks import run_ranks
from tests.test_trainer import CURVE_TOLERANCE
from tests.whole_models import VISION, config_classes, tiny_text, truth, whole_model

pytestmark = pytest.mark.ranks

SET = [*SHALLOW, "training.seq_len=384", "assignment.samples_per_step=20", "lr_scheduler.decay_ratio=0"]
DEFERRED = ["assignment.policy=entrain", "assignment.defer=true", "assignment.fewer_microbatches=true"]
REGROUPED = [
    "planner.enable=true",
    "planner.search.regroup=true",
    "planner.search.budget_evaluations=2600",
    "planner.device.p2p_latency_s=0",
    "training.global_batch_size=2",
]
BALANCED = ["assignment.policy=balanced", "assignment.evaluations=2"]


def curves(folder):
    """step -> loss, and gradient norm, of a job."""
    return metrics(folder), metrics(folder, "grad_norm")


def without(charts):
    return curves(finished(charts, 1, [*layout(), *SET]))


def assert_close(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(abs(ours[step] / theirs[step] - 1) < CURVE_TOLERANCE for step in ours)


@pytest.mark.parametrize(
    ("degrees", "policy"),
    [
        (layout(replicate=2), DEFERRED),
        (layout(shard=2), [*BALANCED, "assignment.fewer_microbatches=true", "assignment.evaluations=8"]),
        pytest.param(layout(pp=2, shard=2), DEFERRED, marks=pytest.mark.nightly),
        pytest.param(layout(pp=2, replicate=2), [*BALANCED, "planner.enable=true"], marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_the_curve_is_that_of_a_job_without(tmp_path, charts, degrees, policy):
    run_ranks(train, world_size(degrees), write_config(tmp_path, charts), [*degrees, *SET, *policy])
    assert_close(curves(tmp_path), without(charts))


def killed(rank, path, overrides):
    die_at(4)
    train(rank, path, overrides)


def test_a_killed_job_goes_on_with_another_number_of_replicas(tmp_path, charts):
    saving = [*SET, "checkpoint.enable=true", "checkpoint.interval=2"]
    path = write_config(tmp_path, charts)
    with pytest.raises(AssertionError, match="exit code -9"):
        run_ranks(killed, 2, path, [*layout(replicate=2), *saving, *DEFERRED])
    run_ranks(train, 1, path, [*layout(), *saving, *DEFERRED])
    assert_close(curves(tmp_path), without(charts))


def test_samples_that_the_planner_groups_anew_give_the_same_curve(tmp_path, charts):
    run_ranks(train, 2, write_config(tmp_path, charts), [*layout(pp=2), *SET, *REGROUPED])
    given = [*layout(), *SET, "training.global_batch_size=2"]
    assert_close(curves(tmp_path), curves(finished(charts, 1, given)))
    assert 2 not in metrics(tmp_path, "plan_microbatches").values()  # training.global_batch_size
    assert not any(any(metrics(tmp_path, f"plan_{how}").values()) for how in ("late", "failed", "invalid"))


@pytest.mark.parametrize(
    ("degrees", "policy"),
    [
        (layout(pp=2), REGROUPED),
        pytest.param(layout(pp=2, replicate=2), DEFERRED, marks=pytest.mark.nightly),
        pytest.param(layout(cp=2), DEFERRED, marks=pytest.mark.nightly),
        pytest.param(layout(tp=2), DEFERRED, marks=pytest.mark.nightly),
        pytest.param(
            layout(pp=2, cp=2, replicate=2),
            [*REGROUPED, *BALANCED, "training.global_batch_size=4"],
            marks=pytest.mark.nightly,
        ),
    ],
    ids=str,
)
def test_every_gradient_is_that_of_one_process(tmp_path, charts, degrees, policy):
    """Of batches as the loader assigns them, with deferred images and replicas of unequal length, or as the planner
    groups them anew: the first step of the job of the test above."""
    path = write_config(tmp_path, charts)
    parity = check_parity(config.load(path, [*degrees, *SET, *policy]))
    assert parity.problems == []
    assert len(parity.parameters) > 20


def differing(rank, path):
    return failing(rank, path, [*layout(replicate=2), *SET, *(BALANCED if rank else DEFERRED)], DataError)


def test_replicas_that_assign_otherwise_are_named(tmp_path, charts):
    for message in run_ranks(differing, 2, write_config(tmp_path, charts)):
        assert "the replicas of ranks [1] put the step's samples into other microbatches than that of rank 0" in message


def test_a_pair_over_the_memory_limit_is_not_deferred_and_the_job_goes_on(tmp_path, charts):
    """In the last step a microbatch with deferred images takes 3.16 MiB, and none takes more than 3.07 without."""
    limited, free = (write_config(tmp_path / name, charts) for name in ("limited", "free"))
    run_ranks(train, 2, limited, [*layout(pp=2), *SET, *DEFERRED, f"planner.search.activation_memory_gib={3.1 / 1024}"])
    run_ranks(train, 2, free, [*layout(pp=2), *SET, *DEFERRED])
    assert_close(curves(limited.parent), curves(free.parent))
    assert list(metrics(limited.parent, "not_deferred").values()) == [0, 0, 0, 0, 0, 1]
    assert not any(metrics(free.parent, "not_deferred").values())


def test_metrics_show_what_was_assigned(tmp_path, charts):
    run_ranks(train, 1, write_config(tmp_path, charts), [*layout(), *SET, *DEFERRED])
    assert all(metrics(tmp_path, "assignment_s").values())
    assert not any(metrics(tmp_path, "unassigned").values())
    assert max(metrics(tmp_path, "deferred_samples").values()) > 0
    assert max(metrics(tmp_path, "deferred_gib").values()) > 0
    assert all(metrics(tmp_path, "planned_spread_s_vision").values())
    assert all(metrics(tmp_path, "spread_s_language").values())


def drawn(rank, path, overrides, steps):
    """The batches of a job of one rank, and their metadata."""
    from mmtrain.local.driven_steps import gradients
    from mmtrain.training.trainer import Trainer

    items = gradients(Trainer(config.load(path, overrides)), torch.device("cpu"), steps)
    return [(item.batch, item.meta) for item, _ in items]


def trained_by_transformers(folder, batches, lr):
    """(loss, gradient norm) of each step of the whole class under torch's AdamW, one call a document."""
    model = config_classes("qwen2_vl")[1].from_pretrained(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    found = []
    for batch, meta in batches:
        total, _ = truth(model, [(batch, meta)])
        loss = total / meta.num_targets
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


@pytest.mark.parametrize(
    ("degrees", "steps"),
    [(layout(cp=2), 4), pytest.param(layout(pp=2, cp=2), 30, marks=pytest.mark.nightly)],
    ids=str,
)
def test_deferred_documents_with_context_parallelism_train_as_the_class_of_transformers(
    tmp_path, charts, degrees, steps
):
    text = tiny_text("qwen2_vl", vocab_size=512, max_position_embeddings=512)
    whole_model("qwen2_vl", text, VISION["qwen2_vl"] | {"patch_size": 14}, tied=True).save_pretrained(
        tmp_path / "whole"
    )
    load_tokenizer(TokenizerConfig()).save_pretrained(tmp_path / "whole")
    path = write_config(tmp_path, charts)
    job = [f"model.pretrained={tmp_path}/whole", "model.encoder.config={}", "model.language.config={}"]
    job += ["data.min_pixels=3136", f"training.steps={steps}", *SET[len(SHALLOW) :]]
    job += ["lr_scheduler.warmup_steps=0", "optimizer.weight_decay=0.0"]
    (batches,) = run_ranks(drawn, 1, path, [*layout(), *job], steps)
    assert not any(meta.num_deferred for _, meta in batches)
    run_ranks(train, world_size(degrees), path, [*degrees, *job, *DEFERRED])
    deferred = metrics(tmp_path, "deferred_samples")
    assert sum(map(bool, deferred.values())) >= steps / 3
    expected = trained_by_transformers(tmp_path / "whole", batches, lr=3e-3)
    for ours, theirs in zip(curves(tmp_path), zip(*expected, strict=True), strict=True):
        worst = max(abs(ours[step] / value - 1) for step, value in enumerate(theirs, 1))
        assert worst < CURVE_TOLERANCE, (worst, ours, theirs)


@pytest.mark.nightly
def test_charts_are_learned_as_well_as_without(tmp_path):
    """After 500 steps; docs/benchmarks.md has the losses."""
    make_charts(tmp_path / "charts", 12000, 0)
    degrees = layout(shard=2)
    found = {}
    for name, policy in {"none": [], "balanced": BALANCED, "entrain": DEFERRED}.items():
        folders = [f'data.source="{tmp_path}/charts"', f'job.dump_folder="{tmp_path}/{name}/run"']
        run_ranks(train, 2, "debug_vlm.toml", [*degrees, *folders, *policy], timeout=1800)
        found[name] = metrics(tmp_path / name, "validation_loss")
    assert all(losses.keys() == {0, 250, 500} for losses in found.values())
    assert all(losses[500] < losses[250] < 0.8 for losses in found.values())
    assert max(abs(losses[500] - found["none"][500]) for losses in found.values()) < 0.05, found
