"""The layout that the nodes of a generation get, and the end of a job that has too few. Pure."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from mmtrain.config.config import Config
from mmtrain.errors import ConfigError
from mmtrain.launch.membership import Membership
from mmtrain.parallel.agreement import RankReport
from mmtrain.planner.job import Job
from mmtrain.simulator.allocation.node_layouts import ElasticLayouts, TooFewNodes
from mmtrain.simulator.allocation.node_positions import NodeLayout

ALL_LEAVE = "all nodes were told to end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The layout of a generation."""

    layout: NodeLayout
    jobs: tuple[Job, ...]
    """[pipeline] -> its job."""
    ends: str = ""
    """Why the job saves there and ends; empty: it goes on."""


@dataclass(slots=True, kw_only=True)
class Layouts:
    """The layouts of one job, which every process computes alike."""

    config: Config
    ranks_per_node: int
    device: str
    """The type of a rank's device."""
    _made: dict[object, ElasticLayouts] = field(default_factory=dict)

    def chosen(
        self, membership: Membership, reports: Sequence[RankReport], before: Sequence[int]
    ) -> Chosen | TooFewNodes:
        """The layout of the nodes that stay; or why there are too few even to save.

        Args: reports: [rank] -> what it told. before: depths of the layout before; empty: none.
        """
        names = staying(membership)
        layouts, ends = self._of(self.config, reports), "" if names else ALL_LEAVE
        names = names or list(membership.names)
        found = layouts.layout(len(names), before or None)
        if isinstance(found, TooFewNodes):
            ends = ends or found.reason
            section = replace(self.config.elastic, below="go_on", min_nodes=min(1, self.config.elastic.min_nodes))
            layouts = self._of(replace(self.config, elastic=section), reports)
            found = layouts.layout(len(names), before or None)
            if isinstance(found, TooFewNodes):
                return TooFewNodes(reason=ends)
        sizes, held = layouts.layer_bytes, dict[str, dict[tuple[str, int], int]]()
        for one in reports:
            held.setdefault(one.node, {}).update((layer, int(sizes[layer])) for layer in one.layers if layer in sizes)
        return Chosen(layout=layouts.placed(found, names, held), jobs=layouts.jobs(found.depths), ends=ends)

    def warm(self) -> None:
        """Cuts the model for one node, so that all that this takes is compiled.

        Raises: ConfigError: a stage does not lie inside of a node.
        """
        layouts = ElasticLayouts(config=self.config, ranks_per_node=self.ranks_per_node)
        with suppress(ConfigError):  # the model needs more nodes, or fewer ranks
            layouts.jobs((self.ranks_per_node // self.config.parallelism.layout.stage_size,))

    def too_few(self, membership: Membership, reports: Sequence[RankReport]) -> str:
        """Why the nodes that stay are too few to go on; empty: they are not."""
        if not (names := staying(membership)):
            return ALL_LEAVE
        found = self._of(self.config, reports).layout(len(names))
        return found.reason if isinstance(found, TooFewNodes) else ""

    def _of(self, config: Config, reports: Sequence[RankReport]) -> ElasticLayouts:
        """The layouts for the memory that all ranks have."""
        device_bytes = min(one.device_bytes for one in reports)
        process_bytes = max(one.process_bytes for one in reports)
        key = config.elastic, device_bytes, process_bytes
        if key not in self._made:
            self._made[key] = ElasticLayouts(
                config=config,
                ranks_per_node=self.ranks_per_node,
                device_bytes=device_bytes,
                device=self.device,
                process_bytes=process_bytes,
            )
        return self._made[key]


def staying(membership: Membership) -> list[str]:
    """Names of the nodes that were not told to end."""
    return [node.name for node in membership.nodes if not node.leaving]
