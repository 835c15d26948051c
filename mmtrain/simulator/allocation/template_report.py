"""Templates and compositions as text. Pure."""

from collections import Counter
from collections.abc import Sequence

from mmtrain.config.config import Config, value_of
from mmtrain.config.topology import JobLayout
from mmtrain.simulator.allocation.candidate import toml_of
from mmtrain.simulator.allocation.candidate_judge import GIB
from mmtrain.simulator.allocation.compositions import Composition, Templates
from mmtrain.simulator.study_report import aligned


def compositions(templates: Templates) -> list[Composition]:
    """The best composition on all nodes, on one node less, and so on, down to the fewest that have one."""
    found: list[Composition] = []
    least = (templates.max_failures + 1) * templates.templates[0].nodes
    for nodes in range(templates.max_nodes, least - 1, -1):
        found.append(templates.best(nodes, found[-1] if found else None))
    return found


def described(stage: JobLayout) -> str:
    """The degrees of a stage in a few words."""
    return f"dp_shard {stage.dp_shard}, cp {stage.cp}, tp {stage.tp}"


def table_of_templates(templates: Templates) -> str:
    """A line for each template, with its seconds at its share of the microbatches."""
    rows = [("nodes", "ranks", "peak GiB", "microbatches", "seconds")]
    for one in templates.templates:
        count = max(one.replicas, round(templates.microbatches * one.nodes / templates.max_nodes))
        peak = f"{one.peak_bytes / GIB:.1f}"
        rows.append((str(one.nodes), str(one.depth), peak, str(count), f"{one.seconds(count):.3f}"))
    return "\n".join(aligned(rows)) + "\n"


def table_of_compositions(found: Sequence[Composition], templates: Templates) -> str:
    """A line for each number of nodes.

    Args: found: as of `compositions`. The ideal has the throughput of all nodes, in proportion to nodes.
    """
    rows = [("nodes", "iteration s", "sums s", "against the ideal", "ranks x microbatches (pipelines)")]
    for nodes, one in zip(range(templates.max_nodes, 0, -1), found, strict=False):
        ideal = found[0].seconds * templates.max_nodes / nodes
        pipelines = Counter(zip(one.depths, one.microbatches, strict=True))
        shown = ", ".join(f"{depth} x {count} ({number})" for (depth, count), number in pipelines.items())
        idle = nodes - sum(one.nodes)
        shown += f" ({idle} idle)" if idle else ""
        gain = round(100 * ideal / one.seconds - 100, 1) + 0.0
        rows.append((str(nodes), f"{one.seconds:.3f}", f"{one.sums_s:.3f}", f"{gain:+.1f} %", shown))
    return "\n".join(aligned(rows)) + "\n"


def toml(config: Config, stage: JobLayout, composition: Composition) -> str:
    """What to put into a job's TOML file for a composition. An elastic job finds it by itself, and gets the degrees of
    a stage. Args: stage: degrees of a stage."""
    replaced = ("parallelism.pipeline_parallel_degree", "parallelism.data_parallel_replicate_degree")
    return toml_of(
        {
            **{key: 1 for key in replaced if value_of(config, key) != 1},
            **({} if config.elastic.enable else {"parallelism.pipelines": list(composition.depths)}),
            "parallelism.data_parallel_shard_degree": stage.dp_shard,
            "parallelism.context_parallel_degree": stage.cp,
            "parallelism.tensor_parallel_degree": stage.tp,
        }
    )
