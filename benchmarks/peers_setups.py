"""The peers of `benchmarks/peers.py`: what each does to a pipeline, re-implemented on our problems.

*One chain* (torch's schedules, Megatron-LM, nnScaler): all modules are one chain of P x v parts, and a microbatch is
one work of the chain, whole. Parts have equal parameters, or equal seconds over the batches of the benchmark. A rank
recomputes one part of its blocks' bytes, the same for all batches: the least with which all of them fit. Cut (where
the peer leaves it open), v and recomputation are chosen in hindsight, the best for all batches together. Orders are
those of our library, which tests compare with torch's. STP is such a chain, too, placed as a V: its paper cuts by hand,
with the vision encoder as the first chunk, which fits models whose encoder is that small.

*Separated modules*: Optimus in its coarse form on the segments of the config, with the best memory options for each
stage and work. DIP on the segments of its rule (for 12 images a work, or as many as our rule says: the better on
the first batches; of T2V those of the config), with sub-microbatches, dual queues, MCTS and memory options, whole
backwards; "paper's start" orders as if everything were recomputed (DIP, section 5), "our sweep" takes the best of our
decoders first. Our default is what a user gets with a memory limit: segments and sub-microbatches searched before the
first batch, 1,000 evaluations a batch; with blocks `planner.search.braid` is on.

Whole backwards hide exchanges of tensor parallelism under their weight gradients for all, and blocks of STP and of
ours hide more, as the hardware's contention says.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from mmtrain.config import config as config_module
from mmtrain.config.config import Config
from mmtrain.errors import ConfigError, PlanError
from mmtrain.modality.metadata import IterationMeta
from mmtrain.modality.typical import TypicalSizes
from mmtrain.planner.batching import make_batching
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.make_plan import JobMethod, make_plan
from mmtrain.planner.memory.limit import MemoryRule
from mmtrain.planner.memory.rank_bytes import RankBytes, Sharding
from mmtrain.planner.partition.partition import Partition, mixed_partition
from mmtrain.planner.result import PlanResult
from mmtrain.planner.search.chains import Start, TreeChain
from mmtrain.planner.search.evaluate import LAST_ITERATIONS, evaluate
from mmtrain.planner.search.instance import Searched
from mmtrain.planner.search.orders import by_component, component_orders
from mmtrain.planner.search.search_run import ITERATIONS
from mmtrain.planner.search_settings import search_seed
from mmtrain.schedule.graph import ModuleStages, Work
from mmtrain.schedule.library.catalogue import CATALOGUE, Schedule
from mmtrain.schedule.plan import Plan, check, exceeds, held_bytes
from mmtrain.schedule.problem import Option, PlanningProblem
from mmtrain.schedule.simulate import simulate
from mmtrain.schedule.timeline import Timeline
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.typical_iterations import TypicalIterations, usual_workload
from mmtrain.simulator.workloads import draw

ROOT = Path(__file__).resolve().parent.parent
CLUSTERS = {"vlm_s": "h800x16", "vlm_m": "h800x32", "vlm_l": "h800x64", "t2v_s": "h800x16", "t2v_l": "h800x64"}
MEMORY_LIMIT = "92%"
"""Of the device; parameters, gradients and optimizer state are subtracted."""
SEED = 1
"""Of the workloads; what is chosen before the first batch draws with seed 0."""
DECIDING = 4
"""Batches on which DIP's segments are decided."""
LEVELS = 8
"""Steps of a rank's recomputation between nothing and as much as can be."""
ABSENT = Option(
    name="", forward_s=1e-9, backward_input_s=1e-9, backward_weight_s=1e-9, activation_bytes=0.0, contention=0.0
)
"""A stage of a chain for a microbatch that has nothing for it: it runs all the same, as a stage of torch's."""
_GIB = 2.0**30

DEFAULT = "mmtrain"
BLOCKS = "mmtrain, with blocks"
PEERS = (
    "torch 1F1B",
    "torch Interleaved1F1B",
    "torch ZBVZeroBubble",
    "STP",
    "Megatron-like",
    "nnScaler-like",
    "Optimus, coarse",
    "DIP-like, paper's start",
    "DIP-like, our sweep",
    DEFAULT,
    BLOCKS,
)
CHAINS: Mapping[str, Sequence[tuple[str, str, int]]] = {
    "torch 1F1B": [(cut, "1F1B", 1) for cut in ("parameters", "time")],
    "torch Interleaved1F1B": [(cut, "Interleaved1F1B", v) for cut in ("parameters", "time") for v in (2, 4)],
    "torch ZBVZeroBubble": [(cut, "ZBV", 2) for cut in ("parameters", "time")],
    "STP": [(cut, name, 2) for cut in ("parameters", "time") for name in ("STP", "STP-lean")],
    "Megatron-like": [("parameters", "1F1B" if v == 1 else "Interleaved1F1B", v) for v in (1, 2, 4)],
    "nnScaler-like": [("time", "1F1B" if v == 1 else "Interleaved1F1B", v) for v in (1, 2, 4)],
}
"""Peer -> the (cut, schedule, chunks of the chain on a rank) that it may choose from."""
ABLATIONS: Mapping[str, Sequence[str]] = {
    "": (),
    "sub-microbatches off": ("planner.search.sub_microbatch=false",),
    "partition search off": ('planner.partition="dip"',),
    "interleave off": ("planner.search.interleave=false", 'parallelism.pipeline_parallel_schedule="1F1B"'),
    "reorder off": ("planner.search.reorder=false",),
    "split backward off": ("planner.search.split_backward=false",),
    "memory off": ("planner.search.memory=false",),
}
"""What is switched off -> overrides. Without memory options all blocks do one thing, the fastest that fits."""
MIXED: Mapping[str, Sequence[str]] = {
    "": (),
    **{f"chain x {v}": ('planner.partition="mixed-latency"', f"model.language.num_segments={v}") for v in range(1, 5)},
}
"""The partition as one chain of equal time, with the whole planner on it -> overrides."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is simulated."""

    model: str
    """A config."""
    workload: str = ""
    """Empty: the usual one of such models."""
    num_iterations: int = 40
    evaluations: int = 0
    """Plans tried for a batch by those who search; 0: as many as a user gets."""
    overrides: tuple[str, ...] = ()
    """Of the config, before those of a peer."""
    keep_plans: bool = False
    """Whether outcomes have their plans."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a peer came to."""

    setting: str
    """What it chose."""
    seconds: tuple[float, ...]
    """Of each iteration; nan: it does not fit."""
    bubble: float
    """Mean over the iterations that fit."""
    peak_gib: float
    """Of the most loaded rank in any iteration, parameters and states included."""
    planning_s: float
    """CPU seconds of planning one iteration, mean: costs, search, check and simulation."""
    plans: tuple[tuple[PlanningProblem, Plan] | None, ...] = ()
    """Of each iteration, None: it does not fit; empty: the question keeps none."""

    @property
    def rank(self) -> tuple[int, float]:
        """The lower the better: iterations that do not fit, and the mean seconds of the others."""
        fit = [value for value in self.seconds if not math.isnan(value)]
        return len(self.seconds) - len(fit), statistics.fmean(fit) if fit else math.inf


def job_of(question: Question, *words: str) -> Config:
    """The model's config on its cluster, under the limit, with a free choice of memory options."""
    base = [
        f'planner.hardware="{CLUSTERS[question.model]}"',
        f'planner.memory_limit="{MEMORY_LIMIT}"',
        "planner.memory_margin=0.0",
        'activation_checkpoint.mode="none"',
    ]
    if question.evaluations:
        base.append(f"planner.search.budget_evaluations={question.evaluations}")
    return config_module.load(ROOT / "configs" / f"{question.model}.toml", [*base, *question.overrides, *words])


def left_open(question: Question) -> list[str]:
    """Overrides that leave numbers of segments and images of a work to the planner."""
    if question.model.startswith("t2v"):
        return ["model.language.num_segments=0", "model.dit.num_segments=0"]
    words = ("language.num_segments", "encoder.num_segments", "encoder.sub_microbatch_size")
    return [f"model.{word}=0" for word in words]


def workload_of(question: Question) -> str:
    """Name of the workload."""
    return question.workload or usual_workload(job_of(question))


@lru_cache(maxsize=4)
def batches_of(question: Question) -> tuple[IterationMeta, ...]:
    """The batches that every peer reads."""
    bins, name = TypicalSizes.of(job_of(question)), workload_of(question)
    return tuple(draw(name, bins, seed=SEED, iteration=i) for i in range(question.num_iterations))


class _Ledger:
    """Collects what iterations take on a partition."""

    def __init__(self, planner: IterationPlanner, job: Config, keep_plans: bool) -> None:
        ranks = range(planner.job.partition.num_ranks)
        sharding = Sharding.of(job)
        assert job.parallelism.layout.dp == 1, "gathers and reductions are left out"
        self._states: list[RankBytes] = [
            sharding.rank_state(planner.job.spec, planner.job.partition, rank) for rank in ranks
        ]
        self._optimizer_s = max(planner.job.costs.step_s(round(state.updated_params)) for state in self._states)
        self._seconds: list[float] = []
        self._bubbles: list[float] = []
        self._peak = 0.0
        self._plans: list[tuple[PlanningProblem, Plan] | None] | None = [] if keep_plans else None
        self._start_s = time.process_time()

    def add(self, problem: PlanningProblem | None, plan: Plan | None, timeline: Timeline | None) -> None:
        """Notes an iteration. Args: timeline: of the plan; None: it does not fit."""
        if self._plans is not None:
            self._plans.append((problem, plan) if problem and plan else None)
        if timeline is None:
            self._seconds.append(math.nan)
            return
        self._seconds.append(timeline.makespan_s + self._optimizer_s)
        self._bubbles.append(timeline.bubble)
        peaks = (s.peak_bytes(a) for s, a in zip(self._states, timeline.peak_bytes, strict=True))
        self._peak = max(self._peak, *peaks)

    def outcome(self, setting: str) -> Outcome:
        """All iterations together."""
        return Outcome(
            setting=setting,
            seconds=tuple(self._seconds),
            bubble=statistics.fmean(self._bubbles) if self._bubbles else math.nan,
            peak_gib=self._peak / _GIB,
            planning_s=(time.process_time() - self._start_s) / max(1, len(self._seconds)),
            plans=tuple(self._plans or ()),
        )


# ------------------------------------------------------------------------------------------- one chain


def chain_outcomes(question: Question) -> dict[str, Outcome]:
    """Peer -> its best choice, of those whose pipeline is one chain."""
    tried = {choice: _chain(question, *choice) for choice in dict.fromkeys(c for peer in CHAINS.values() for c in peer)}
    return {peer: min((tried[c] for c in choices), key=lambda o: o.rank) for peer, choices in CHAINS.items()}


def _chain(question: Question, cut: str, schedule: str, passes: int) -> Outcome:
    job, metas = chain_job(question), batches_of(question)
    planner, chunks = chain_planner(job, metas, cut, CATALOGUE[schedule], passes)
    ledger = _Ledger(planner, job, question.keep_plans)
    setting = f"{schedule}, equal {cut}, v = {passes}"
    try:
        problems = chain_problems(job, planner, chunks, metas)
    except (ConfigError, PlanError):  # parameters or a single block do not fit
        for _ in metas:
            ledger.add(None, None, None)
        return ledger.outcome(setting)
    levels, plans = static_plans(problems, CATALOGUE[schedule].make)
    for problem, plan in zip(problems, plans, strict=True):
        ledger.add(problem, plan, plan and simulate(problem, plan))
    return ledger.outcome(f"{setting}, recompute {' '.join(f'{level}/{LEVELS}' for level in levels)}")


def chain_job(question: Question, *words: str) -> Config:
    """The job of a chain, before it is cut."""
    given = [*left_open(question), "planner.search.sub_microbatch=false", 'planner.partition="mixed-parameters"']
    return job_of(question, *given, 'parallelism.pipeline_parallel_schedule="1F1B"', *words)


def chain_planner(
    job: Config, metas: Sequence[IterationMeta], cut: str, schedule: Schedule, passes: int
) -> tuple[IterationPlanner, list[int]]:
    """A planner on all modules as one chain, and the chunk of the chain that each stage belongs to.

    Args: job: of `chain_job`. cut: "parameters", or "time" over the batches. passes: chunks of the chain on a rank.
    Raises: ConfigError: the model cannot be divided or cut so, or its parameters do not fit.
    """
    planner = IterationPlanner(make_job(job))
    parts, chunks = _chain_parts(job, planner, metas, cut, passes, v_shaped=schedule.placement == "v")
    budget = MemoryRule.of(job).budget(planner.job.spec, parts)
    own = replace(planner.job, partition=parts, schedule=schedule)
    return IterationPlanner(own, budget.activation_limits), chunks


def chain_problems(
    job: Config, planner: IterationPlanner, chunks: Sequence[int], metas: Sequence[IterationMeta]
) -> list[PlanningProblem]:
    """The batches on a chain. Args: planner, chunks: of `chain_planner`.

    Raises: ConfigError, PlanError: parameters or a single block do not fit.
    """
    MemoryRule.of(job).budget(planner.job.spec, planner.job.partition).check()
    return [chain_problem(planner.problem(meta, searched=True)[1], chunks) for meta in metas]


def static_plans(
    problems: Sequence[PlanningProblem], make: Callable[[PlanningProblem], Plan]
) -> tuple[list[int], list[Plan | None]]:
    """[rank] -> its recomputation, the least with which all batches fit; and their plans, None: it does not fit.

    Args: problems: of `chain_problems`. make: the plan without limits.
    """
    plans = [make(replace(p, memory_limit_bytes=(None,) * p.graph.num_ranks)) for p in problems]
    levels = _static_levels(problems, plans)
    chosen: list[Plan | None] = []
    for problem, plan in zip(problems, plans, strict=True):
        try:
            check(at_levels := _at(plan, levels), problem)
            chosen.append(at_levels)
        except PlanError:
            chosen.append(None)
    return levels, chosen


def _chain_parts(
    job: Config, planner: IterationPlanner, metas: Sequence[IterationMeta], cut: str, passes: int, *, v_shaped: bool
) -> tuple[Partition, list[int]]:
    """All modules as one chain, and the chunk of the chain that each stage belongs to."""
    spec, ranks = planner.job.spec, planner.job.partition.num_ranks
    weights: Mapping[str, Sequence[float]] = {m.name: [x.num_params for x in m.layers] for m in spec.modules}
    if cut == "time":
        typical = TypicalIterations.draw(job, spec, planner.job.costs, 0)
        weights = replace(typical, batchings=tuple(make_batching(meta, spec) for meta in metas)).layer_seconds()
    parts = mixed_partition(spec, ranks, passes, weights)
    chunks = [stage.segment * ranks + stage.pp_rank for stage in parts.stages]
    if v_shaped:
        back = [
            stage if stage.segment == 0 else replace(stage, pp_rank=ranks - 1 - stage.pp_rank) for stage in parts.stages
        ]
        parts = replace(parts, stages=tuple(back))
    return parts, chunks


def chain_problem(problem: PlanningProblem, chunks: Sequence[int]) -> PlanningProblem:
    """The problem with all modules as one and a microbatch as one work of it; options are the steps of recomputation.

    Args: chunks: [stage] -> place in the chain.
    """
    graph = problem.graph
    count = 1 + max(chunks)
    stages_of = [[stage for stage, chunk in enumerate(chunks) if chunk == place] for place in range(count)]
    table: dict[tuple[Option, ...], int] = {}
    index, sent = [], []
    microbatches = sorted({work.microbatch for work in graph.works})
    for microbatch in microbatches:
        mine = {work.module: i for i, work in enumerate(graph.works) if work.microbatch == microbatch}
        rows, amounts = [], []
        for stages in stages_of:
            held = [(stage, mine[graph.module_of[stage]]) for stage in stages if graph.module_of[stage] in mine]
            options = tuple(
                _together([at_level(problem.options(*node), level) for node in held]) for level in range(LEVELS + 1)
            )
            rows.append(table.setdefault(options, len(table)))
            last, work = held[-1] if held else (None, None)
            amounts.append(0.0 if work is None else problem.output_bytes[work][graph.position[last]])
        index.append(rows)
        sent.append(amounts)
    return PlanningProblem.build(
        num_ranks=graph.num_ranks,
        modules=[ModuleStages(name="chain", stages=tuple(range(count)))],
        stage_rank=[graph.stage_rank[stages[0]] for stages in stages_of],
        works=[Work(module=0, microbatch=microbatch, sub_microbatch=0) for microbatch in microbatches],
        costs=list(table),
        cost_index=index,
        output_bytes=sent,
        p2p=problem.p2p,
        memory_limit_bytes=problem.memory_limit_bytes,
    )


def at_level(options: Sequence[Option], level: int) -> Option:
    """The fastest option that saves at least level / `LEVELS` of the bytes that can be saved."""
    most, least = options[0].activation_bytes, min(option.activation_bytes for option in options)
    wanted = most - (most - least) * level / LEVELS
    return next(option for option in options if not exceeds(option.activation_bytes, wanted))


def _together(options: Sequence[Option]) -> Option:
    """Stages that run one after the other as one."""
    if not options:
        return ABSENT
    exchanging = [o.contention for o in options if o.forward_exchange_s or o.backward_exchange_s]
    return Option(
        name=", ".join(option.name for option in options),
        forward_s=sum(option.forward_s for option in options),
        backward_input_s=sum(option.backward_input_s for option in options),
        backward_weight_s=sum(option.backward_weight_s for option in options),
        activation_bytes=sum(option.activation_bytes for option in options),
        weight_bytes=sum(option.held_for_weight_bytes for option in options),
        restored_bytes=max(option.restored_bytes for option in options),
        split_s=sum(option.split_s for option in options),
        host_s=sum(option.host_s for option in options),
        forward_exchange_s=sum(option.forward_exchange_s for option in options),
        backward_exchange_s=sum(option.backward_exchange_s for option in options),
        contention=max(exchanging, default=1.0),
    )


def _static_levels(problems: Sequence[PlanningProblem], plans: Sequence[Plan]) -> list[int]:
    """[rank] -> the least recomputation with which all iterations fit; all of it where even that is too little."""
    levels = [0] * problems[0].graph.num_ranks
    for problem, plan in zip(problems, plans, strict=True):
        over = True
        while over:
            held = held_bytes(_at(plan, levels), problem)
            over = False
            for rank, limit in enumerate(problem.memory_limit_bytes):
                assert limit is not None
                if levels[rank] < LEVELS and exceeds(max(during for during, _ in held[rank]), limit):
                    levels[rank] += 1
                    over = True
    return levels


def _at(plan: Plan, levels: Sequence[int]) -> Plan:
    """The plan with each rank's stages at its level."""
    graph = plan.graph
    return replace(plan, options={node: levels[graph.stage_rank[node[0]]] for node in graph.nodes()})


# ------------------------------------------------------------------------------------------- separated

Planned = Callable[[IterationPlanner, PlanningProblem, int], PlanResult]
"""(planner, problem, iteration) -> the pipeline."""


def other_outcome(question: Question, peer: str) -> Outcome:
    """What a peer with separated modules comes to."""
    if peer == "Optimus, coarse":
        return _separated(question, ('parallelism.pipeline_parallel_schedule="Optimus"',), _first)
    if peer == "DIP-like, paper's start":
        return _dip(question, _paper)
    if peer == "DIP-like, our sweep":
        return _dip(question, _searched)
    words = ["planner.search.braid=true"] if peer == BLOCKS else []
    return _separated(question, [*left_open(question), *words], _searched)


def _dip(question: Question, planned: Planned) -> Outcome:
    """DIP as the config has it, or by its rule on works of as many images as ours; the first batches decide."""
    as_given = ("planner.search.split_backward=false", 'planner.search.strategy="mcts"')
    choices = [as_given]
    if not question.model.startswith("t2v"):  # prompts take no time, so the rule would cut the DiT block by block
        choices.append((*as_given, *left_open(question), 'planner.partition="dip"'))
    few = replace(question, num_iterations=min(DECIDING, question.num_iterations))
    best = min(choices, key=lambda words: _separated(few, words, planned).rank)
    return _separated(question, best, planned)


def chained(question: Question, chain: str) -> Outcome | None:
    """The default with its modules cut as one chain; None: reduced gradients or parameters of a rank do not fit."""
    try:
        return _separated(question, [*left_open(question), *MIXED[chain]], _searched)
    except ConfigError:
        return None


def ablated(question: Question, off: str) -> Outcome:
    """The default without a feature."""
    words = [*left_open(question), *ABLATIONS[off]]
    if off != "memory off":
        return _separated(question, words, _searched)
    modes = [[f'activation_checkpoint.mode="{mode}"'] for mode in ("none", "selective", "full")]
    return min((_separated(question, [*words, *mode], _searched) for mode in modes), key=lambda o: o.rank)


def _separated(question: Question, words: Sequence[str], planned: Planned) -> Outcome:
    job = job_of(question, *words)
    planner = IterationPlanner(make_job(job))
    ledger = _Ledger(planner, job, question.keep_plans)
    for number, meta in enumerate(batches_of(question)):
        try:
            problem = planner.problem(meta, searched=True)[1]
            found = planned(planner, problem, number)
            ledger.add(problem, found.plan, found.timeline)
        except PlanError:
            ledger.add(None, None, None)
    cut = f"{'' if planner.job.partition.passes else 'K = '}{planner.job.partition}"
    of_work = f", {planner.job.sub_microbatch_size} a work" if planner.job.sub_microbatch_size else ""
    mode = "" if job.planner.search.memory else f", {job.activation_checkpoint.mode}"
    return ledger.outcome(f"{cut}{of_work}{mode}")


def _first(planner: IterationPlanner, problem: PlanningProblem, number: int) -> PlanResult:
    """The schedule's own orders, with the best memory options for them."""
    section = planner.job.section.with_search(interleave=False)  # or what does not fit would get another order
    return make_plan(problem, JobMethod(planner.job.schedule, section))


def _searched(planner: IterationPlanner, problem: PlanningProblem, number: int) -> PlanResult:
    """As a step of a job is planned."""
    job, seed = planner.job, search_seed(0, number)
    return make_plan(problem, JobMethod.searching(job.schedule, job.section, seed=seed))


def _paper(planner: IterationPlanner, problem: PlanningProblem, number: int) -> PlanResult:
    """DIP's search: orders as if everything were recomputed, then memory options, in each of the tree's rollouts."""
    searched = Searched.of(problem)
    space, how = searched.workspace(), searched.decoder(1.0, 1.0, 0.0, False, False)
    order = by_component(searched, component_orders(searched)[0])
    start = Start(order, how, evaluate(searched, space, order, how, ITERATIONS))
    if start.cost == math.inf:
        return PlanResult(problem=problem, status="infeasible", message="the start does not fit")
    tree = TreeChain(searched, space, start, (search_seed(0, number), 0), True, False, False, ITERATIONS)
    tree.run(planner.job.section.search.budget_evaluations - 1, 0.0, 1.0)
    best = [evaluate(searched, space, tree.best.order, how, count) for count in (LAST_ITERATIONS, ITERATIONS)]
    if best[0] < best[1]:
        evaluate(searched, space, tree.best.order, how, LAST_ITERATIONS)
    plan = searched.plan(space)
    check(plan, problem)
    return PlanResult(problem=problem, status="improved", message="DIP's search", plan_or_none=plan)
