"""Compositions of pipelines: the knapsack against enumeration, and the rule for lost nodes."""

import random
from itertools import combinations_with_replacement

import pytest

from mmtrain.errors import ConfigError
from mmtrain.simulator.allocation.compositions import Template, Templates
from mmtrain.simulator.allocation.local_rule import local


def straight(nodes, per_microbatch, filling=0.0, replicas=1):
    """A template whose seconds are a line."""
    points = ((1, filling + per_microbatch), (2, filling + 2 * per_microbatch))
    held = tuple(frozenset({("language", layer)}) for layer in range(nodes))
    return Template(nodes=nodes, depth=nodes, points=points, replicas=replicas, held=held)


def job(sizes, max_failures=1, microbatches=24, max_nodes=16, **given):
    """A job of 12 layers on templates of which each node does an equal part."""
    templates = tuple(straight(n, 12 / n, filling=1 + n / 10) for n in sizes)
    return Templates(
        templates=templates, max_failures=max_failures, microbatches=microbatches, max_nodes=max_nodes, **given
    )


def multisets(sizes, nodes):
    """All multisets of sizes that add up to at most `nodes`."""
    for count in range(1, nodes // min(sizes) + 1):
        yield from (one for one in combinations_with_replacement(sizes, count) if sum(one) <= nodes)


def dealt(pipelines, microbatches):
    """The shortest step by giving each microbatch to the pipeline that ends it first."""
    counts = [one.replicas for one in pipelines]
    for _ in range(microbatches - sum(counts)):
        best = min(range(len(counts)), key=lambda i: pipelines[i].seconds(counts[i] + 1))
        counts[best] += 1
    return max(one.seconds(count) for one, count in zip(pipelines, counts, strict=True))


def random_job(rng):
    n_0, kinds, replicas = rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 2)
    templates = []
    for nodes in range(n_0, n_0 + kinds):
        seconds = rng.uniform(0.1, 5) / nodes
        points = [(1, seconds)]
        for _ in range(rng.randint(0, 3)):
            seconds += rng.uniform(0.1, 5) / nodes
            points.append((points[-1][0] + rng.randint(1, 3), seconds))
        templates.append(Template(nodes=nodes, depth=nodes, points=tuple(points), replicas=replicas))
    failures = rng.randint(0, 2)
    least = (failures + 1) * n_0
    return Templates(
        templates=tuple(templates),
        max_failures=failures,
        microbatches=rng.randint((failures + 1) * replicas, 20),
        max_nodes=least + rng.randint(0, 6),
    )


@pytest.mark.parametrize("seed", range(200))
def test_no_composition_is_faster(seed):
    rng = random.Random(seed)
    of = random_job(rng)
    sizes = [one.nodes for one in of.templates]
    for nodes in range((of.max_failures + 1) * sizes[0], of.max_nodes + 1):
        steps = [
            dealt([of.of(n) for n in one], of.microbatches)
            for one in multisets(sizes, nodes)
            if len(one) > of.max_failures and len(one) * of.templates[0].replicas <= of.microbatches
        ]
        found = of.best(nodes)
        assert found.seconds == pytest.approx(min(steps), rel=1e-8)
        assert found.seconds == pytest.approx(dealt(found.pipelines, of.microbatches), rel=1e-8)
        assert sum(found.microbatches) == of.microbatches and min(found.microbatches) >= of.templates[0].replicas
        assert sum(found.nodes) <= nodes and len(found.nodes) > of.max_failures


def test_sizes_below_twice_the_least_cover_every_number_of_nodes():
    """Theorem 1 of Oobleck needs more templates than this: n_0 .. 2 n_0 - 1 are enough, with f + 1 pipelines."""
    for n_0 in range(1, 9):
        reached, most = {(0, 0)}, 60
        for _ in range(most // n_0):
            reached |= {(nodes + n, count + 1) for nodes, count in reached for n in range(n_0, 2 * n_0)}
        for failures in range(5):
            covered = {nodes for nodes, count in reached if count > failures}
            assert set(range((failures + 1) * n_0, most + 1)) <= covered
            if failures:
                of = job(range(n_0, 2 * n_0), max_failures=failures, microbatches=60, max_nodes=most)
                assert len(of.best((failures + 1) * n_0).nodes) == failures + 1


def test_sums_decide_between_compositions_that_are_about_as_fast():
    alone = job(range(2, 8), max_failures=0, max_nodes=6, microbatches=60)
    dear = job(range(2, 8), max_failures=0, max_nodes=6, microbatches=60, sums_s=lambda pipelines: len(pipelines) * 0.9)
    assert len(dear.best(6).nodes) < len(alone.best(6).nodes)
    assert dear.best(6).sums_s == 0.9 * len(dear.best(6).nodes)


def test_ties_copy_the_fewest_bytes():
    equal = tuple(straight(n, 2.0) for n in (3, 4))
    of = Templates(templates=equal, max_failures=1, microbatches=8, max_nodes=8)
    before = of.composed([of.of(4), of.of(4)])
    assert of.copied_bytes(before, before) == 0.0
    after = of.best(7, before)
    assert after.nodes == (3, 4)
    assert of.copied_bytes(before, after) == 0.0, "a pipeline of three nodes holds what four held"
    assert of.copied_bytes(after, before) == 1.0


def test_the_table_is_linear_between_points_and_never_falls():
    one = Template(nodes=1, depth=2, points=((1, 3.0), (3, 5.0), (5, 4.0)), replicas=2)
    assert one.table(10).tolist() == [3, 3, 4, 4, 5, 5, 5, 5, 5, 5]
    assert one.seconds(6) == 5.0
    assert Template(nodes=1, depth=1, points=((1, 4.0),)).seconds(3) == 12.0


@pytest.mark.parametrize(
    ("nodes", "lost", "after"),
    [
        ((4, 2), (1, 0), (3, 2)),
        ((3, 2), (0, 1), (2, 2)),
        ((2, 2, 2), (1, 0, 0), (3, 2)),
        ((2, 2, 2, 2), (1, 1, 0, 1), (3, 2)),
        ((4, 2, 2), (0, 2, 1), (3, 2)),
        ((5, 2, 2), (0, 1, 1), (3, 2, 2)),
        ((3, 2, 2), (2, 0, 0), (3, 2)),
    ],
)
def test_lost_nodes_shrink_borrow_or_merge(nodes, lost, after):
    of = job(range(2, 8))
    found = local(of, of.composed([of.of(n) for n in nodes]), lost)
    assert found.nodes == after and sum(found.microbatches) == 24


def test_lost_nodes_that_leave_too_few_pipelines():
    of = job(range(2, 8))
    with pytest.raises(ConfigError, match="3 nodes are left, fewer than 2 pipelines of at least 2 nodes"):
        local(of, of.composed([of.of(2), of.of(2)]), (1, 0))


def test_a_merged_pipeline_without_a_template_is_refused():
    of = job([2])
    with pytest.raises(ConfigError, match="no template of 3 nodes"):
        local(of, of.composed([of.of(2), of.of(2), of.of(2)]), (1, 0, 0))


def test_bad_input_is_one_line():
    with pytest.raises(ConfigError, match=r"^allocate: 3 nodes \(--nodes\) are fewer than 2 pipelines"):
        job([2, 3]).best(3)
    with pytest.raises(ConfigError, match=r"^allocate: training\.global_batch_size = 1 microbatches are fewer than 2"):
        job([2, 3], microbatches=1).best(4)
