"""Profiled times and bubble rates of the zero-bubble paper (ICLR 2024), Tables 3, 9 and 5."""

from dataclasses import dataclass

from mmtrain.schedule.problem import P2P, PlanningProblem
from tests.schedule.problems import chain, halves


@dataclass(frozen=True)
class Row:
    """One model, number of ranks and microbatches: milliseconds, and bubble rates of four schedules."""

    num_ranks: int
    hidden: int
    heads: int
    microbatches: int
    forward: float
    input: float
    weight: float
    transfer: float
    one_f_one_b: float
    zb_h1: float
    zb_h2: float
    zb_2p: float

    @property
    def work(self) -> float:
        """Milliseconds that each rank computes."""
        return self.microbatches * (self.forward + self.input + self.weight)

    def problem(self, *, limit: float | None = None) -> PlanningProblem:
        """The chain of this row; 1 byte is what a microbatch holds from F to I.

        The paper counts sbh (34 + 5 as/h) bytes a layer from F to I and 32 sbh from I to W (section 2.2), with
        sequences of s = 1024.
        """
        held = 32 / (34 + 5 * self.heads * 1024 / self.hidden)
        return chain(
            self.num_ranks,
            self.microbatches,
            cost=halves(self.forward, self.input, self.weight, weight_bytes=held),
            p2p=P2P(latency_s=self.transfer, bytes_per_s=1.0),
            memory_limit_bytes=None if limit is None else [limit] * self.num_ranks,
        )


SMALL, MEDIUM, LARGE, LARGEST = (8, 2304, 24), (8, 4096, 32), (16, 5120, 40), (32, 6144, 48)

ROWS = [
    Row(*SMALL, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083, 0.0433),
    Row(*SMALL, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837, 0.0039),
    Row(*SMALL, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444, 0.0026),
    Row(*MEDIUM, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698, 0.0029),
    Row(*MEDIUM, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045, 0.0559, 0.0022),
    Row(*MEDIUM, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294, 0.0010),
    Row(*LARGE, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397, 0.0672, 0.0066),
    Row(*LARGE, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088, 0.0516, 0.0054),
    Row(*LARGE, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576, 0.0266, 0.0028),
    Row(*LARGEST, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421, 0.0641, 0.0038),
    Row(*LARGEST, 128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1106, 0.0490, 0.0029),
    Row(*LARGEST, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0594, 0.0257, 0.0018),
]
