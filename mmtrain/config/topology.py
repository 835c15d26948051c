"""A job's pipelines and the place of a rank among them: pure arithmetic, no process group."""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from mmtrain.errors import ConfigError

AXES = ("pipeline", "pp", "dp_shard", "cp", "tp")
"""What places a rank, from the slowest (outermost) to the fastest varying."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """The place of one rank."""

    pipeline: int = 0
    pp: int = 0
    dp_shard: int = 0
    cp: int = 0
    tp: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLayout:
    """The pipelines of a job, each of which holds the model once.

    Every stage of every pipeline has dp_shard x cp x tp ranks. A pipeline's ranks are consecutive, and so are a
    stage's.
    """

    depths: tuple[int, ...] = (1,)
    """[pipeline] -> its pipeline ranks."""
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        degrees = {"pp": min(self.depths, default=0), **{axis: getattr(self, axis) for axis in AXES[2:]}}
        for axis, degree in degrees.items():
            if degree < 1:
                raise ConfigError(f"parallelism: the {axis} degree is {degree}; a degree is at least 1")

    @classmethod
    def grid(cls, *, pp: int = 1, dp_replicate: int = 1, dp_shard: int = 1, cp: int = 1, tp: int = 1) -> "JobLayout":
        """Pipelines of one depth. Args: pp: that depth. dp_replicate: how many.

        Raises: ConfigError: a degree below 1.
        """
        if dp_replicate < 1:
            raise ConfigError(f"parallelism: the dp_replicate degree is {dp_replicate}; a degree is at least 1")
        return cls(depths=(pp,) * dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp)

    @property
    def is_even(self) -> bool:
        """Whether all pipelines have one depth."""
        return len(set(self.depths)) == 1

    @property
    def pp(self) -> int:
        """Pipeline ranks of the deepest pipeline."""
        return max(self.depths)

    @property
    def deepest(self) -> int:
        """The first pipeline of that depth."""
        return self.depths.index(self.pp)

    @property
    def dp_replicate(self) -> int:
        """Number of pipelines."""
        return len(self.depths)

    @property
    def degrees(self) -> dict[str, int | list[int]]:
        """Axis -> degree; where depths differ, they are in place of pp and dp_replicate."""
        outer: dict[str, int | list[int]] = {"pp": self.pp, "dp_replicate": self.dp_replicate}
        if not self.is_even:
            outer = {"pipelines": list(self.depths)}
        return {**outer, "dp_shard": self.dp_shard, "cp": self.cp, "tp": self.tp}

    @property
    def divided(self) -> dict[str, int | list[int]]:
        """The degrees above 1."""
        return {axis: degree for axis, degree in self.degrees.items() if degree != 1}

    @property
    def stage_size(self) -> int:
        """Ranks of one stage."""
        return self.dp_shard * self.cp * self.tp

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(self.depths) * self.stage_size

    @property
    def dp(self) -> int:
        """Number of model replicas that read different data: dp_shard of each pipeline."""
        return self.dp_replicate * self.dp_shard

    def pipeline_of(self, dp_rank: int) -> int:
        """The pipeline of a replica."""
        return dp_rank // self.dp_shard

    def coordinates(self, rank: int) -> Coordinates:
        """The place of a global rank.

        Raises: ConfigError: the rank is outside of the job.
        """
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is outside of a mesh of {self.world_size} ranks")
        starts = self._starts
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        stage, dp_shard = divmod(rest, self.dp_shard)
        pipeline = bisect_right(starts, stage) - 1
        return Coordinates(pipeline=pipeline, pp=stage - starts[pipeline], dp_shard=dp_shard, cp=cp, tp=tp)

    def rank(self, place: Coordinates) -> int:
        """The global rank at a place; the inverse of `coordinates`."""
        stage = self._starts[place.pipeline] + place.pp
        return ((stage * self.dp_shard + place.dp_shard) * self.cp + place.cp) * self.tp + place.tp

    def dp_rank(self, rank: int) -> int:
        """The model replica that a global rank belongs to, 0 .. dp-1."""
        place = self.coordinates(rank)
        return place.pipeline * self.dp_shard + place.dp_shard

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """The global ranks of each group of ranks that differ only in these of `AXES`, in rank order."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates(rank)
            found.setdefault(tuple(getattr(place, axis) for axis in AXES if axis not in axes), []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    def check_world_size(self, world_size: int) -> None:
        """Refuses a job whose number of ranks is not that of its pipelines.

        Raises: ConfigError: with both numbers and what to change.
        """
        if world_size != self.world_size:
            raise ConfigError(
                f"parallelism: {self._described} = {self.world_size} ranks, but the job has "
                f"{world_size}; start it with --nproc-per-node {self.world_size} or change a degree"
            )

    def check_nodes(self, ranks_per_node: int) -> None:
        """Refuses pipelines of unequal depth with a stage on several nodes. Args: ranks_per_node: consecutive ones.

        Raises: ConfigError: with the ranks of a stage and of a node.
        """
        if not self.is_even and self.world_size > ranks_per_node and ranks_per_node % self.stage_size:
            raise ConfigError(
                f"parallelism.pipelines = {list(self.depths)}: a stage has dp_shard {self.dp_shard} x cp {self.cp} x "
                f"tp {self.tp} = {self.stage_size} ranks, and a node has {ranks_per_node}; in pipelines of unequal "
                "depth a stage lies inside of one node, so lower these degrees to a divisor of a node's ranks"
            )

    @property
    def _starts(self) -> list[int]:
        """[pipeline] -> stages of the pipelines before it."""
        return list(accumulate(self.depths[:-1], initial=0))

    @property
    def _described(self) -> str:
        """The number of ranks as a product."""
        factors = [
            f"{axis}={degree}" if isinstance(degree, int) else f"({' + '.join(map(str, degree))} pipeline ranks)"
            for axis, degree in self.divided.items()
        ]
        return " * ".join(factors) or "all degrees 1"
