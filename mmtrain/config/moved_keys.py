"""Keys that have another name now, or none. A file that a person wrote is refused with what to write; a file named
config.toml, as an older mmtrain wrote whole into the folder of a run, is read as what it says."""

from typing import Any

_SEARCH = (
    "sub_microbatch",
    "interleave",
    "reorder",
    "split_backward",
    "braid",
    "eager_forwards",
    "memory",
    "memory_strategies",
    "activation_memory_gib",
    "strategy",
    "budget_evaluations",
    "budget_s",
    "threads",
    "distributed",
    "patience_s",
    "noise",
    "draws",
)
_DEVICE = ("flops_per_s", "p2p_latency_s", "p2p_bytes_per_s", "host_bytes_per_s")

MOVED: dict[str, str] = {
    **{f"planner.{name}": f"planner.search.{name}" for name in _SEARCH},
    **{f"planner.{name}": f"planner.device.{name}" for name in _DEVICE},
}
"""Dotted key of an older version -> where its value is now."""

GONE: dict[str, str] = {
    "metrics.save_tb_folder": "leave it out: tensorboard's files are in tb/ of job.dump_folder",
    "planner.finalists": "leave it out: eight plans are compared by all draws",
    "planner.search.finalists": "leave it out: eight plans are compared by all draws",
}
"""Dotted key of an older version that nobody needed to set -> what to do, as part of an error."""

_REMOVED: dict[str, dict[str, str]] = {
    "planner.placement": {"replicated": "spread"},
    "planner.search.strategy": {"random": "anneal", "dfs": "anneal"},
    "assignment.policy": {"disttrain": "none"},
}
"""Key -> values of older versions, with what a run that had them is read as: nothing that it stored depends on them."""


def instead(key: str) -> str:
    """What to write instead of a key of an older version, as part of an error; empty: it is none. Args: key: dotted."""
    return f"it is {MOVED[key]} now" if key in MOVED else GONE.get(key, "")


def brought_up_to_date(table: dict[str, Any]) -> dict[str, Any]:
    """A table of TOML with each moved key at its new place, unless that place has a value, and without removed
    values and keys."""
    for gone in GONE:
        *sections, last = gone.split(".")
        node: Any = table
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(last, None)
    for old, new in MOVED.items():
        *sections, last = old.split(".")
        node = table
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if isinstance(node, dict) and last in node and not isinstance(node[last], dict):
            value = node.pop(last)
            *sections, last = new.split(".")
            node = table
            for section in sections:
                node = node.setdefault(section, {})
            node.setdefault(last, value)
    for key, values in _REMOVED.items():
        *sections, last = key.split(".")
        node = table
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if isinstance(node, dict) and isinstance(node.get(last), str):
            node[last] = values.get(node[last], node[last])
    return table
