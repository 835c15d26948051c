"""A planning problem as the arrays that the kernels read, and the workspace of a thread."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from mmtrain.costs.noise import Factors
from mmtrain.errors import PlanError
from mmtrain.planner.search.kernels.arrays import (
    COMPONENT,
    CONTENTION,
    DOWN,
    GROUP,
    HELD,
    HELD_W,
    INPUT_S,
    MEMORY,
    RANK,
    SLOPE,
    SLOPE_UP,
    TOTAL,
    UP,
    Decoder,
    Instance,
    Workspace,
)
from mmtrain.schedule.action import Action, Braid, Kind
from mmtrain.schedule.library.memory import components
from mmtrain.schedule.number_ranges import GROUPS_BY_RANKS
from mmtrain.schedule.option import Load
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import Option, PlanningProblem

StageWork = tuple[int, int]
"""A stage and a work."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Naturals = npt.NDArray[np.uint32]

NO_DRAWS: Factors = np.zeros((0, 0, 3))

KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
"""The kinds of actions by their number in the kernels."""


@dataclass(frozen=True)
class Searched:
    """A problem with its arrays for the kernels."""

    problem: PlanningProblem
    nodes: tuple[StageWork, ...]
    """The nodes in the order of their numbers: work by work along its chain."""
    groups: tuple[tuple[int, int], ...]
    """(work, pass over the ranks) of each group."""
    arrays: Instance
    option_index: tuple[int, ...]
    """[option of the arrays] -> its index in its list."""
    factors: Factors = field(default_factory=lambda: NO_DRAWS)
    """Draws of seconds over whose makespans a plan's cost is the mean; none: its cost is its makespan."""

    @classmethod
    def of(cls, problem: PlanningProblem, only: Mapping[StageWork, int] | None = None) -> "Searched":
        """Args: only: (stage, work) -> its only option; None: all options."""
        graph = problem.graph
        nodes = tuple((stage, work) for work in range(len(graph.works)) for stage in graph.stages(work))
        number = {node: i for i, node in enumerate(nodes)}
        kinds: dict[tuple[int, int], int] = {}
        kind: Ints = np.empty(len(nodes), np.int64)
        for i, (stage, work) in enumerate(nodes):
            key = problem.cost_index[work][graph.position[stage]], -1 if only is None else only.get((stage, work), 0)
            kind[i] = kinds.setdefault(key, len(kinds))
        table = _Options()
        for options, one in kinds:
            table.add(problem.costs[options], one)
        groups, group = _groups(problem, nodes)
        GROUPS_BY_RANKS.check("works: their passes over the ranks, times num_ranks", len(groups) * graph.num_ranks)
        rank = np.array([graph.stage_rank[stage] for stage, _ in nodes], np.int64)
        component_of_work = components(graph)
        component = np.array([component_of_work[work] for _, work in nodes], np.int64)
        num_ranks, num_components = graph.num_ranks, max(component_of_work, default=-1) + 1
        node_at = np.zeros((num_ranks, max(1, len(groups))), np.uint32)
        node_at[rank, group] = np.arange(len(nodes), dtype=np.uint32)
        reservation: Ints = component * num_ranks + rank
        ins = [graph.inputs(*node) for node in nodes]
        outs = [graph.outputs(*node) for node in nodes]
        has_b = np.array([graph.has_backward(*node) for node in nodes], bool)
        needs_b = has_b * (1 + np.array([sum(e.grad for e in edges) for edges in outs], np.int64))
        first = np.array(table.first, np.int64)
        splits = np.array([table.splits[option] for option in first[kind]], bool)
        limit = np.array([math.inf if limit is None else limit for limit in problem.held_limit_bytes], np.float64)
        room = limit.copy()
        for i in map(int, np.flatnonzero(~has_b)):
            alone = table.rows[first[kind[i] + 1] - 1][HELD]
            room[rank[i]] = min(room[rank[i]], limit[rank[i]] - alone)
        needs_f = np.array([len(edges) for edges in ins], np.int64)
        none = num_components * num_ranks
        label = [module.label for module in graph.modules]
        module_of_label = {name: i for i, name in enumerate(dict.fromkeys(label))}
        module = np.array([module_of_label[label[graph.works[work].module]] for _, work in nodes], np.int64)
        columns = (rank, group, component, np.where(has_b, reservation, none), needs_f, needs_b, kind, splits, module)
        arrays = Instance(
            node=np.stack([column.astype(np.uint32) for column in columns], axis=1).copy(),
            node_at=node_at,
            entries=np.flatnonzero(needs_f == 0).astype(np.uint32),
            num_actions=len(nodes) + int(has_b.sum()),
            members_start=np.searchsorted(np.sort(reservation), np.arange(none + 1)).astype(np.uint32),
            members=np.argsort(reservation, kind="stable").astype(np.uint32),
            ins_start=_starts(ins),
            ins=_pairs((number[e.source, e.work], e.grad) for edges in ins for e in edges),
            ins_lag=np.array([problem.transfer_s(e) for edges in ins for e in edges], np.float64),
            outs_start=_starts(outs),
            outs=_pairs((number[e.target, e.target_work], e.grad) for edges in outs for e in edges),
            outs_lag=np.array([problem.transfer_s(e) for edges in outs for e in edges], np.float64),
            first=first,
            option=np.array(table.rows, np.float64).reshape(-1, 10),
            load=np.array(table.loads, np.float64).reshape(-1, 9),
            usual_s=table.usual_s(num_ranks, rank, kind),
            hull=np.array(table.hull, np.uint32).reshape(-1, 2),
            steepest=np.array(table.steepest, np.float64),
            same_w=np.array(table.same_w, np.bool_),
            limit=limit,
            room=np.maximum(0.0, room) * (1 + 1e-12),
        )
        return cls(problem, nodes, groups, arrays, tuple(table.index))

    @cached_property
    def component_of(self) -> Ints:
        """[G] component of each group."""
        component = np.zeros(len(self.groups), np.int64)
        component[self.arrays.node[:, GROUP]] = self.arrays.node[:, COMPONENT]
        return component

    @property
    def num_groups(self) -> int:
        """G."""
        return len(self.groups)

    @property
    def num_modules(self) -> int:
        """K."""
        return len({module.label for module in self.problem.graph.modules})

    def decoder(self, memory: float, speed: float, gap: float, *switches: bool) -> Decoder:
        """The decoder that assumes the same of all modules. Args: as the fields of `Decoder`."""
        modules = self.num_modules
        return Decoder((memory,) * modules, (speed,) * modules, gap, *switches)

    def workspace(self) -> Workspace:
        """Fresh memory for one thread."""
        p = self.arrays
        n, (ranks, groups) = len(self.nodes), p.node_at.shape
        most = 3 * int(np.bincount(p.node[:, RANK], minlength=ranks).max(initial=0)) + 2
        num_words = (groups + 63) // 64 + 1

        def ints(*shape: int) -> Ints:
            return np.zeros(shape, np.int64)

        def naturals(*shape: int) -> Naturals:
            return np.zeros(shape, np.uint32)

        return Workspace(
            state=np.zeros((n, 8)),
            inputs_s=np.zeros((n, 2)),
            footprint=np.zeros(p.members_start.size),
            missing=naturals(n, 2),
            ready=np.zeros((3 * ranks, num_words), np.uint64),
            busy=np.zeros((3 * ranks, (num_words + 63) // 64), np.uint64),
            first=naturals(3 * ranks),
            admitted=np.zeros(p.members_start.size, np.uint8),
            reserved=np.zeros(ranks),
            time=np.zeros(ranks),
            load=np.zeros((2, ranks)),
            next_start=np.zeros(ranks),
            backward_next=np.zeros(ranks, np.uint8),
            pending_at=np.zeros((ranks, most)),
            pending=naturals(ranks, most),
            pending_span=naturals(ranks, 2),
            weights=naturals(ranks, most),
            weights_span=naturals(ranks, 2),
            sequence=naturals(3 * n),
            order=naturals(ranks, most),
            length=naturals(ranks),
            ends=np.zeros((n, 2)),
            option=naturals(n),
            braided=naturals(n),
            joinable=np.ones(n, np.uint8),
            joined=np.zeros(n, np.uint8),
            local=naturals(n),
            local_index=naturals(n),
            span=naturals(n, 7),
            picks=naturals(3, n),
            active=naturals(n),
            visited=ints(len(p.option), 2),
            rows=np.zeros((3, most)),
            last_price=np.zeros((ranks, most)),
            last_rows=ints(ranks),
            last_seconds=np.zeros(ranks),
            old_decoder=np.zeros(MEMORY + 2 * self.num_modules),
            swap=naturals(4, groups),
        )

    def load(self, plan: Plan) -> Workspace:
        """A workspace that holds the orders of a plan, the parts of its braids one after the other."""
        number = {node: i for i, node in enumerate(self.nodes)}
        w = self.workspace()
        for rank, parts in enumerate(plan.parts):
            for index, (step, action, work) in enumerate(parts):
                if action.kind not in KINDS:
                    raise PlanError(f"rank {rank}, step {step}: {action}: a search knows F, B, I and W alone")
                w.order[rank, index] = 4 * number[action.stage, work] + KINDS.index(action.kind)
            w.length[rank] = len(parts)
        return w

    def plan(self, w: Workspace, *, join: bool = True) -> Plan:
        """The plan that a workspace holds after an evaluation.

        Args: join: I and W become one B where W follows its I at once and no stage waits for the gradient.
        """
        p, graph = self.arrays, self.problem.graph
        waited_for = np.zeros(len(self.nodes), bool)
        for node in range(len(self.nodes)):
            waited_for[node] = p.ins[p.ins_start[node] : p.ins_start[node + 1], 1].any()
        orders: list[tuple[Action, ...]] = []
        for rank in range(graph.num_ranks):
            actions = [(int(a) >> 2, KINDS[int(a) & 3]) for a in w.order[rank, : w.length[rank]]]
            order: list[Action] = []
            for i, (node, kind) in enumerate(actions):
                if w.joined[node] and kind in (Kind.I, Kind.W):
                    order += [graph.action(Kind.B, *self.nodes[node])] if kind is Kind.I else []
                    continue
                joins = join and not waited_for[node] and w.joinable[node]
                if kind is Kind.W and joins and actions[i - 1] == (node, Kind.I):
                    continue
                if kind is Kind.I and joins and actions[i + 1] == (node, Kind.W):
                    kind = Kind.B
                action = graph.action(kind, *self.nodes[node])
                before, kind_before = actions[i - 1]
                if i and kind_before is Kind.F and w.braided[before] == 1 + 4 * node + KINDS.index(kind):
                    action = Braid.of(order.pop(), action)
                order.append(action)
            orders.append(tuple(order))
        return Plan(graph, tuple(orders), self.chosen(w))

    def chosen(self, w: Workspace) -> dict[StageWork, int]:
        """(stage, work) -> the option that a workspace holds; what is absent has option 0."""
        chosen = {node: self.option_index[option] for node, option in zip(self.nodes, w.option, strict=True)}
        return {node: option for node, option in chosen.items() if option}


class _Options:
    """The options of all lists, without dominated ones."""

    def __init__(self) -> None:
        self.first = [0]
        self.index: list[int] = []
        self.rows: list[list[float]] = []
        """The rows of `Instance.option`."""
        self.loads: list[list[float]] = []
        self.hull: list[list[int]] = []
        self.steepest: list[float] = []
        self.same_w: list[bool] = []
        self.splits: list[bool] = []

    def add(self, options: Sequence[Option], one: int) -> None:
        """Adds a list. Args: one: its only usable option; below 0: all."""
        kept = _useful(options) if one < 0 else [one]
        begin = len(self.index)
        for o in (options[i] for i in kept):
            forward_s, input_s, alone_s = map(o.duration_s, (Kind.F, Kind.I, Kind.W))
            # As a part of B, W may hide exchanges of its I.
            hidden_s = input_s + o.backward_weight_s - o.duration_s(Kind.B)
            seconds = [forward_s, input_s, o.backward_weight_s - hidden_s]
            held_w = o.held_for_weight_bytes if o.has_backward else 0.0
            larger = min((row[HELD] for row in self.rows[begin:]), default=math.inf)
            held = o.activation_bytes, held_w
            self.rows.append([*seconds, alone_s, sum(seconds), *held, math.inf, -math.inf, larger])
            self.loads.append([*o.load(Kind.F).together(o.load(Kind.B)), alone_s])
            self.splits.append(min(o.backward_input_s, o.backward_weight_s) > 0)
            self.hull.append([0, 0])
        self.index += kept
        self.first.append(len(self.index))
        rows = self.rows[begin:]
        self.same_w.append(all(row[HELD] == row[HELD_W] for row in rows))
        at = 0
        while at + 1 < len(rows):  # the lower convex hull of (bytes, seconds), from the most bytes
            smaller = [j for j in range(at + 1, len(rows)) if rows[j][HELD] < rows[at][HELD]]
            if not smaller:
                break
            rows[at][SLOPE], j = min((_slope(rows[at], rows[j]), -j) for j in smaller)
            rows[-j][SLOPE_UP] = rows[at][SLOPE]
            self.hull[begin + at][DOWN], self.hull[begin - j][UP] = begin - j, begin + at
            at = -j
        self.steepest.append(max((row[SLOPE] for row in rows if row[SLOPE] < math.inf), default=0.0))

    def usual_s(self, num_ranks: int, rank: Ints, kind: Ints) -> Floats:
        """[R, lists]: see `Instance`. Args: rank, kind: of each node."""
        usual_s: Floats = np.zeros((num_ranks, len(self.first) - 1))
        fastest = np.array(self.loads, np.float64).reshape(-1, 9)[self.first[:-1]]
        for one in range(num_ranks):
            here = kind[rank == one]
            forward_s, exchange_s, *_ = fastest[here].sum(axis=0) / max(1, len(here))
            for listed in np.unique(here):
                contention = float(fastest[listed, CONTENTION])
                forward = Load(float(forward_s), float(exchange_s), contention=contention)
                backward = Load(0.0, 0.0, *map(float, fastest[listed, INPUT_S : CONTENTION + 1]))
                usual_s[one, listed] = forward.seconds + backward.seconds - forward.together(backward).seconds
        return usual_s


def _slope(large: Sequence[float], small: Sequence[float]) -> float:
    """Seconds a byte from one option to a smaller one."""
    return (small[TOTAL] - large[TOTAL]) / (large[HELD] - small[HELD])


def _useful(options: Sequence[Option]) -> list[int]:
    """The options that no other one dominates, the fastest first."""
    amounts = [(o.forward_s + o.duration_s(Kind.B), o.activation_bytes, o.held_for_weight_bytes) for o in options]
    kept: list[int] = []
    for i in sorted(range(len(options)), key=lambda i: amounts[i]):
        if not any(all(a <= b for a, b in zip(amounts[j], amounts[i], strict=True)) for j in kept):
            kept.append(i)
    return kept


def _groups(problem: PlanningProblem, nodes: Sequence[StageWork]) -> tuple[tuple[tuple[int, int], ...], Any]:
    """The groups, and the group of each node. A work starts a new group where it returns to a rank of the last one."""
    groups: list[tuple[int, int]] = []
    group = np.empty(len(nodes), np.int64)
    seen: set[int] = set()
    for i, (stage, work) in enumerate(nodes):
        rank = problem.graph.stage_rank[stage]
        if not groups or groups[-1][0] != work:
            groups.append((work, 0))
            seen = set()
        elif rank in seen:
            groups.append((work, groups[-1][1] + 1))
            seen = set()
        seen.add(rank)
        group[i] = len(groups) - 1
    return tuple(groups), group


def _starts(lists: Sequence[Sequence[object]]) -> Naturals:
    return np.array([0, *accumulate(map(len, lists))], np.uint32)


def _pairs(rows: Iterable[tuple[int, bool]]) -> Naturals:
    return np.array(list(rows), np.uint32).reshape(-1, 2)
