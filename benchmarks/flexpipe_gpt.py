"""Language models with large vocabularies on 32 A800s, as FlexPipe measures them (section 7.1): what each side tries.

All sides choose powers of two for pipeline ranks, replicas and samples of a microbatch, for 128 samples a step, every
token labelled. Replicas are whole copies (no FSDP2 shards), as in Megatron-LM: 18 bytes a parameter of a rank. A side
recomputes all blocks where nothing fits without; ours chooses for each block. A step is the pipeline, the sums of
gradients over replicas, and the optimizer.

Sources: FlexPipe, sections 5.2, 6 and 7.1, table 3 with heads and width in their columns.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

from vocabulary import even_layout

from mmtrain.config import config
from mmtrain.config.config import Config
from mmtrain.costs.cost_model import CostModel
from mmtrain.costs.machine import Machine
from mmtrain.costs.operators.operator_graph import OpKind
from mmtrain.errors import ConfigError, PlanError
from mmtrain.modality.metadata import DocumentMeta, IterationMeta, MicrobatchMeta
from mmtrain.planner.batching import SubMicrobatch, make_batching
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.memory.rank_bytes import Sharding
from mmtrain.planner.partition.partition import Partition, partition
from mmtrain.schedule.graph import ModuleStages
from mmtrain.schedule.plan import Plan, exceeds
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.recipe.flexpipe_types import WAYS
from mmtrain.schedule.simulate import simulate
from mmtrain.schedule.timeline import Timeline
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.partition_choice import Choice
from mmtrain.simulator.pipeline_sums import PipelineSums
from mmtrain.simulator.whole_iteration import SimulatedPipeline
from mmtrain.spec.spec import ModelSpec

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "debug_text.toml"
BATCH = 128
LIMIT = "92%"
"""Of a device's memory."""
MOST_MICROBATCHES = 64
MODES = ("none", "full")
"""Of activation_checkpoint.mode, the faster one first."""
EVALUATIONS = 60


@dataclass(frozen=True)
class Gpt:
    """A language model of table 3 without its vocabulary, or a tower of table 4."""

    layers: int
    width: int
    heads: int
    intermediate: int
    tokens: int
    """Of a sample."""
    vocabularies: tuple[int, ...] = (1,)
    """In thousands."""
    labels: int = 0
    """Labelled tokens of a sample; 0: all."""

    def config(self, vocabulary: int) -> str:
        """Its Hugging Face config. Args: vocabulary: number of tokens."""
        return (
            f'{{ model_type = "qwen2", hidden_size = {self.width}, intermediate_size = {self.intermediate}, '
            f"num_hidden_layers = {self.layers}, num_attention_heads = {self.heads}, "
            f"num_key_value_heads = {self.heads}, vocab_size = {vocabulary}, "
            f"max_position_embeddings = {self.tokens}, tie_word_embeddings = false }}"
        )


GPTS: Mapping[str, Gpt] = {
    "5b": Gpt(64, 2560, 64, 6912, 512, (64, 128, 256, 512, 1000)),
    "16.1b": Gpt(80, 4096, 32, 10912, 1024, (256, 512, 1000, 1100, 1200)),
    "4.7b audio": Gpt(240, 1024, 16, 2736, 264, labels=1),
    "4.7b text": Gpt(240, 768, 16, 2048, 77, labels=1),
    "8.2b video": Gpt(440, 1024, 16, 2736, 264, labels=1),
    "8.2b text": Gpt(216, 1024, 16, 2736, 77, labels=1),
    "9.7b image": Gpt(32, 4096, 64, 10912, 264, labels=1),
    "9.7b text": Gpt(40, 2560, 40, 6912, 77, labels=1),
}


@dataclass(frozen=True)
class Point:
    """A model on some degrees."""

    model: str
    vocabulary: int
    """In thousands."""
    num_ranks: int
    num_replicas: int
    samples: int
    """Of a microbatch."""

    @property
    def num_microbatches(self) -> int:
        """Of a replica."""
        return BATCH // self.num_replicas // self.samples

    @property
    def name(self) -> str:
        """For tables: pp, dp, mbs."""
        return f"{self.num_ranks}, {self.num_replicas}, {self.samples}"

    def job(self, *words: str) -> Config:
        """Its job. Args: words: more overrides."""
        gpt = GPTS[self.model]
        changes = [
            f"model.language.config={gpt.config(1000 * self.vocabulary)}",
            "model.language.num_segments=0",
            f"training.seq_len={gpt.tokens * self.samples}",
            "training.loss_chunk_tokens=0",
            f"training.global_batch_size={BATCH // self.samples}",
            'training.mixed_precision_param="bfloat16"',
            f"parallelism.pipeline_parallel_degree={self.num_ranks}",
            f"parallelism.data_parallel_replicate_degree={self.num_replicas}",
            "parallelism.data_parallel_shard_degree=1",
            'planner.hardware="a800"',
            f'planner.memory_limit="{LIMIT}"',
            "planner.memory_margin=0.0",
            f"planner.search.budget_evaluations={EVALUATIONS}",
        ]
        return config.load(CONFIG, [*changes, *words])

    def batch(self) -> IterationMeta:
        """The microbatches of a replica: full, every token labelled."""
        gpt = GPTS[self.model]
        document = DocumentMeta(sample=0, num_tokens=gpt.tokens, num_targets=gpt.labels or gpt.tokens, images=())
        numbers = range(BATCH // self.num_replicas)
        return IterationMeta(
            microbatches=tuple(
                MicrobatchMeta(documents=tuple(map(document.numbered, numbers[first : first + self.samples])))
                for first in numbers[:: self.samples]
            )
        )


def points(model: str, vocabulary: int, num_gpus: int) -> list[Point]:
    """The degrees that all sides try: at least two pipeline ranks, and as many microbatches as ranks at the least."""
    found = []
    for ranks in _powers(2, min(num_gpus, GPTS[model].layers)):
        for samples in _powers(1, BATCH):
            count = BATCH * ranks // num_gpus // samples
            if ranks <= count <= MOST_MICROBATCHES:
                found.append(Point(model, vocabulary, ranks, num_gpus // ranks, samples))
    return found


def _powers(least: int, most: int) -> Iterator[int]:
    while least <= most:
        yield least
        least *= 2


@dataclass(frozen=True)
class Result:
    """What a setting comes to on a point."""

    side: str
    point: Point
    setting: str
    seconds: float = math.inf
    """Of a step; infinite: it does not fit."""
    bubble: float = math.nan
    peak_gib: float = math.nan


@dataclass(frozen=True)
class Cut:
    """How a model is cut."""

    divided: bool
    """The vocabulary over the pipeline ranks."""
    chunks: int = 1
    shape: str = "loop"
    is_even: bool = False
    """As many blocks on each rank; else by seconds."""


class Pipeline:
    """A model on a point, cut, with its states."""

    def __init__(self, point: Point, cut: Cut, mode: str) -> None:
        """Raises: ConfigError: it cannot be cut so, or its states do not fit."""
        self.point, self.cut = point, cut
        words = [f'activation_checkpoint.mode="{mode or "none"}"', f"planner.enable={str(not mode).lower()}"]
        words += ['parallelism.vocabulary_parallel="pipeline"'] if cut.divided else []
        words += ['parallelism.pipeline_parallel_schedule="interleave"']
        self.config = point.job(*words)
        self.job = make_job(self.config, self._choose)
        self.problem = IterationPlanner(self.job).problem(point.batch(), searched=not mode)[1]

    @cached_property
    def machine(self) -> Machine:
        """Of the job."""
        return Machine.of(self.config)

    @cached_property
    def states(self) -> SimulatedPipeline:
        """States, gathers and reductions of the ranks."""
        return SimulatedPipeline.of(self.job, 0, Sharding.of(self.config), self.machine.network)

    def _choose(self, job: Config, spec: ModelSpec, costs: CostModel, _: SubMicrobatch) -> Choice:
        return Choice(partition=self._partition(spec, costs), spec=spec)

    def _partition(self, spec: ModelSpec, costs: CostModel) -> Partition:
        first = IterationMeta(microbatches=self.point.batch().microbatches[:1])
        batching, cut, weights, sizes = make_batching(first, spec), self.cut, {}, {}
        for work, size in zip(batching.works, batching.sizes, strict=True):
            module = spec.modules[work.module]
            enters, sizes[module.name] = spec.grad_enters(module.name), size
            times = [costs.layer(module, i, size, input_grad=enters or i > 0) for i in range(len(module.layers))]
            weights[module.name] = [t.forward_s + t.backward_input_s + t.backward_weight_s for t in times]
        layout = even_layout(GPTS[self.point.model].layers, self.point.num_ranks) if cut.is_even else ""
        given = {"language": 0 if layout else cut.chunks}
        ranks = self.point.num_ranks
        return partition(spec, ranks, given, sizes, cut.shape, layouts={"language": layout}, weights=weights)

    def result(self, side: str, setting: str, plan: Plan, problem: PlanningProblem | None = None) -> Result:
        """A step under a plan. Args: problem: in both directions, in place of the pipeline's own."""
        timeline = simulate(problem or self.problem, plan)
        seconds, peak_bytes = self.step(timeline, both=problem is not None)
        return Result(side, self.point, setting, seconds, timeline.bubble, peak_bytes / 2**30)

    def step(self, timeline: Timeline, first: int = 0, *, both: bool = False) -> tuple[float, float]:
        """Seconds of a step, infinite if it does not fit, and bytes of the most loaded rank.

        Args: first: the timeline's number of this pipeline's first rank. both: its language model has a second copy, in
        the other direction.
        """
        peak, limit = self._peak_bytes(timeline, first, both), float(LIMIT.rstrip("%")) / 100
        assert self.machine.memory_bytes is not None  # of a named GPU
        if exceeds(peak, limit * self.machine.memory_bytes):
            return math.inf, peak
        network, sharding, parts = self.machine.network, Sharding.of(self.config), self.job.partition
        copies = self.point.num_replicas
        sums = PipelineSums.of([parts] * copies, self.job.spec, sharding, network)
        ends = [max(row.end_s for row in timeline.of_rank(first + rank)) for rank in range(parts.num_ranks)]
        added = sums.end_s([[ends[rank] for rank in parts.stage_rank]] * copies)
        return added + (self._both_ways_s() if both else 0.0) + (1 + both) * self.states.optimizer_s, peak

    def rank_bytes(self, plan: Plan) -> list[float]:
        """[rank] -> peak bytes of a step."""
        peaks = simulate(self.problem, plan).peak_bytes
        return [state.peak_bytes(peak) for state, peak in zip(self.states.states, peaks, strict=True)]

    def _peak_bytes(self, timeline: Timeline, first: int, both: bool) -> float:
        states = self.states.states
        found = []
        for rank, state in enumerate(states):
            other = states[-1 - rank]
            share = (
                self._chain_params(len(states) - 1 - rank) / sum(s.num_params for s in other.stages) if both else 0.0
            )
            fixed = [one.param_bytes + one.grad_bytes + one.optimizer_bytes for one in (state, other)]
            reduced = state.reduced_bytes + share * other.reduced_bytes
            found.append(fixed[0] + share * fixed[1] + max(timeline.peak_bytes[first + rank], reduced))
        return max(found)

    def _chain_params(self, rank: int) -> float:
        """Of the stages that have a second copy: parts of the vocabulary have none."""
        stages = {stage.index for stage in self.job.partition.of_module("language")}
        return sum(s.num_params for s in self.states.states[rank].stages if s.stage in stages)

    def _both_ways_s(self) -> float:
        """Of the sums of the two copies' gradients, among ranks r and P - 1 - r of all replicas."""
        ranks, most = self.point.num_ranks, max(map(self._chain_params, range(self.point.num_ranks)))
        pair = [0, ranks - 1]
        return 2 * self.machine.network.collective_s(OpKind.ALL_REDUCE, 4 * most, pair)


def both_ways(problem: PlanningProblem) -> PlanningProblem:
    """The problem with a second copy of the language model from the last rank to the first, which takes every second
    microbatch."""
    graph = problem.graph
    language = next(i for i, module in enumerate(graph.modules) if module.name == "language")
    stages, count = graph.modules[language].stages, len(graph.stage_rank)
    ups = [graph.num_ranks - 1 - graph.stage_rank[stage] for stage in stages]
    modules = [replace(m, name=WAYS[0]) if i == language else m for i, m in enumerate(graph.modules)]
    modules.append(ModuleStages(name=WAYS[1], stages=tuple(range(count, count + len(stages)))))
    works = [
        replace(w, module=len(modules) - 1) if w.module == language and w.microbatch % 2 else w for w in graph.works
    ]
    return PlanningProblem.build(
        num_ranks=graph.num_ranks,
        modules=modules,
        stage_rank=(*graph.stage_rank, *ups),
        works=works,
        costs=problem.costs,
        cost_index=problem.cost_index,
        output_bytes=problem.output_bytes,
        p2p=problem.p2p,
        memory_limit_bytes=problem.memory_limit_bytes,
    )


@lru_cache(maxsize=256)
def pipeline(point: Point, cut: Cut, mode: str) -> Pipeline | None:
    """The pipeline; None: it cannot be cut so, or its states do not fit. Args: mode: "": the planner's choice."""
    try:
        return Pipeline(point, cut, mode)
    except (ConfigError, PlanError):
        return None


def total_s(problem: PlanningProblem) -> float:
    """Of all actions, with the fastest options."""
    options = (problem.options(*node)[0] for node in problem.graph.nodes())
    return sum(o.forward_s + o.backward_input_s + o.backward_weight_s for o in options)
