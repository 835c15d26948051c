"""Degrees of parallelism and the place of a rank among them: pure arithmetic, no process group."""

from dataclasses import dataclass

from mmtrain.errors import ConfigError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes from the slowest (outermost) to the fastest varying, as in torchtitan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """The place of one rank on each mesh axis."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int = 0
    tp: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """The degree of each mesh axis; their product is the number of ranks."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            degree = getattr(self, axis)
            if degree < 1:
                raise ConfigError(f"parallelism: the {axis} degree is {degree}; a degree is at least 1")

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        size = 1
        for degree in self.degrees:
            size *= degree
        return size

    @property
    def dp(self) -> int:
        """Number of model replicas that read different data (replicate x shard)."""
        return self.dp_replicate * self.dp_shard

    def coordinates(self, rank: int) -> Coordinates:
        """The place of a global rank.

        Raises: ConfigError: the rank is outside of the mesh.
        """
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is outside of a mesh of {self.world_size} ranks")
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return Coordinates(**place)

    def rank(self, place: Coordinates) -> int:
        """The global rank at a place; the inverse of `coordinates`."""
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self, axis) + getattr(place, axis)
        return rank

    def dp_rank(self, rank: int) -> int:
        """Which data-parallel replica a global rank belongs to, 0 .. dp-1."""
        place = self.coordinates(rank)
        return place.dp_replicate * self.dp_shard + place.dp_shard

    def check_world_size(self, world_size: int) -> None:
        """Refuses a job whose number of ranks is not the product of the degrees.

        Raises: ConfigError: with the product, the job's size and what to change.
        """
        if world_size != self.world_size:
            product = " * ".join(
                f"{axis}={degree}" for axis, degree in zip(AXES, self.degrees, strict=True) if degree > 1
            )
            raise ConfigError(
                f"parallelism: {product or 'all degrees 1'} = {self.world_size} ranks, but the job has "
                f"{world_size}; start it with --nproc-per-node {self.world_size} or change a degree"
            )
