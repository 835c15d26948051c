"""Assigns the samples of each step to microbatches, by what they cost this job. Pure.

Every process that makes batches computes the whole assignment of a step by itself; equal samples and costs give equal
assignments, whose digests the replicas compare.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from mmtrain.config.assignment import AssignmentConfig
from mmtrain.config.config import Config
from mmtrain.errors import PlanError
from mmtrain.modality.metadata import DocumentMeta, IterationMeta, MicrobatchMeta
from mmtrain.planner.assignment.assign import assign
from mmtrain.planner.assignment.assignment import AssignedMicrobatch, Assignment, Dealt, in_turns, language_samples
from mmtrain.planner.assignment.dealing import Dealer, deal, paces
from mmtrain.planner.assignment.sample_costs import SamplePricer
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.job import Job
from mmtrain.planner.search.search import shortest_s
from mmtrain.planner.search_settings import search_options

JUDGED = 30
"""Evaluations of the search that judges an assignment. They take less than half of the time of a plan of `interleave`,
and are nearer to what the job's search comes to."""
Bins = Sequence[Sequence[int]]
"""[microbatch of the step] -> indices of its samples."""


@dataclass(frozen=True, kw_only=True)
class StepAssigner:
    """Assigns documents to microbatches of replicas as `[assignment]` says."""

    section: AssignmentConfig
    planners: tuple[IterationPlanner, ...]
    """[pipeline] -> that of its replicas, which judges assignments, with those memory limits that the config alone
    tells; of pipelines of one depth, one for all."""
    pricer: SamplePricer
    num_replicas: int
    dealer: Dealer | None
    """The dealer of pipelines of unequal depth."""
    seed: int
    """The seed of the job."""

    @classmethod
    def of(cls, config: Config, jobs: Sequence[Job]) -> "StepAssigner | None":
        """The assigner of a job; None: the first microbatch with room has each sample. Args: jobs: [pipeline] -> its
        job."""
        if not config.assignment.assigns:
            return None
        section, dealer = config.planner, Dealer.of(config, jobs)
        if section.memory_limit and jobs[0].activation_limits is None:  # of a device that other processes may not have
            section = replace(section, memory_limit="").with_search(
                split_backward=False
            )  # Ws that wait would hold too much
        return cls(
            section=config.assignment,
            planners=tuple(IterationPlanner(replace(job, section=section)) for job in (jobs if dealer else jobs[:1])),
            pricer=SamplePricer.of(config),
            num_replicas=config.parallelism.layout.dp,
            dealer=dealer,
            seed=config.debug.seed,
        )

    def __call__(self, documents: Sequence[DocumentMeta], bins: Bins) -> Assignment:
        """The microbatches of all replicas. Args: documents: the step's samples. bins: those of first-fit."""
        if self.dealer is None:
            return self._assigned(documents, bins, in_turns(len(bins), self.num_replicas))
        seconds = self.dealer.seconds([MicrobatchMeta.of(documents[i] for i in own) for own in bins])
        return self._assigned(documents, bins, deal(seconds), paces(seconds))

    def _assigned(
        self, documents: Sequence[DocumentMeta], bins: Bins, dealt: Dealt, of_replicas: tuple[int, ...] = ()
    ) -> Assignment:
        """Args: dealt: the bins of each replica. of_replicas: their paces; empty: equal ones."""
        section = self.section
        pricer = replace(self.pricer, _modules={})  # it remembers every size, and those of other steps hardly recur

        def judge(replica: int, microbatches: Sequence[AssignedMicrobatch]) -> float:
            meta = IterationMeta(microbatches=language_microbatches(microbatches, documents))
            return self.makespan_s(meta, replica)

        return assign(
            section.policy,
            [pricer.cost(document, (document.num_tokens,)) for document in documents],
            bins,
            dealt=dealt,
            paces=of_replicas,
            capacity=(self.pricer.seq_len,),
            defer=section.defer,
            fewer_microbatches=section.fewer_microbatches,
            levels=section.levels,
            judge=judge if section.policy == "balanced" else None,
            evaluations=section.evaluations * len(dealt),
            seed=self.seed,
        )

    def _planner(self, replica: int) -> IterationPlanner:
        return self.planners[replica // self.dealer.shards if self.dealer else 0]

    def makespan_s(self, meta: IterationMeta, replica: int = 0) -> float:
        """Seconds of a replica's batch: those of a short search where plans are searched, else of the job's schedule;
        infinite: no plan fits, or a recipe gets stuck."""
        planner = self._planner(replica)
        section = planner.job.section
        try:
            if section.enable and section.search.interleave:
                options = search_options(section, seed=0, threads=1)
                options = replace(options, budget_evaluations=JUDGED, budget_s=0.0)
                return shortest_s(planner.problem(meta, searched=True)[1], options)
            return planner.prepare(meta).first.makespan_s
        except PlanError:
            return math.inf

    def reassigned(self, metas: Sequence[IterationMeta]) -> list[IterationMeta]:
        """The batches of replicas with all of their documents assigned anew. Args: metas: [replica] -> its batch."""
        documents, bins, dealt = list[DocumentMeta](), list[range](), [list[int]() for _ in metas]
        for microbatches in zip_longest(*(meta.microbatches for meta in metas)):  # replicas take turns
            for own, microbatch in zip(dealt, microbatches, strict=True):
                if microbatch is None:
                    continue
                first = len(documents)
                # Drawn documents of several replicas have the same numbers.
                documents += [document.numbered(first + i) for i, document in enumerate(microbatch.documents)]
                own.append(len(bins))
                bins.append(range(first, len(documents)))
        if self.dealer is None:
            assignment = self._assigned(documents, bins, tuple(map(tuple, dealt)))
        else:
            assignment = self(documents, bins)
        return [IterationMeta(microbatches=language_microbatches(own, documents)) for own in assignment.replicas]


def language_microbatches(
    microbatches: Sequence[AssignedMicrobatch], documents: Sequence[DocumentMeta]
) -> tuple[MicrobatchMeta, ...]:
    """What the language model processes of a replica's microbatches. Args: documents: of all samples of the step."""
    return tuple(
        MicrobatchMeta(documents=tuple(replace(documents[i], deferred=early) for i, early in members))
        for members in language_members(microbatches, documents)
    )


def language_members(
    microbatches: Sequence[AssignedMicrobatch], documents: Sequence[DocumentMeta]
) -> list[list[tuple[int, bool]]]:
    """[microbatch] -> (sample, whether its images are encoded with the microbatch before), these first.

    A sample without images that the microbatch before deferred has nothing to encode early.
    """
    early = {i for own in microbatches for i in own.deferred if documents[i].images}
    return [
        sorted(((i, i in early) for i in members), key=lambda member: not member[1])
        for members in language_samples(microbatches)
    ]
