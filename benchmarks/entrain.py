"""python benchmarks/entrain.py [--setups h800,a40-1b,a40-3b] [--workloads mix,interleaved] [--iterations 40]
[--searched 40] [--evaluations 1000] [--refinements 16] [--replicas 4] [--rows TEXT;TEXT] [--parts speed,packed,std,cpu]

Entrain (Jang, dissertation, University of Michigan, 2026, chapter 4) part by part in simulation, on equal samples.

speed    seconds of an iteration's pipelines, the slowest replica, over those of random microbatches under 1F1B with
         modules on ranks of their own. Four samples a microbatch, 32 microbatches a replica, without limits of sizes;
         memory is that of the most loaded rank over its device's, at its peak in any iteration. `own`: 1F1B, and those
         ranks for which the slowest stage is fastest by the work of 256 samples; literal ranks are in proportion to
         that work, or to one sample's for DistTrain. `search`: all modules on all ranks, plans searched within 92 % of
         the device. Uneven: the slowest replica over the mean one. Of the last row: its speed over each row, geometric
         mean and least of all iterations
packed   the same for full microbatches of 8,192 tokens as first-fit packs them, 8 a replica, under the search: what
         `balanced` does where the capacity is hard
std      table 4.3: standard deviation of the forward milliseconds of a microbatch in each module, for the workloads
         that stand in for the thesis's data sets
cpu      milliseconds of thread time of one assignment of 512 samples over 4 replicas

h800: VLM-S (ViT 5B + Llama3 8B) at pp 8, tp 4, dp 4. a40-1b, a40-3b: Qwen2.5-VL's tower with Llama 3 of 1b and 3b at
pp 8, tp 2, dp 4 on 64 A40s, as in the thesis.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from disttrain import disttrain

from mmtrain.config import config
from mmtrain.config.assignment import AssignmentConfig
from mmtrain.config.config import Config
from mmtrain.modality.equal_parts import split_evenly
from mmtrain.modality.metadata import DocumentMeta, IterationMeta
from mmtrain.modality.typical import TypicalSizes
from mmtrain.planner.assignment.assign import assign
from mmtrain.planner.assignment.assignment import (
    AssignedMicrobatch,
    Assignment,
    SampleCost,
    in_turns,
    language_samples,
)
from mmtrain.planner.assignment.filling import AssignmentInput
from mmtrain.planner.assignment.sample_costs import PassesNs, SamplePricer, cost_of, times
from mmtrain.planner.assignment.step_assigner import StepAssigner, language_microbatches
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.make_plan import JobMethod, make_plan
from mmtrain.planner.memory.limit import MemoryRule
from mmtrain.planner.result import PlanResult
from mmtrain.planner.search.search import warm
from mmtrain.planner.search_settings import search_seed
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.timeline import Timeline
from mmtrain.simulator.allocation.stable_batch import proportional
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.workloads import draw
from mmtrain.spec.work_size import ZERO_WORK, WorkSize

SAMPLES = 4
"""Of a microbatch on average, as in the thesis."""
PACKED, CAPACITY = 8, 8192
"""Full microbatches of a replica, and their tokens."""
WORKLOADS = ("mix", "interleaved")
DATA_SETS = {
    "mix": "SynthChartNet", "interleaved": "ChartQA", "science_qa": "CocoQA", "image_text_pairs": "LLaVA-150k"
}  # fmt: skip
"""Workload -> the thesis's data set in the same column. Both are ordered by how uneven they are; they are not alike."""
PUBLISHED = {
    "vision": {"disttrain": (208.07, 61.34, 22.82, 17.98), "entrain": (19.60, 15.23, 22.11, 8.11)},
    "language a40-1b": {"disttrain": (77.92, 61.34, 22.82, 17.98), "entrain": (18.79, 15.23, 22.11, 8.11)},
    "language a40-3b": {"disttrain": (164.55, 35.44, 5.37, 32.92), "entrain": (40.24, 25.72, 5.52, 31.66)},
}
"""Table 4.3, without units there; three of the four columns of Llama 1b repeat those of the vision rows."""
TOWER = (
    "{ model_type = 'qwen2_5_vl_vision', depth = 32, hidden_size = 1280, intermediate_size = 3420, num_heads = 16, "
    "out_hidden_size = %d, patch_size = 14, spatial_merge_size = 2, window_size = 112, fullatt_block_indexes = "
    "[7, 15, 23, 31] }"
)
LANGUAGES = {"a40-1b": (16, 2048, 8192, 32), "a40-3b": (28, 3072, 8192, 24)}
"""Layers, width, inner width and heads of Llama 3.2."""
A40 = """
[model.encoder]
config = {tower}
[model.language]
config = {{ model_type = "llama", num_hidden_layers = {layers}, hidden_size = {width}, intermediate_size = {inner}, num_attention_heads = {heads}, num_key_value_heads = 8, vocab_size = 128256, tie_word_embeddings = true }}
[data]
source = "nowhere"
[training]
steps = 1
seq_len = 8192
loss_chunk_tokens = 0
global_batch_size = 128
mixed_precision_param = "bfloat16"
[activation_checkpoint]
mode = "full"
[parallelism]
tensor_parallel_degree = 2
[planner]
hardware = "a40x64"
"""  # noqa: E501


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model on a cluster."""

    name: str
    folder: Path
    evaluations: int
    num_replicas: int = 4
    num_microbatches: int = 32
    """Of a replica."""
    num_ranks: int = 8
    """Of a pipeline."""

    def job(self, *overrides: str) -> Config:
        """The job. Args: overrides: of its config."""
        degrees = [
            f"parallelism.pipeline_parallel_degree={self.num_ranks}",
            f"parallelism.data_parallel_shard_degree={self.num_replicas}",
            f"training.global_batch_size={self.num_replicas * self.num_microbatches}",
            "planner.memory_limit=",
        ]
        if self.name == "h800":
            cluster = f"planner.hardware=h800x{4 * self.num_ranks * self.num_replicas}"
            return config.load("vlm_s.toml", [cluster, *degrees, *overrides])
        layers, width, inner, heads = LANGUAGES[self.name]
        path = self.folder / f"{self.name}.toml"
        path.write_text(A40.format(tower=TOWER % width, layers=layers, width=width, inner=inner, heads=heads))
        cluster = f"planner.hardware=a40x{2 * self.num_ranks * self.num_replicas}"
        return config.load(path, [cluster, *degrees, *overrides])

    @cached_property
    def pricer(self) -> SamplePricer:
        """Costs of samples."""
        return SamplePricer.of(self.job())

    def device_part(self, planner: IterationPlanner, timeline: Timeline) -> float:
        """Memory of the most loaded rank at its peak, with its state and the planner's margin, over its device's."""
        rule = MemoryRule.of_device(self.job())
        budget = rule.budget(planner.job.spec, planner.job.partition)
        limits = budget.activation_limits
        assert rule.limit_bytes and limits
        most = max(peak - limit for peak, limit in zip(timeline.peak_bytes, limits, strict=True) if limit is not None)
        return 1 + most / rule.limit_bytes

    @cached_property
    def searching(self) -> IterationPlanner:
        """All modules on all ranks, plans searched."""
        keys = [
            "planner.enable=true",
            "planner.memory_limit=92%",
            f"planner.search.budget_evaluations={self.evaluations}",
            "planner.search.budget_s=0",
        ]
        return IterationPlanner(make_job(self.job(*keys)))

    @cached_property
    def assigner(self) -> StepAssigner:
        """Of a job with searched plans."""
        return StepAssigner(
            section=AssignmentConfig(policy="balanced"),
            planners=(self.searching,),
            pricer=self.pricer,
            num_replicas=self.num_replicas,
            dealer=None,
            seed=0,
        )

    @cache  # noqa: B019
    def own(self, ranks: tuple[int, ...], eager: int = 0) -> IterationPlanner:
        """Modules on ranks of their own, 1F1B. Args: eager: forwards that run ahead."""
        keys = [
            "planner.enable=false",
            "planner.placement=parallel",
            "planner.search.sub_microbatch=false",
            "parallelism.pipeline_parallel_schedule=1F1B",
            f"planner.search.eager_forwards={eager}",
        ]
        for section, count in zip(("encoder", "language"), ranks, strict=True):
            keys += [f"model.{section}.num_segments=1", f"model.{section}.ranks={count}"]
        return IterationPlanner(make_job(self.job(*keys)))

    def balanced_ranks(self, documents: Sequence[DocumentMeta]) -> tuple[int, ...]:
        """Pipeline ranks for which the slowest stage of a mean microbatch is fastest."""
        totals: dict[str, WorkSize] = {}
        for document in documents:
            for name, size in self.pricer.sizes(document).items():
                totals[name] = totals.get(name, ZERO_WORK) + size
        layers = [
            [sum(pair) for pair in self.pricer.layer_seconds(name, times(size, 4 / len(documents)), fed=True)]
            for name, size in totals.items()
        ]

        def slowest_s(first: int) -> float:
            split = zip(layers, (first, self.num_ranks - first), strict=True)
            return max(sum(of[low:high]) for of, n in split for low, high in split_evenly(of, n))

        best = min(range(1, self.num_ranks), key=slowest_s)
        return best, self.num_ranks - best

    def ranks(self, costs: Sequence[SampleCost]) -> tuple[int, ...]:
        """Pipeline ranks of encoder and language model in proportion to the work of some samples."""
        work = np.array([[sum(c.encoder_ns for c in costs), sum(c.language_ns for c in costs)]], float)
        most = [len(module.layers) for module in self.pricer.spec.modules]
        return tuple(map(int, proportional(work, self.num_ranks, most)[0]))


def samples(setup: Setup, workload: str, iteration: int) -> Iterator[DocumentMeta]:
    """The documents of a workload, each with a number of its own."""
    bins, number = replace(TypicalSizes.of(setup.job()), num_microbatches=8), itertools.count()
    for part in itertools.count():
        for microbatch in draw(workload, bins, seed=iteration, iteration=part).microbatches:
            for document in microbatch.documents:
                i = next(number)
                yield document.numbered(i)


@dataclass(frozen=True, kw_only=True)
class Step:
    """The samples of one step."""

    setup: Setup
    documents: tuple[DocumentMeta, ...]
    passes: tuple[Mapping[str, PassesNs], ...]
    costs: tuple[SampleCost, ...]

    bins: tuple[tuple[int, ...], ...]

    @classmethod
    def drawn(cls, setup: Setup, workload: str, iteration: int) -> "Step":
        """Samples of a workload in microbatches of four samples each, as drawn."""
        count = setup.num_replicas * setup.num_microbatches
        documents = list(itertools.islice(samples(setup, workload, iteration), SAMPLES * count))
        bins = tuple(tuple(range(b * SAMPLES, (b + 1) * SAMPLES)) for b in range(count))
        return cls.of(setup, documents, bins)

    @classmethod
    def packed(cls, setup: Setup, workload: str, iteration: int) -> "Step":
        """Samples of a workload in 8 microbatches a replica, each in the first with room, until one finds none."""
        bins: list[list[int]] = [[] for _ in range(setup.num_replicas * PACKED)]
        room, documents = [CAPACITY] * len(bins), list[DocumentMeta]()
        for document in samples(setup, workload, iteration):
            index = next((b for b, free in enumerate(room) if free >= document.num_tokens), None)
            if index is None:
                return cls.of(setup, documents, tuple(map(tuple, bins)))
            bins[index].append(len(documents))
            room[index] -= document.num_tokens
            documents.append(document)
        raise AssertionError

    @classmethod
    def of(cls, setup: Setup, documents: Sequence[DocumentMeta], bins: tuple[tuple[int, ...], ...]) -> "Step":
        """The step with the costs of its samples."""
        passes = tuple(setup.pricer.ns(document) for document in documents)
        costs = tuple(
            cost_of(setup.pricer.spec, of, (document.num_tokens,))
            for of, document in zip(passes, documents, strict=True)
        )
        return cls(setup=setup, documents=tuple(documents), passes=passes, costs=costs, bins=bins)

    def assigned(self, policy: str, **options: object) -> Assignment:
        """The samples under a policy."""
        dealt = in_turns(len(self.bins), self.setup.num_replicas)
        if policy == "disttrain":
            step = AssignmentInput(self.costs, self.bins, dealt, ())
            return disttrain(step, [self.setup.num_ranks] * len(dealt))
        return assign(policy, self.costs, self.bins, dealt=dealt, **options)  # type: ignore[arg-type]

    def metas(self, assignment: Assignment) -> list[IterationMeta]:
        """[replica] -> its microbatches."""
        return [self.meta(own) for own in assignment.replicas]

    def meta(self, microbatches: Sequence[AssignedMicrobatch]) -> IterationMeta:
        """The microbatches of one replica."""
        return IterationMeta(microbatches=language_microbatches(microbatches, self.documents))


def plans(
    planner: IterationPlanner, metas: Sequence[IterationMeta], iteration: int
) -> list[tuple[PlanningProblem, PlanResult]]:
    """[replica] -> its problem and plan."""
    made, searched = [], planner.job.section.enable
    for replica, meta in enumerate(metas):
        _, problem = planner.problem(meta, searched=searched)
        if searched:
            seed = search_seed(0, iteration, replica)
            result = make_plan(problem, JobMethod.searching(planner.job.schedule, planner.job.section, seed=seed))
        else:
            result = make_plan(problem, planner.job.schedule)
        made.append((problem, result))
    return made


def seconds(planner: IterationPlanner, metas: Sequence[IterationMeta], iteration: int) -> float:
    """The makespan of the slowest replica."""
    return max(timeline.makespan_s for timeline in timelines(plans(planner, metas, iteration)))


def timelines(made: Iterable[tuple[PlanningProblem, PlanResult]]) -> list[Timeline]:
    """Those of plans. Args: made: see `plans`."""
    return [result.timeline for _, result in made]


def refined(step: Step, refinements: int, **options: object) -> Assignment:
    """The samples under `balanced` as a job with searched plans refines it. Args: refinements: for each replica."""

    def judge(replica: int, microbatches: Sequence[AssignedMicrobatch]) -> float:
        return step.setup.assigner.makespan_s(step.meta(microbatches))

    evaluations = refinements * step.setup.num_replicas
    return step.assigned("balanced", judge=judge, evaluations=evaluations, **options)


def literal_ranks(setup: Setup, workload: str) -> list[tuple[int, ...]]:
    """Pipeline ranks of encoder and language model: balanced ones, Entrain's, DistTrain's."""
    first = Step.drawn(setup, workload, 10**6)
    single = next(cost for cost in first.costs if cost.encoder_ns)
    return [setup.balanced_ranks(first.documents[:256]), setup.ranks(first.costs[:256]), setup.ranks([single])]


Variant = tuple[str, Callable[[Step], Assignment], Callable[[Setup, Step], IterationPlanner]]


def variants(setup: Setup, ranks: Sequence[tuple[int, ...]], refinements: int) -> list[Variant]:
    """(name, assignment, planner). Args: ranks: of `literal_ranks`. refinements: makespans for each replica."""
    own, literal, of_one = map(setup.own, ranks)
    ahead = {n: setup.own(ranks[0], eager=n) for n in (1, 2)}
    literal_ahead = setup.own(ranks[1], eager=2)
    few = {"fewer_microbatches": True}
    return [
        ("random microbatches, own", lambda s: s.assigned("none"), lambda u, s: own),
        ("random microbatches, literal ranks", lambda s: s.assigned("none"), lambda u, s: literal),
        ("DistTrain: reordered, ranks of one sample", lambda s: s.assigned("disttrain"), lambda u, s: of_one),
        ("DistTrain: reordered, own", lambda s: s.assigned("disttrain"), lambda u, s: own),
        (
            "literal Entrain: K_eff, deferral, 2 ahead, literal ranks",
            lambda s: s.assigned("entrain", defer=True, **few),
            lambda u, s: literal_ahead,
        ),
        ("Entrain's assignment, all microbatches, own", lambda s: s.assigned("entrain"), lambda u, s: own),
        ("  + fewer microbatches (K_eff)", lambda s: s.assigned("entrain", **few), lambda u, s: own),
        ("  + deferral", lambda s: s.assigned("entrain", defer=True, **few), lambda u, s: own),
        *(
            (f"  + {n} forwards ahead", lambda s: s.assigned("entrain", defer=True, **few), lambda u, s, n=n: ahead[n])
            for n in ahead
        ),
        ("  deferral, 2 ahead, all microbatches", lambda s: s.assigned("entrain", defer=True), lambda u, s: ahead[2]),
        ("balanced, own", lambda s: s.assigned("balanced"), lambda u, s: own),
        ("random microbatches, search", lambda s: s.assigned("none"), lambda u, s: u.searching),
        ("Entrain's assignment (K_eff), search", lambda s: s.assigned("entrain", **few), lambda u, s: u.searching),
        ("  + deferral, search", lambda s: s.assigned("entrain", defer=True, **few), lambda u, s: u.searching),
        ("  all microbatches, no deferral, search", lambda s: s.assigned("entrain"), lambda u, s: u.searching),
        ("  all microbatches, deferral, search", lambda s: s.assigned("entrain", defer=True), lambda u, s: u.searching),
        ("balanced, search", lambda s: s.assigned("balanced"), lambda u, s: u.searching),
        ("  + refined, search", lambda s: refined(s, refinements), lambda u, s: u.searching),
        ("  + refined, fewer microbatches, search", lambda s: refined(s, refinements, **few), lambda u, s: u.searching),
    ]


def speed(setup: Setup, workload: str, iterations: int, searched: int, refinements: int, only: Sequence[str]) -> None:
    """Prints the table of one setup and workload.

    Args:
        searched: iterations of the rows with a search.
        only: parts of the names of rows; the first row is always there.
    """
    ranks = literal_ranks(setup, workload)
    offered = variants(setup, ranks, refinements)
    rows = [offered[0], *(row for row in offered[1:] if any(part in row[0] for part in only))]
    found: list[list[float]] = [[] for _ in rows]
    memory: list[float] = [0.0 for _ in rows]
    uneven: list[list[float]] = [[] for _ in rows]
    counts: list[list[int]] = [[] for _ in rows]
    start = time.perf_counter()
    for iteration in range(iterations):
        step, known = Step.drawn(setup, workload, iteration), dict[tuple[int, str], tuple[float, float, float]]()
        for index, (_, assigned, planner) in enumerate(rows):
            if iteration >= searched and planner(setup, step).job.section.enable:
                continue
            assignment = assigned(step)
            counts[index] += [len(own) for own in assignment.replicas]
            key = (id(planner(setup, step)), assignment.digest)
            if key not in known:
                of_row = planner(setup, step)
                made = timelines(plans(of_row, step.metas(assignment), iteration))
                parts = [setup.device_part(of_row, timeline) for timeline in made]
                makespans = [timeline.makespan_s for timeline in made]
                known[key] = max(makespans), max(parts), max(makespans) / statistics.fmean(makespans)
            found[index].append(known[key][0])
            memory[index] = max(memory[index], known[key][1])
            uneven[index].append(known[key][2])
    splits = ", ".join(":".join(map(str, one)) for one in ranks)
    base, spent = statistics.fmean(found[0]), time.perf_counter() - start
    print(
        f"\n{setup.name}, {workload}, {iterations} iterations ({searched} searched), {base:.3f} s; {spent:.0f} s to run"
    )
    print(f"ranks by slowest stage, by ratio, by one sample: {splits}")
    print("| | speed | least | most | microbatches | memory | uneven | of the last row | least |\n|" + "---|" * 9)
    for (name, _, _), own, numbers, part, ratio in zip(rows, found, counts, memory, uneven, strict=True):
        ratios = [one / other for one, other in zip(found[0], own, strict=False)]
        mean = statistics.fmean(found[0][: len(own)]) / statistics.fmean(own)
        between = f"{min(ratios):.2f} | {max(ratios):.2f} | {min(numbers)} to {max(numbers)} | {part:.0%}"
        between += f" | {statistics.geometric_mean(ratio):.3f}"
        of_last = [one / other for one, other in zip(own, found[-1], strict=False)]
        between += f" | {statistics.geometric_mean(of_last):.3f} | {min(of_last):.3f}"
        print(f"| {name} | {mean:.2f} | {between} |", flush=True)


def packed(setup: Setup, workload: str, iterations: int, refinements: int) -> None:
    """Prints what assignment brings to full microbatches."""
    options: dict[str, Callable[[Step], Assignment]] = {
        "first-fit's bins": lambda s: s.assigned("none"),
        "entrain, capacity kept": lambda s: s.assigned("entrain", capacity=(CAPACITY,)),
        "balanced": lambda s: s.assigned("balanced", capacity=(CAPACITY,)),
        "balanced, refined": lambda s: refined(s, refinements, capacity=(CAPACITY,)),
    }
    found: dict[str, list[float]] = {name: [] for name in options}
    statuses: dict[str, list[str]] = {name: [] for name in options}
    for iteration in range(iterations):
        step = Step.packed(setup, workload, iteration)
        for name, assigned in options.items():
            assignment = assigned(step)
            statuses[name].append(assignment.status)
            found[name].append(seconds(setup.searching, step.metas(assignment), iteration))
    base = statistics.fmean(found["first-fit's bins"])
    print(f"\n{setup.name}, {workload}, packed, {iterations} iterations, {base:.3f} s")
    print("| | speed | least | most | status |\n|---|---|---|---|---|")
    for name, own in found.items():
        shown = ", ".join(f"{status} {n}" for status, n in Counter(statuses[name]).items())
        ratios = [one / other for one, other in zip(found["first-fit's bins"], own, strict=True)]
        between = f"{min(ratios):.3f} | {max(ratios):.3f}"
        print(f"| {name} | {base / statistics.fmean(own):.3f} | {between} | {shown} |", flush=True)


def forward_ms(step: Step, assignment: Assignment, module: int) -> float:
    """Standard deviation over all microbatches of the forward milliseconds of encoder (0) or language model (1)."""
    names = ("vision", "language")
    spent = []
    for own in assignment.replicas:
        members = [one.samples for one in own] if module == 0 else language_samples(own)
        for own_samples in members:
            passes = [step.passes[i].get(names[module]) for i in own_samples]
            spent.append(sum(of.forward for of in passes if of is not None) / 1e6)
    return statistics.pstdev(spent)


def std(setups: Sequence[Setup], iterations: int) -> None:
    """Prints our table 4.3."""
    policies: dict[str, dict[str, object]] = {
        "none": {}, "disttrain": {}, "entrain": {"defer": True, "fewer_microbatches": True},
        "entrain, all microbatches": {"defer": True}, "balanced": {},
    }  # fmt: skip
    print(f"\nstandard deviation of forward milliseconds of a microbatch, mean of {iterations} steps")
    print("| | policy | " + " | ".join(DATA_SETS) + " | thesis: " + ", ".join(DATA_SETS.values()) + " |")
    print("|---" * (3 + len(DATA_SETS)) + "|")
    for setup in setups:
        drawn = {name: [Step.drawn(setup, name, i) for i in range(iterations)] for name in DATA_SETS}
        for module in (0, 1) if setup is setups[0] else (1,):
            label = f"language {setup.name}" if module else "vision"
            for name, options in policies.items():
                cells = []
                for steps in drawn.values():
                    values = [forward_ms(s, s.assigned(name.partition(",")[0], **options), module) for s in steps]
                    cells.append(f"{statistics.fmean(values):.2f}")
                of_thesis = PUBLISHED.get(label, {}).get(name, ())
                print(f"| {label} | {name} | {' | '.join(cells)} | {', '.join(map(str, of_thesis))} |", flush=True)


def cpu(setup: Setup, repetitions: int = 20) -> None:
    """Prints thread milliseconds of each policy."""
    step = Step.drawn(setup, "mix", 0)
    print("\n| policy | ms of thread time |\n|---|---|")
    for policy in ("entrain", "disttrain", "balanced"):
        spent = []
        for _ in range(repetitions):
            start = time.thread_time()
            step.assigned(policy, defer=True)
            spent.append(time.thread_time() - start)
        print(f"| {policy} | {1e3 * statistics.median(spent):.1f} |")
    start = time.thread_time()
    fresh = SamplePricer.of(setup.job())
    for document in step.documents:
        fresh.cost(document)
    print(f"| prices of 512 samples, nothing cached | {1e3 * (time.thread_time() - start):.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setups", default="h800,a40-1b,a40-3b")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--searched", type=int, default=40, help="iterations of the rows with a search, at most")
    parser.add_argument("--evaluations", type=int, default=1000)
    parser.add_argument("--refinements", type=int, default=16, help="for each replica")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rows", default="", help="parts of the names of rows of `speed`, separated by semicolons")
    parser.add_argument("--parts", default="speed,packed,std,cpu")
    args = parser.parse_args()
    for name in ("iterations", "searched", "evaluations", "replicas"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: it is at least 1")
    warm()
    with tempfile.TemporaryDirectory() as folder:
        setups = [
            Setup(name=name, folder=Path(folder), evaluations=args.evaluations, num_replicas=args.replicas)
            for name in args.setups.split(",")
        ]
        if "speed" in args.parts:
            for setup in setups:
                for workload in args.workloads.split(","):
                    counts = args.iterations, min(args.searched, args.iterations), args.refinements
                    speed(setup, workload, *counts, args.rows.split(";"))
        if "packed" in args.parts:
            for workload in args.workloads.split(","):
                packed(setups[0], workload, min(args.searched, args.iterations), args.refinements)
        if "std" in args.parts:
            std([setup for setup in setups if setup.name in LANGUAGES] or setups, args.iterations)
        if "cpu" in args.parts:
            cpu(setups[0])


if __name__ == "__main__":
    main()
