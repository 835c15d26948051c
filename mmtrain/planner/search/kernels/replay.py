"""The way from decoded orders, with options chosen for them, to a makespan."""

from typing import Any

import numpy as np

from mmtrain.planner.search.kernels.arrays import ALONE, BACKWARD, FORWARD, RANK, B, F, I, Instance, W, Workspace
from mmtrain.planner.search.kernels.compiler import inner, part
from mmtrain.planner.search.kernels.decode import block_s, latest, seconds_of


@inner
def replay(p: Instance, w: Workspace, factors: Any, draw: int) -> float:
    """The makespan of the decoded orders with the chosen options.

    Args: factors: [D, n, 3] of the seconds of F, I and W. draw: which of them; below 0: none.
    """
    node, seconds, time, ends, joined = p.node, p.option, w.time, w.ends, w.joined
    ins_start, ins, ins_lag = p.ins_start, p.ins, p.ins_lag
    outs_start, outs, outs_lag = p.outs_start, p.outs, p.outs_lag
    sequence, options, braided, num_actions, ran = w.sequence, w.option, w.braided, 0, False
    factor_f, factor_i, factor_w = 1.0, 1.0, 1.0
    for rank in range(time.size):
        num_actions += w.length[rank]
        time[rank] = 0.0
    for step in range(num_actions):
        if ran:  # in the block of the action before
            ran = False
            continue
        i, kind = sequence[step] >> 2, sequence[step] & 3
        rank, option = node[i, RANK], options[i]
        end = time[rank]
        if draw >= 0:
            factor_f, factor_i, factor_w = factors[draw, i, 0], factors[draw, i, 1], factors[draw, i, 2]
        if kind == F:
            for e in range(ins_start[i], ins_start[i + 1]):
                end = max(end, ends[ins[e, 0], FORWARD] + ins_lag[e])
            alone_s, drawn_s = seconds[option, 0], factor_f * seconds[option, 0]
            if braided[i] > 0:
                b, kind = (braided[i] - 1) >> 2, (braided[i] - 1) & 3
                other = options[b]
                if kind != W:
                    for e in range(outs_start[b], outs_start[b + 1]):
                        if outs[e, 1]:
                            end = max(end, ends[outs[e, 0], BACKWARD] + outs_lag[e])
                # Its factor is that of both, by their seconds.
                if draw >= 0:
                    factor_f = factors[draw, b, 2] if kind == W else factors[draw, b, 1]
                alone_s += seconds_of(seconds, other, kind)
                drawn_s += factor_f * seconds_of(seconds, other, kind)
                drawn_s *= block_s(p.load, option, other, kind) / alone_s
                if kind != W:
                    ends[b, BACKWARD] = end + drawn_s
                ran = True
            end += drawn_s
            ends[i, FORWARD] = end
        elif kind == W:
            if not joined[i]:
                end += factor_w * seconds[option, ALONE]
        else:
            for e in range(outs_start[i], outs_start[i + 1]):
                if outs[e, 1]:
                    end = max(end, ends[outs[e, 0], BACKWARD] + outs_lag[e])
            end += factor_i * seconds[option, 1]
            if (kind == B) | (joined[i] > 0):
                end += factor_w * seconds[option, 2]
            ends[i, BACKWARD] = end
        time[rank] = end
    return float(latest(time))


@part
def cost_of(p: Instance, w: Workspace, factors: Any) -> float:
    """The makespan of a decoded plan; with draws of factors, its mean over them."""
    none: Any = np.int64(-1)  # a plain -1 would be a type of its own
    if factors.shape[0] == 0:
        return float(replay(p, w, factors, none))
    total = 0.0
    for draw in range(factors.shape[0]):
        total += replay(p, w, factors, draw)
    return float(total / factors.shape[0])


@part
def join(p: Instance, w: Workspace, factors: Any) -> float:
    """Makes I and W one B again where two actions take longer than one and the cost does not grow; the cost."""
    cost, num_actions = cost_of(p, w, factors), 0
    for rank in range(w.time.size):
        num_actions += w.length[rank]
    for step in range(num_actions):
        i = w.sequence[step] >> 2
        splits = w.sequence[step] & 3 == I and w.joinable[i]
        if splits and p.option[w.option[i], ALONE] > p.option[w.option[i], 2]:
            w.joined[i] = 1
            joined = cost_of(p, w, factors)
            if joined <= cost:
                cost = joined
            else:
                w.joined[i] = 0
    return float(cost)
