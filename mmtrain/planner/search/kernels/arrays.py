"""What the kernels read and write: a problem, a thread's workspace, a chain of annealing, as tuples of arrays.

n nodes, each one (stage, work); R ranks, G groups, C components, E edges, O options; m: more actions than any rank has.
"""

from typing import Any, NamedTuple

import numpy as np

F, B, I, W = 0, 1, 2, 3
"""Kinds of actions; an action is the number 4 x node + kind."""
FORWARD, BACKWARD = 0, 1
"""Directions: rows of all arrays that treat forwards and backwards alike."""
RANK, GROUP, COMPONENT, RESERVATION, NEEDS_F, NEEDS_B, KIND, SPLITS, MODULE = range(9)
"""Columns of `Instance.node`."""
ALONE, TOTAL, HELD, HELD_W, SLOPE, SLOPE_UP, LARGER = range(3, 10)
"""Columns of `Instance.option` behind the seconds of F, I and W; ALONE, HELD and HELD_W also of `Workspace.state`."""
DOWN, UP = 0, 1
"""Columns of `Instance.hull`."""
BEGIN, END, BEGIN_W, END_W, FASTEST, SMALLEST, SAME_W = range(7)
"""Columns of `Workspace.span`."""
FORWARD_S, FORWARD_EXCHANGE, INPUT_S, INPUT_EXCHANGE, WEIGHT_S, CONTENTION, COPY_OUT, COPY_IN, WEIGHT_ALONE_S = range(9)
"""Columns of `Instance.load`."""
GAP, WAIT, BACKWARD_FIRST, SPLIT, BRAID, MEMORY = range(6)
"""Places in a `Decoder` as an array [5 + 2 K], f8: at MEMORY `memory` of each of K modules, then `speed` of each."""


class Instance(NamedTuple):
    """A problem as arrays."""

    node: Any
    """[n, 9] u4: RANK, GROUP, COMPONENT, RESERVATION, NEEDS_F, NEEDS_B, KIND, SPLITS, MODULE.

    A group has one priority; at most one node of it is on a rank. A component is a set of connected works, mostly one
    microbatch; its memory is reserved at once. RESERVATION: COMPONENT x R + RANK, or C x R where there is no backward
    and nothing to reserve. NEEDS_F, NEEDS_B: number of results that forward and backward wait for; NEEDS_B is 0 where
    there is no backward. KIND: list of options. SPLITS: whether I and W both take time.
    MODULE: 0 .. K - 1, that of the stage; parts of one module are one.
    """
    node_at: Any
    """[R, G] u4: the node of a group on a rank, where there is one."""
    entries: Any
    """u4: the nodes that need nothing, ascending."""
    num_actions: int
    """Forwards and backwards."""
    members_start: Any
    """[C x R + 1] u4: slice of `members` with the nodes of a reservation."""
    members: Any
    """[n] u4: the nodes by reservation."""
    ins_start: Any
    """[n + 1] u4: slice of the edges into a node."""
    ins: Any
    """[E, 2] u4: node that an edge comes from, and whether a gradient goes back over it."""
    ins_lag: Any
    """[E] f8: seconds of its transfer."""
    outs_start: Any
    outs: Any
    outs_lag: Any
    """The same for the edges out of a node."""
    first: Any
    """[lists + 1] i8: slice of the options of a list, the fastest first, no option dominated by another one."""
    option: Any
    """[O, 10] f8: seconds of F, I and W, as parts of B; ALONE, of W after an I; TOTAL of the first; bytes HELD from F
    to the backward, HELD_W from I to W; SLOPE: seconds a byte on the way to the next smaller option on the convex hull
    of (bytes, seconds), inf: there is none; SLOPE_UP: from the next larger one, -inf: there is none; LARGER: the least
    bytes held of the faster options."""
    load: Any
    """[O, 9] f8: the fields of `Load`: seconds of compute and of exchanges of F and of I, of W as a part of B,
    contention, copies during F and during B; and seconds of W alone."""
    usual_s: Any
    """[R, lists] f8: seconds that a B with the fastest option of a list saves as a block with the mean forward of a
    rank."""
    hull: Any
    """[O, 2] u4: DOWN, the next smaller option on the hull, and UP, the larger one, where they exist."""
    steepest: Any
    """[lists] f8: the greatest slope of a list, or 0."""
    same_w: Any
    """[lists] b1: whether each option holds as much for W as before."""
    limit: Any
    """[R] f8: bytes; inf: no limit."""
    room: Any
    """[R] f8: bytes that can be reserved: `limit` less what a forward without a backward takes for itself, plus an
    epsilon."""


class Workspace(NamedTuple):
    """Memory of one thread."""

    state: Any
    """[n, 8] f8: seconds that the decoder assumes of F, I, W in B and W alone, bytes that it reserves (HELD until I,
    HELD_W until W)."""
    inputs_s: Any
    """[n, 2] f8: when the inputs of F and of the backward that are known so far have arrived."""
    footprint: Any
    """[C x R + 1] f8: bytes of each reservation."""
    missing: Any
    """[n, 2] u4: results that F and the backward still wait for."""
    ready: Any
    """[3 R, words + 1] u8: three queues of a rank: forwards with memory, forwards without, backwards; bits by priority.
    The last word has its lowest bit always set: all queues end there."""
    busy: Any
    """[3 R, pages] u8: which words of `ready` are not 0."""
    first: Any
    """[3 R] u4: the first position of each queue."""
    admitted: Any
    """[C x R + 1] u1: whether the memory of a component on a rank is reserved; always 1 at the last index."""
    reserved: Any
    """[R] f8: bytes that are reserved."""
    time: Any
    """[R] f8: when the rank has ended the actions that it was given."""
    load: Any
    """[2, R] f8: assumed seconds of all its actions, backwards whole; of those that it has not been given."""
    next_start: Any
    """[R] f8: when it could start its next action."""
    backward_next: Any
    """[R] u1: whether a backward's turn comes next."""
    pending_at: Any
    """[R, m] f8: arrival times to come, ascending, and inf."""
    pending: Any
    """[R, m] u4: action of each."""
    pending_span: Any
    """[R, 2] u4: ends of both; the inf is at the second one."""
    weights: Any
    """[R, m] u4: queue of nodes whose W is due."""
    weights_span: Any
    """[R, 2] u4: its ends."""
    sequence: Any
    """[3 n] u4: all actions, each after those that it needs."""
    order: Any
    """[R, m] u4: actions of each rank."""
    length: Any
    """[R] u4: how many."""
    ends: Any
    """[n, 2] f8: of F and of the backward's gradient."""
    option: Any
    """[n] u4: the chosen one of each node."""
    braided: Any
    """[n] u4: 1 + the B or W that runs as one block with this node's F, and comes next in the sequence; 0: none."""
    joinable: Any
    """[n] u1: whether the node's I and W may be one B again: its W is in no block."""
    joined: Any
    """[n] u1: whether a node's I and W are one B again, at the I's step; the W's is then void."""
    local: Any
    """[n] u4: nodes of the rank whose options are chosen, in the order of their forwards."""
    local_index: Any
    """[n] u4: the index of a node in `local`."""
    span: Any
    """[n, 7] u4 by local index: the rows in which a node holds bytes until I (BEGIN .. END) and until W (BEGIN_W ..
    END_W, none if that is below); FASTEST and SMALLEST of its options; SAME_W, of its list."""
    picks: Any
    """[3, n] u4 by local index: options: chosen ones, those of the last prices, those of the best prices."""
    active: Any
    """[n] u4: local indices of the nodes that may hold bytes in a row."""
    visited: Any
    """[O, 2] i8: the last scan that considered replacing an option, for what is held until I and until W."""
    rows: Any
    """[3, m] f8: price of a byte in each row, sums of the prices before it, bytes used in it."""
    last_price: Any
    """[R, m] f8: the prices of each rank's last order."""
    last_rows: Any
    """[R] i8: its rows; 0: there was none."""
    last_seconds: Any
    """[R] f8: what the chosen options took."""
    old_decoder: Any
    """[5 + 2 K] f8: the `Decoder` before a move."""
    swap: Any
    """[4, G] u4: permutations while they change; those before a move are rows 2 and 3."""


class Decoder(NamedTuple):
    """How priorities become orders."""

    memory: tuple[float, ...]
    """[K] of each module 0 .. 1: memory is reserved for the fastest option .. the smallest one. So it decides how much
    is in flight."""
    speed: tuple[float, ...]
    """[K] of each module 0 .. 1: actions are assumed to take as long as with the fastest option .. the smallest one."""
    gap: float
    """A W starts if the rank would otherwise be idle for at least this part of its time."""
    backward_first: bool
    """Whether backwards always go before forwards; else they alternate."""
    split: bool
    """Whether backwards are split into I and W."""
    braid: bool = False
    """Whether a forward and a backward that can both start, else a forward and the first W that is due, run as one
    block where that hides exchanges. The backward is then whole."""
    wait: float = 0.0
    """A forward waits for a backward whose inputs arrive within this part of the forward's time."""

    @classmethod
    def from_array(cls, values: Any) -> "Decoder":
        """The inverse of `array`."""
        assumed, (gap, wait, *switches) = list(map(float, values[MEMORY:])), map(float, values[:MEMORY])
        backward_first, split, braid = (value > 0.5 for value in switches)
        modules = len(assumed) // 2
        return cls(tuple(assumed[:modules]), tuple(assumed[modules:]), gap, backward_first, split, braid, wait)

    @property
    def array(self) -> Any:
        """The decoder as an array [5 + 2 K] f8, in the order of GAP .. MEMORY."""
        switches = self.backward_first, self.split, self.braid
        return np.array([self.gap, self.wait, *switches, *self.memory, *self.speed], np.float64)


class Chain(NamedTuple):
    """One chain of simulated annealing, as arrays that the kernel changes."""

    at: Any
    """[2, G] u4: position of each group among forwards and among backwards, in the current state."""
    group_at: Any
    """[2, G] u4: its inverse."""
    decoder: Any
    """[5 + 2 K] f8: a `Decoder`."""
    best_at: Any
    best_decoder: Any
    """The same of the best plan so far."""
    cost: Any
    """[2] f8: of the current state and of the best one."""
    random: Any
    """[1] u8: state of the generator; not 0."""
    queued: Any
    """[2, 2, G, R, 2] u4: see `decode`; of the current state, and of what was decoded last. Where there is nothing to
    queue (no node, or no backward) it begins at the largest number and ends at 0: an empty interval."""
    current: Any
    """[2] u1: which row of `queued` is that of the current state, and whether it is conclusive."""
