"""[elastic], and its rules with other sections."""

import sys
import urllib.parse
from dataclasses import dataclass
from typing import Literal

from mmtrain.config.bounds import at_least, at_most
from mmtrain.config.model import ModelConfig, section_of
from mmtrain.config.sections import (
    MOST_RANKS,
    MOST_SECONDS,
    CheckpointConfig,
    CommConfig,
    ParallelismConfig,
    TrainingConfig,
)
from mmtrain.config.toml_sections import shown
from mmtrain.errors import ConfigError

BEATS = 4
"""Beats that have to be missed: one or two may be late on a loaded machine."""
LEAST_BEAT_S = 0.25
"""Shortest time between two beats: a thread may wait as long for its turn where processes share a core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticConfig:
    """[elastic]: a job that goes on with the nodes that are left, and accepts nodes that join (docs/multi_node.md).
    Its pipelines follow from the nodes; the ranks of a stage lie inside of one node."""

    enable: bool = False
    """Start one torchrun on each node (--nnodes 1), or `mmtrain train --nodes`. false: the first lost process ends the
    job, which needs no membership service and no thread that watches."""
    max_failures: int = 1
    """f: nodes that may be lost at once without the loss of a layer, as f + 1 pipelines hold the model. 1: two nodes
    seldom fail together, and each further pipeline costs memory."""
    min_nodes: int = 0
    """Nodes of the smallest pipeline. 0: the fewest into whose memory one fits (planner.memory_limit); without a limit
    of known size, 1."""
    silent_s: float = 20.0
    """Seconds without a beat after which a process counts as lost; four beats have to be missed. Crashes are noticed at
    once; this is for stopped processes and cut links. 20: longer than Python's lock is held while kernels compile."""
    leave_wait_s: float = 2.0
    """Seconds after a node was told to end (SIGTERM) in which others may be told so, too, before layers move:
    schedulers signal the nodes of a job one after the other. 2: four times the largest difference that was tried."""
    below: Literal["save", "go_on"] = "save"
    """With too few nodes for f + 1 pipelines. save: save and end, since the next loss could take a layer with it.
    go_on: train with as many pipelines as fit; a lost layer then comes from the newest checkpoint."""
    lighthouse: str = ""
    """Address of the membership service, as in "http://host:29510". Empty: the launcher of `mmtrain train --nodes`,
    since on one machine no service is needed."""

    def __post_init__(self) -> None:
        at_most("elastic", self, max_failures=MOST_RANKS, min_nodes=MOST_RANKS)
        at_most("elastic", self, silent_s=MOST_SECONDS, leave_wait_s=MOST_SECONDS)
        if self.enable and sys.platform != "linux":
            raise ConfigError(
                f"elastic.enable = true on {sys.platform}: ranks leave a broken step by their sockets, which Linux "
                "alone lists; set it to false"
            )
        at_least("elastic", self, max_failures=0, min_nodes=0, leave_wait_s=0.0)
        if not self.beat_s >= LEAST_BEAT_S:
            raise ConfigError(
                f"elastic.silent_s = {self.silent_s}: {BEATS} beats have to be missed, and there are at least "
                f"{LEAST_BEAT_S} s between two; make it at least {BEATS * LEAST_BEAT_S}"
            )
        if self.lighthouse and not _is_address(self.lighthouse):
            raise ConfigError(
                f"elastic.lighthouse = {shown(self.lighthouse)}; it is an address with a port, such as "
                '"http://host:29510"'
            )

    @property
    def beat_s(self) -> float:
        """Seconds between two beats."""
        return self.silent_s / BEATS


def _is_address(text: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(text)
        known = f"{parts.scheme}://{parts.netloc}" == text.removesuffix("/") and "@" not in parts.netloc
        return known and parts.scheme == "http" and bool(parts.hostname) and bool(parts.port)
    except ValueError:
        return False


def check_elastic(
    elastic: ElasticConfig,
    *,
    model: ModelConfig,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    checkpoint: CheckpointConfig,
    comm: CommConfig,
) -> None:
    """Refuses what does not fit an elastic job; changes nothing. Raises: ConfigError: the first rule that is broken."""
    if not elastic.enable:
        return
    _check_composed(model, parallelism)
    for name in ("silent_s", "leave_wait_s"):
        if getattr(elastic, name) >= comm.timeout_seconds:
            raise ConfigError(
                f"elastic.{name} = {getattr(elastic, name)} is not below comm.timeout_seconds = "
                f"{comm.timeout_seconds}, after which ranks that wait end the job; lower the first or raise the second"
            )
    if elastic.below == "save" and not checkpoint.enable:
        raise ConfigError(
            'elastic.below = "save" with checkpoint.enable = false: with too few nodes the job could not save; set '
            'below = "go_on", or checkpoint.enable = true'
        )
    replicas = (elastic.max_failures + 1) * parallelism.data_parallel_shard_degree
    if training.global_batch_size < replicas:
        raise ConfigError(
            f"training.global_batch_size = {training.global_batch_size} microbatches are fewer than the {replicas} "
            f"replicas of {elastic.max_failures + 1} pipelines (elastic.max_failures = {elastic.max_failures}); raise "
            "the first or lower the second"
        )


def _check_composed(model: ModelConfig, parallelism: ParallelismConfig) -> None:
    """Refuses what fixes a number of pipelines, or of pipeline ranks."""
    given: dict[str, object] = {}
    if parallelism.pipelines:
        given["parallelism.pipelines"] = parallelism.pipelines
    for name in ("pipeline_parallel_degree", "data_parallel_replicate_degree"):
        if (degree := getattr(parallelism, name)) != 1:
            given[f"parallelism.{name}"] = degree
    for name, section in model.cut_modules.items():
        for key in ("ranks", "pipeline_layout"):
            if value := getattr(section, key):
                given[f"{section_of(name)}.{key}"] = value
    if (schedule := parallelism.pipeline_parallel_schedule).endswith(".csv"):
        given["parallelism.pipeline_parallel_schedule"] = schedule
    for key, value in given.items():
        raise ConfigError(
            f"{key} = {shown(value)} with elastic.enable = true, where pipelines and their ranks follow from the nodes "
            "that there are; remove one of the two"
        )
