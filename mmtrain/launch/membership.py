"""The nodes that a job has: a value that every node computes alike from what all of them said in one round. Pure.

A node is a group of ranks that live and die together. In a round each live node says a `Node`, and all get the same
nodes back, so `next_membership` of them needs neither a leader nor a second message. It looks at nothing but the
round: each node says the generation that it adopted, and a digest of the members of that generation, because a node
that was cut off may have counted the same number with other members.
"""

import hashlib
import json
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

from mmtrain.errors import ConfigError, shown

MOST_NODES = 4096
_MOST_RANKS = 1024
_MOST = 2**53
"""Largest whole number that every reader of JSON keeps exact."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_STORE = re.compile(r"tcp://[^\s/]{1,255}:[0-9]{1,5}|file:///[^\x00-\x1f]{0,1000}")
_DIGEST = re.compile(r"[a-z_]{1,30}=[^\s=]{1,100}( [a-z_]{1,30}=[^\s=]{1,100}){0,9}")
_MEMBERS = re.compile(r"[0-9a-f]{0,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What a node says of itself in a round."""

    name: str
    """The name of this start of the node's ranks, different at each start; the order of nodes follows it."""
    ranks: int
    """Number of its ranks, the same on all nodes of a job."""
    store: str
    """The store in which the ranks of a generation meet if this node is the first: `tcp://host:port`, or
    `file:///folder`."""
    digest: str
    """The digest of what all nodes must share, as `make_digest` writes it."""
    generation: int = 0
    """The last generation that it adopted; 0: none."""
    members: str = ""
    """Digest of the members of that generation, as `members_digest` makes it."""
    anew: bool = False
    """Whether it cannot continue in its generation."""
    step: int | None = None
    """Number of steps of the state that it holds; None: it holds none."""
    leaving: bool = False
    """Whether it was asked to end."""

    def __post_init__(self) -> None:
        """Raises: ConfigError: a value breaks a rule."""
        _check_values(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The nodes of a job from one change to the next."""

    generation: int
    """Number of this membership, at least 1; grows with each change."""
    nodes: tuple[Node, ...]
    """The nodes in the order of their names."""

    def __post_init__(self) -> None:
        """Raises: ConfigError: no generation or nodes, or these are not in the order of different names."""
        _check("membership", "generation", self.generation, _whole(1, _MOST), f"a whole number from 1 to {_MOST}")
        names = [node.name for node in self.nodes]
        if not 1 <= len(names) <= MOST_NODES or names != sorted(set(names)):
            raise ConfigError(
                f"membership: nodes = {shown(names)}; they are 1 to {MOST_NODES}, with different names in their order"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the nodes, in order."""
        return tuple(node.name for node in self.nodes)

    @property
    def num_ranks(self) -> int:
        """The ranks of all nodes, used or not."""
        return sum(node.ranks for node in self.nodes)

    def first_rank(self, name: str) -> int:
        """Rank of a node's local rank 0 among the ranks of all nodes."""
        return sum(node.ranks for node in self.nodes[: self.names.index(name)])

    def to_json(self) -> str:
        """A text that `from_json` reads."""
        return json.dumps({"generation": self.generation, "nodes": [asdict(node) for node in self.nodes]})

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> "Membership":
        """The value that `to_json` wrote. Args: where: for messages. Raises: ConfigError: it is something else."""
        values = read_object(text, where, {"generation", "nodes"})
        return cls(generation=values["generation"], nodes=nodes_of(values["nodes"], where))


# --------------------------------------------------------------------------------------------- the rule


def next_membership(asked: Sequence[Node]) -> Membership:
    """The membership after a round.

    Its generation is that of the nodes if all of them adopted this one, with these members that stay, and can go on in
    it; else the next one.

    Args: asked: what all nodes of the round said, in any order.
    Raises: ConfigError: see `admitted`.
    """
    nodes = admitted(asked)
    newest, members = max(node.generation for node in nodes), members_digest(nodes)
    unchanged = newest and all(
        node.generation == newest and node.members == members and not node.anew for node in nodes
    )
    return Membership(generation=newest if unchanged else newest + 1, nodes=nodes)


def admitted(asked: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes of a round that make a job, in the order of their names.

    A newcomer that does not fit to a running job is left out: the job goes on without it.

    Raises: ConfigError: two nodes have one name, or nodes that are not newcomers to a running job do not fit.
    """
    nodes = sorted(asked, key=lambda node: node.name)
    for one, other in pairwise(nodes):
        if one.name == other.name:
            raise ConfigError(
                f"two nodes have the name {one.name!r} (their ranks meet at {one.store} and {other.store}); each start "
                "of a node has a name of its own, so end one of them"
            )
    reference = min(nodes, key=lambda node: (-node.generation, node.name))
    unfit = {node.name: said for node in nodes if (said := _misfit(reference, node))}
    for node in nodes:
        if node.name in unfit and (node.generation or not reference.generation):
            raise ConfigError(unfit[node.name])
    return tuple(node for node in nodes if node.name not in unfit)


def check_admitted(name: str, asked: Sequence[Node]) -> None:
    """Raises: ConfigError: the node of this name was left out of a running job, with the reason."""
    if name not in {node.name for node in admitted(asked)}:
        reference = min(asked, key=lambda node: (-node.generation, node.name))
        reasons = [_misfit(reference, node) for node in asked if node.name == name]
        raise ConfigError(reasons[0] if reasons else f"node {name} is not part of its own round")


def _misfit(reference: Node, node: Node) -> str:
    """Why a node cannot be in one job with another one; empty if it can."""
    pair = f"nodes {reference.name} and {node.name} cannot be in one job"
    if node.ranks != reference.ranks:
        return (
            f"{pair}: they have {reference.ranks} and {node.ranks} ranks, but all nodes have the same number; start "
            "each with the same --nproc-per-node"
        )
    ours, theirs = reference.digest.split(" "), node.digest.split(" ")
    if ours != theirs:
        differ = [part for part in ours if part not in theirs], [part for part in theirs if part not in ours]
        return (
            f"{pair}: the first has {', '.join(differ[0]) or 'nothing'}, the second {', '.join(differ[1]) or 'nothing'}"
            "; start all nodes with the same version, config and data, and each job with a lighthouse of its own"
        )
    return ""


def members_digest(nodes: Sequence[Node]) -> str:
    """A short name of who stays in a membership, whether those that leave have left or not; of all, if none stays."""
    stay = [node for node in nodes if not node.leaving]
    members = sorted((node.name, node.leaving) for node in stay or nodes)
    return hashlib.sha256(json.dumps(members).encode()).hexdigest()[:16]


def make_digest(parts: Mapping[str, str]) -> str:
    """One word for each thing that all nodes must share: `name=text`, long texts as the start of their SHA-256.

    Args: parts: name, of lower-case letters and `_`, -> text.
    """

    def short(text: str) -> str:
        return text if re.fullmatch(r"[^\s=]{1,20}", text) else hashlib.sha256(text.encode()).hexdigest()[:16]

    return " ".join(f"{name}={short(text)}" for name, text in parts.items())


def new_name() -> str:
    """A name for one start of a node: its machine, and eight random bytes."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:60] or "node"
    return f"{host}-{os.urandom(8).hex()}"


# ------------------------------------------------------------------------------------------------- JSON


def node_of(values: object, where: str) -> Node:
    """The node whose fields an object of JSON has. Args: where: for messages. Raises: ConfigError."""
    checked = _object(values, where, {field.name for field in fields(Node)})
    try:
        return Node(**checked)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def nodes_of(values: object, where: str) -> tuple[Node, ...]:
    """The nodes of a list of JSON. Args: where: for messages. Raises: ConfigError."""
    if not isinstance(values, list) or not 1 <= len(values) <= MOST_NODES:
        raise ConfigError(f"{where}: nodes = {shown(values)}; it is a list of 1 to {MOST_NODES} nodes")
    return tuple(node_of(value, where) for value in values)


def read_object(text: str | bytes, where: str, keys: set[str]) -> dict[str, Any]:
    """The object in a text of JSON. Args: keys: those that it must have, and no others. Raises: ConfigError."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: {shown(text)} is no JSON") from None
    return _object(values, where, keys)


def _object(values: object, where: str, keys: set[str]) -> dict[str, Any]:
    if not isinstance(values, dict) or set(values) != keys:
        found = sorted(values) if isinstance(values, dict) else values
        raise ConfigError(f"{where}: {shown(found)}; it is an object with the keys {', '.join(sorted(keys))}")
    return values


def _check_values(node: Node) -> None:
    for name, (holds, rule) in _RULES.items():
        _check(f"node {shown(node.name)}", name, getattr(node, name), holds, rule)


def _check(where: str, name: str, value: object, holds: Callable[[object], bool], rule: str) -> None:
    if not holds(value):
        raise ConfigError(f"{where}: {name} = {shown(value)}; it is {rule}")


def _whole(least: int, most: int) -> Callable[[object], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _text(pattern: re.Pattern[str]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


_RULES: dict[str, tuple[Callable[[object], bool], str]] = {
    "name": (_text(_NAME), "1 to 100 letters, digits, dots, `-` and `_`"),
    "ranks": (_whole(1, _MOST_RANKS), f"a whole number from 1 to {_MOST_RANKS}"),
    "store": (_text(_STORE), "tcp://host:port or file:///folder"),
    "digest": (_text(_DIGEST), "1 to 10 words `name=text`"),
    "generation": (_whole(0, _MOST), f"a whole number from 0 to {_MOST}"),
    "members": (_text(_MEMBERS), "up to 64 hexadecimal digits"),
    "anew": (_is_bool, "true or false"),
    "step": (lambda value: value is None or _whole(0, _MOST)(value), f"null or a whole number from 0 to {_MOST}"),
    "leaving": (_is_bool, "true or false"),
}
"""Field of `Node` -> whether a value is allowed, and the rule in words."""
