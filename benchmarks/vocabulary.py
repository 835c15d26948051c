"""python benchmarks/vocabulary.py [--parts worth,choices] [--evaluations 300] [--models 5b-64k,...]

What it is worth to divide the vocabulary of a language model over the pipeline ranks.

worth: language models of some vocabularies, on P = 4 ranks with M = 16 microbatches and on P = 8 with M = 32, every
token labelled, with seconds of the project's model of an A800 and no memory limit. The iteration of the best plan over
the ideal one, the mean of the ranks' seconds without division: of the best cut with a whole vocabulary (1 to 4
segments, planned by the search), of the best with a divided one, and of 1F1B with as many blocks on each rank, the
embedding on the first and the head on the last.
choices: what the partition search takes with parallelism.vocabulary_parallel = "search": for these models, and for
VLM-S, VLM-M and VLM-L on the project's model of H800s, with the segments of both modules open.

Source of the model of 5B: FlexPipe, table 3, with heads and width in the right columns.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from mmtrain.config import config
from mmtrain.config.config import Config
from mmtrain.costs.cost_model import CostModel
from mmtrain.costs.job_costs import cost_model
from mmtrain.modality.metadata import DocumentMeta, IterationMeta, MicrobatchMeta
from mmtrain.planner.batching import make_batching
from mmtrain.planner.make_plan import JobMethod, make_plan
from mmtrain.planner.make_problem import make_problem
from mmtrain.planner.partition.partition import Partition, partition
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.simulator.make_job import job_spec, make_job
from mmtrain.spec.spec import ModelSpec

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
GPT = """{ model_type = "qwen2", hidden_size = 2560, intermediate_size = 6912, num_hidden_layers = 64,
num_attention_heads = 64, num_key_value_heads = 64, vocab_size = %d, max_position_embeddings = 512,
tie_word_embeddings = false }"""
QWEN = """{ model_type = "qwen2", hidden_size = %d, intermediate_size = %d, num_hidden_layers = 28,
num_attention_heads = %d, num_key_value_heads = %d, vocab_size = 151936, max_position_embeddings = 4096,
tie_word_embeddings = %s }"""
LARGE = ("vlm_s", "vlm_m", "vlm_l")
OF_LARGE = ('planner.hardware="h800"', "model.encoder.num_segments=0", "model.language.num_segments=0")
SIZES = ((4, 16), (8, 32))
"""Pipeline ranks and microbatches."""
MOST_SEGMENTS = 4


@dataclass(frozen=True)
class Model:
    """A language model and the documents of its microbatches."""

    language: str
    """Its config."""
    tokens: int
    """Of a document."""
    documents: int
    """Of a microbatch."""


MODELS: Mapping[str, Model] = {
    "5b-64k": Model(GPT % 65536, 512, 4),
    "5b-256k": Model(GPT % 262144, 512, 4),
    "5b-1m": Model(GPT % 1048576, 512, 4),
    "qwen2-2b-152k": Model(QWEN % (1536, 8960, 12, 2, "true"), 2048, 1),
    "qwen2-7b-152k": Model(QWEN % (3584, 18944, 28, 4, "false"), 2048, 1),
}


def job_of(model: Model, num_ranks: int, microbatches: int, vocabulary: str) -> Config:
    """A job of a model, planned by the search. Args: vocabulary: of parallelism.vocabulary_parallel."""
    changes = [
        f"model.language.config={' '.join(model.language.split())}",
        "model.language.num_segments=0",
        f"training.seq_len={model.tokens * model.documents}",
        "training.loss_chunk_tokens=0",
        f"training.global_batch_size={microbatches}",
        'training.mixed_precision_param="bfloat16"',
        f"parallelism.pipeline_parallel_degree={num_ranks}",
        f'parallelism.vocabulary_parallel="{vocabulary}"',
        'planner.hardware="a800"',
    ]
    return config.load(CONFIGS / "debug_text.toml", changes)


def batch_of(model: Model, microbatches: int) -> IterationMeta:
    """Equal microbatches, every token labelled."""
    document = DocumentMeta(sample=0, num_tokens=model.tokens, num_targets=model.tokens, images=())
    documents = [
        [document.numbered(m * model.documents + d) for d in range(model.documents)] for m in range(microbatches)
    ]
    return IterationMeta(microbatches=tuple(MicrobatchMeta(documents=tuple(of)) for of in documents))


@dataclass(frozen=True)
class Setup:
    """A job and its batch, with the vocabulary whole or divided."""

    job: Config
    spec: ModelSpec
    costs: CostModel
    meta: IterationMeta

    @classmethod
    def of(cls, model: Model, num_ranks: int, microbatches: int, vocabulary: str) -> "Setup":
        """The setup of a model."""
        job = job_of(model, num_ranks, microbatches, vocabulary)
        spec = job_spec(job)
        return cls(job, spec, cost_model(job, spec), batch_of(model, microbatches))

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return self.job.parallelism.pipeline_parallel_degree

    def weights(self) -> dict[str, list[float]]:
        """Module -> [layer] -> seconds of a microbatch, forward and backward."""
        batching = make_batching(IterationMeta(microbatches=self.meta.microbatches[:1]), self.spec)
        found = {}
        for work, size in zip(batching.works, batching.sizes, strict=True):
            module = self.spec.modules[work.module]
            enters = self.spec.grad_enters(module.name)
            seconds = []
            for index in range(len(module.layers)):
                times = self.costs.layer(module, index, size, input_grad=enters or index > 0)
                seconds.append(times.forward_s + times.backward_input_s + times.backward_weight_s)
            found[module.name] = seconds
        return found

    def ideal_s(self) -> float:
        """Seconds of an iteration without a bubble."""
        return sum(map(sum, self.weights().values())) * len(self.meta.microbatches) / self.num_ranks

    def cut(self, segments: int, layout: str = "") -> Partition:
        """The partition with K segments, levelled by seconds; or of a layout."""
        sizes = {module.name: make_batching(self.meta, self.spec).sizes[0] for module in self.spec.modules}
        layouts = {"language": layout}
        given = {"language": 0 if layout else segments}
        return partition(self.spec, self.num_ranks, given, sizes, layouts=layouts, weights=self.weights())

    def seconds(self, parts: Partition, how: SearchOptions | JobMethod) -> float:
        """The iteration's seconds on a partition."""
        batching = make_batching(self.meta, self.spec)
        result = make_plan(make_problem(self.spec, parts, batching, self.costs, self.job.planner), how)
        assert result.has_plan, result.message
        return result.makespan_s

    def best_s(self, evaluations: int) -> tuple[float, int]:
        """Seconds of the best of 1 to 4 segments under the search, and their number."""
        how = SearchOptions(budget_evaluations=evaluations, budget_s=0.0)
        most = min(MOST_SEGMENTS, len(self.spec.text.layers) // self.num_ranks)
        return min((self.seconds(self.cut(k), how), k) for k in range(1, most + 1))


def even_layout(blocks: int, num_ranks: int) -> str:
    """As many blocks on each rank as on any other, at most one more on the first ranks; the embedding before them and
    the head behind."""
    ends = [-(-blocks * rank // num_ranks) for rank in range(num_ranks + 1)]
    chunks = ["t" * (high - low) for low, high in pairwise(ends)]
    return "|".join(["E" + chunks[0], *chunks[1:-1], chunks[-1] + "L"])


def worth(names: Sequence[str], evaluations: int) -> Iterator[str]:
    """The lines of the table."""
    yield "model            P   M   whole K  divided K   1F1B   ideal s  divided/whole"
    for name in (name for name in names if name in MODELS):
        for num_ranks, microbatches in SIZES:
            whole, divided = (Setup.of(MODELS[name], num_ranks, microbatches, how) for how in ("tensor", "pipeline"))
            ideal = whole.ideal_s()
            even = whole.cut(1, even_layout(len(whole.spec.text.layers) - 2, num_ranks))
            of_1f1b = whole.seconds(even, JobMethod(CATALOGUE["1F1B"], whole.job.planner)) / ideal
            (best, k), (best_divided, k_divided) = whole.best_s(evaluations), divided.best_s(evaluations)
            yield (
                f"{name:15} {num_ranks:2} {microbatches:3}  {best / ideal:6.2f} {k}  {best_divided / ideal:7.2f} "
                f"{k_divided}  {of_1f1b:5.2f}  {ideal:8.3f}  {best_divided / best:.3f}"
            )


def choices(names: Sequence[str]) -> Iterator[str]:
    """What the partition search takes."""
    jobs = {
        f"{name}, P {num_ranks}": job_of(MODELS[name], num_ranks, microbatches, "search")
        for name in names
        if name in MODELS
        for num_ranks, microbatches in SIZES
    }
    jobs |= {
        name: config.load(CONFIGS / f"{name}.toml", ['parallelism.vocabulary_parallel="search"', *OF_LARGE])
        for name in names
        if name in LARGE
    }
    for name, job in jobs.items():
        start = time.process_time()
        made = make_job(job)
        how = "divided" if made.spec.divides_vocabulary else "whole"
        yield f"{name:22} {how:8} {time.process_time() - start:5.1f} s of CPU time; {made.partition_summary}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="worth,choices")
    parser.add_argument("--evaluations", type=int, default=300, help="plans that the search tries for each cut")
    parser.add_argument("--models", default=",".join((*MODELS, *LARGE)))
    given = parser.parse_args()
    names, parts = given.models.split(","), given.parts.split(",")
    for part, lines in (("worth", worth(names, given.evaluations)), ("choices", choices(names))):
        for line in lines if part in parts else ():
            print(line, flush=True)


if __name__ == "__main__":
    main()
