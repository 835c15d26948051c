"""One memory option for each node of a rank, for orders that are given: least seconds within the limit.

Lagrangian relaxation of the limits of the rows. With a price for a byte in each row, each node has its cheapest option
independently of the others; prices follow the subgradient. The options of the best prices are made to fit, and the
relaxation gives a bound.
"""

from typing import Any

import numpy as np

from mmtrain.planner.search.kernels.arrays import (
    BEGIN,
    BEGIN_W,
    DOWN,
    END,
    END_W,
    FASTEST,
    HELD,
    HELD_W,
    KIND,
    LARGER,
    NEEDS_B,
    SAME_W,
    SLOPE,
    SLOPE_UP,
    SMALLEST,
    TOTAL,
    UP,
    B,
    F,
    I,
    Instance,
    W,
    Workspace,
)
from mmtrain.planner.search.kernels.compiler import inner, part


@inner
def _lay_rows(
    order: Any, length: int, nodes: Any, first: Any, same_w: Any, local_index: Any, local: Any, span: Any
) -> tuple[int, int]:
    """Lists the nodes of a rank with the rows in which each holds bytes; (rows, nodes).

    A row is a moment at which something was added and something is freed next: no other moment holds more.
    """
    row, shrunk, count = 0, False, 0
    for step in range(length):
        node, kind = order[step] >> 2, order[step] & 3
        if kind == F:
            if shrunk:
                row, shrunk = row + 1, False
            options = nodes[node, KIND]
            span[count, BEGIN], span[count, END], span[count, BEGIN_W], span[count, END_W] = row, row, 1, 0
            span[count, FASTEST], span[count, SMALLEST] = first[options], first[options + 1] - 1
            span[count, SAME_W] = same_w[options]
            shrunk = nodes[node, NEEDS_B] == 0
            local[count], local_index[node] = node, count
            count += 1
            continue
        i = local_index[node]
        if kind == B:
            span[i, END] = row
            shrunk = True
        elif span[i, SAME_W]:
            if kind == W:
                span[i, END] = row
                shrunk = True
        elif kind == I:
            span[i, END] = row
            row, shrunk = row + 1, False
            span[i, BEGIN_W] = row
        else:
            span[i, END_W] = row
            shrunk = True
    return row + 1, count


@inner
def _sum_usage(usage: Any, num_rows: int) -> float:
    """Turns the bytes added and freed in each row into the bytes held; the most in any row."""
    most, running = 0.0, 0.0
    for row in range(num_rows):
        running += usage[row]
        usage[row] = running
        most = max(most, running)
    return most


@inner
def _count_usage(span: Any, count: int, num_rows: int, chosen: Any, options: Any, usage: Any) -> float:
    """Sets the bytes held in each row; the most in any row."""
    for row in range(num_rows + 1):
        usage[row] = 0.0
    for i in range(count):
        amount = options[chosen[i], HELD]
        usage[span[i, BEGIN]] += amount
        usage[span[i, END] + 1] -= amount
        if span[i, BEGIN_W] <= span[i, END_W]:
            amount = options[chosen[i], HELD_W]
            usage[span[i, BEGIN_W]] += amount
            usage[span[i, END_W] + 1] -= amount
    return float(_sum_usage(usage, num_rows))


@inner
def _respond(
    options: Any, hull: Any, span: Any, count: int, num_rows: int, chosen: Any, usage: Any, prefix: Any,
    uniform: float,
) -> tuple[float, float]:  # fmt: skip
    """Sets each node's option with the least seconds + price x bytes, and the usage of the rows.

    Args: chosen: options to start from. uniform: the price of a byte for every node; below 0: that of its rows, from
        the sums in `prefix`.
    Returns: (sum of seconds + price x bytes over the nodes, most bytes in a row).
    """
    for row in range(num_rows + 1):
        usage[row] = 0.0
    value = 0.0
    for i in range(count):
        begin, end, option = span[i, BEGIN], span[i, END], chosen[i]
        price = prefix[end + 1] - prefix[begin] if uniform < 0 else uniform
        if span[i, SAME_W]:
            while options[option, SLOPE] < price:
                option = hull[option, DOWN]
            while options[option, SLOPE_UP] >= price:
                option = hull[option, UP]
            value += options[option, TOTAL] + price * options[option, HELD]
        else:
            begin_w, end_w, price_w = span[i, BEGIN_W], span[i, END_W], 0.0
            if begin_w <= end_w:
                price_w = prefix[end_w + 1] - prefix[begin_w] if uniform < 0 else uniform
            least = np.inf
            for other in range(span[i, FASTEST], span[i, SMALLEST] + 1):
                cost = options[other, TOTAL] + price * options[other, HELD] + price_w * options[other, HELD_W]
                if cost < least:
                    option, least = other, cost
            value += least
            if begin_w <= end_w:
                usage[begin_w] += options[option, HELD_W]
                usage[end_w + 1] -= options[option, HELD_W]
        chosen[i] = option
        amount = options[option, HELD]
        usage[begin] += amount
        usage[end + 1] -= amount
    return value, _sum_usage(usage, num_rows)


@inner
def _move(span: Any, usage: Any, options: Any, i: int, old: int, new: int) -> None:
    """Updates the usage of a node's rows for a change of its option."""
    more, more_w = options[new, HELD] - options[old, HELD], options[new, HELD_W] - options[old, HELD_W]
    for row in range(span[i, BEGIN], span[i, END] + 1):
        usage[row] += more
    for row in range(span[i, BEGIN_W], span[i, END_W] + 1):
        usage[row] += more_w


@part
def _shrink(w: Workspace, options: Any, count: int, num_rows: int, chosen: Any, limit: float) -> bool:
    """Takes smaller options where rows exceed the limit, row by row; whether all rows fit then."""
    span, usage, active, visited = w.span, w.rows[2], w.active, w.visited
    num_active, begun, scan = 0, 0, 0
    none: Any = np.int64(-1)  # a plain -1 would be a type of its own
    visited[:] = 0
    for row in range(num_rows):
        while begun < count and span[begun, BEGIN] <= row:
            active[num_active] = begun
            begun, num_active = begun + 1, num_active + 1
        if usage[row] <= limit:
            continue
        kept = 0
        for k in range(num_active):
            if max(span[active[k], END], span[active[k], END_W]) >= row:
                active[kept] = active[k]
                kept += 1
        num_active = kept
        while usage[row] > limit:
            best, best_new, least = none, none, np.inf
            over = usage[row] - limit
            scan += 1
            for k in range(num_active):
                i = active[k]
                old = chosen[i]
                column = HELD if span[i, END] >= row else HELD_W
                if visited[old, column - HELD] == scan:  # of nodes with equal options the first is taken
                    continue
                visited[old, column - HELD] = scan
                for new in range(old + 1, span[i, SMALLEST] + 1):
                    saved = options[old, column] - options[new, column]
                    # Rows before this one fit already: what a node held in them may not grow.
                    if saved > 0 and (column == HELD or options[new, HELD] <= options[old, HELD]):
                        cost = (options[new, TOTAL] - options[old, TOTAL]) / min(saved, over)
                        if cost < least:
                            best, best_new, least = i, new, cost
            if best < 0:
                return False
            _move(span, usage, options, best, chosen[best], best_new)
            chosen[best] = best_new
    return True


@part
def _grow(w: Workspace, options: Any, count: int, chosen: Any, limit: float) -> float:
    """Takes faster options where there is room; the seconds of all nodes."""
    span, usage = w.span, w.rows[2]
    seconds, full = 0.0, 0  # a row without room for one of the nodes, and probably for the next one
    for i in range(count):
        old = chosen[i]
        if old > span[i, FASTEST]:
            # If even the smallest of the faster options does not fit, none does.
            max_usage = limit - (options[old, LARGER] - options[old, HELD])
            if span[i, BEGIN] <= full <= span[i, END] and usage[full] > max_usage:
                seconds += options[old, TOTAL]
                continue
            most, most_w = 0.0, 0.0
            for row in range(span[i, BEGIN], span[i, END] + 1):
                most = max(most, usage[row])
                if most > max_usage:
                    full = row
                    break
            if most > max_usage:
                seconds += options[old, TOTAL]
                continue
            for row in range(span[i, BEGIN_W], span[i, END_W] + 1):
                most_w = max(most_w, usage[row])
            room, room_w = limit - most + options[old, HELD], limit - most_w + options[old, HELD_W]
            for new in range(span[i, FASTEST], old):
                if options[new, HELD] <= room and options[new, HELD_W] <= room_w:
                    _move(span, usage, options, i, old, new)
                    chosen[i] = new
                    break
        seconds += options[chosen[i], TOTAL]
    return seconds


@inner
def _repair(w: Workspace, options: Any, count: int, num_rows: int, chosen: Any, limit: float) -> float:
    """Makes options fit; the seconds of all nodes, or inf if the smallest do not fit."""
    _count_usage(w.span, count, num_rows, chosen, options, w.rows[2])
    if not _shrink(w, options, count, num_rows, chosen, limit):
        return np.inf
    return float(_grow(w, options, count, chosen, limit))


@part
def _fit_one_price(p: Instance, w: Workspace, count: int, num_rows: int, limit: float) -> float:
    """Chooses options by one price for all bytes, nearly the lowest that fits; seconds of all nodes, or inf."""
    options, hull, span, chosen, prefix, usage = p.option, p.hull, w.span, w.picks[0], w.rows[1], w.rows[2]
    steepest = 0.0
    for i in range(count):
        steepest = max(steepest, p.steepest[p.node[w.local[i], KIND]])
    low, high = 0.0, 1.01 * steepest
    for _ in range(10):
        middle = 0.5 * (low + high)
        if _respond(options, hull, span, count, num_rows, chosen, usage, prefix, middle)[1] <= limit:
            high = middle
        else:
            low = middle
    _respond(options, hull, span, count, num_rows, chosen, usage, prefix, high)
    return float(_repair(w, options, count, num_rows, chosen, limit))


@part
def _improve_prices(
    p: Instance, w: Workspace, rank: int, count: int, num_rows: int, limit: float,
    iterations: int, fastest_s: float, seconds: float, expected_s: float,
) -> float:  # fmt: skip
    """Subgradient steps on the prices; the best bound. The options and prices of the best ones are kept.

    Args: fastest_s: a bound that is known. seconds: of a choice that is known, or inf. expected_s: of the best choice.
    """
    options, hull, span, trial, best = p.option, p.hull, w.span, w.picks[1], w.picks[2]
    price, prefix, usage, last_price = w.rows[0], w.rows[1], w.rows[2], w.last_price[rank]
    bound, scale, stale = fastest_s, 1.0, 0
    prefix[0] = 0.0
    for row in range(num_rows):
        prefix[row + 1] = prefix[row] + price[row]
    for iteration in range(iterations + 1):
        value = _respond(options, hull, span, count, num_rows, trial, usage, prefix, -1.0)[0] - prefix[num_rows] * limit
        if value > bound or iteration == 0:
            bound, stale = max(bound, value), 0
            for i in range(count):
                best[i] = trial[i]
            for row in range(num_rows):
                last_price[row] = price[row]
        else:
            stale += 1
            if stale == 3:
                scale, stale = 0.5 * scale, 0
        # A step of Polyak's size along the subgradient.
        norm = 0.0
        for row in range(num_rows):
            over = usage[row] / limit - 1
            usage[row] = over
            norm += over * over if over > 0 or price[row] > 0 else 0.0
        if norm <= 0 or (seconds < np.inf and seconds - bound <= 1e-9 * seconds):
            break
        step = scale * max(expected_s - bound, 1e-4 * expected_s) / norm / limit
        for row in range(num_rows):
            price[row] = max(0.0, price[row] + step * usage[row])
            prefix[row + 1] = prefix[row] + price[row]
    return bound


@part
def _keep(w: Workspace, count: int, chosen: Any) -> None:
    """Sets the options of a rank's nodes."""
    for i in range(count):
        w.option[w.local[i]] = chosen[i]


@part
def choose(p: Instance, w: Workspace, rank: int, iterations: int) -> tuple[float, float]:
    """Chooses the options of a rank's nodes.

    Returns: (seconds of all nodes, a bound that no choice beats); (inf, inf) if the smallest options do not fit.
    """
    order, options, span, local = w.order[rank], p.option, w.span, w.local
    chosen, trial, best = w.picks[0], w.picks[1], w.picks[2]
    price, last_rows = w.rows[0], w.last_rows[rank]
    if p.limit[rank] == np.inf:
        for step in range(w.length[rank]):
            node = order[step] >> 2
            w.option[node] = p.first[p.node[node, KIND]]
        return 0.0, 0.0
    num_rows, count = _lay_rows(order, w.length[rank], p.node, p.first, p.same_w, w.local_index, local, span)
    fastest_s = 0.0
    for i in range(count):
        chosen[i] = trial[i] = best[i] = span[i, FASTEST]
        fastest_s += options[chosen[i], TOTAL]
    _keep(w, count, chosen)
    limit = p.limit[rank] * (1 + 1e-12)
    if _count_usage(span, count, num_rows, chosen, options, w.rows[2]) <= limit:
        return fastest_s, fastest_s
    seconds = np.inf
    if last_rows and limit > 0:
        # The last order of this rank was similar: its prices nearly fit, and its seconds are to be expected.
        expected_s, iterations = w.last_seconds[rank], (iterations + 2) // 3
        for row in range(num_rows):
            price[row] = w.last_price[rank, row * last_rows // num_rows]
    else:
        expected_s = seconds = _fit_one_price(p, w, count, num_rows, limit)
        if seconds == np.inf or limit <= 0:  # with a limit of 0 bytes, prices bring nothing
            _keep(w, count, chosen)
            return seconds, fastest_s
        for row in range(num_rows):
            price[row] = 0.0
    bound = _improve_prices(p, w, rank, count, num_rows, limit, iterations, fastest_s, seconds, expected_s)
    repaired_s = _repair(w, options, count, num_rows, best, limit)
    if min(repaired_s, seconds) == np.inf:  # no small changes of the prices' options fit
        for i in range(count):
            chosen[i] = span[i, SMALLEST]
        seconds = _repair(w, options, count, num_rows, chosen, limit)
    if repaired_s < seconds:
        _keep(w, count, best)
    else:
        _keep(w, count, chosen)
    seconds = min(repaired_s, seconds)
    if seconds < np.inf:
        w.last_rows[rank], w.last_seconds[rank] = num_rows, seconds
    return seconds, bound


@inner
def choose_all(p: Instance, w: Workspace, iterations: int) -> float:
    """Chooses the options of all ranks; the greatest part by which a rank's seconds exceed the bound; inf: none fit."""
    over = 0.0
    for rank in range(p.limit.size):
        seconds, bound = choose(p, w, rank, iterations)
        if seconds == np.inf:
            return np.inf
        over = max(over, seconds / bound - 1 if bound > 0 else 0.0)
    return over
