"""The comparison of what the ranks of a job start from, over the store of their rendezvous, before anything is built.

A rank gives a digest of each subject. Values are exchanged only of a subject that differs, by one rank of each kind.
"""

import hashlib
import json
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from mmtrain.errors import ConfigError, one_line
from mmtrain.launch.launched import Launched

_MOST_KEYS = 3
"""Keys that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Values that ranks must have alike."""

    name: str
    values: Mapping[str, str]
    remedy: str
    """What to change where they differ, as the end of a sentence."""
    partial: bool = False
    """A rank may lack some of them."""

    @property
    def digest(self) -> str:
        """The digest of all its values."""
        return hashlib.sha256(json.dumps(self.values, sort_keys=True).encode()).hexdigest()[:24]


def check_alike(store: dist.Store, launched: Launched, subjects: Sequence[Subject]) -> None:
    """Refuses a job whose ranks differ in a subject; a rank may lack whole subjects. Collective over the job.

    Args: store: of this start of the job (`meet`).
    Raises: ConfigError: the same on all ranks, with the keys that differ, their values and ranks.
    """
    store, rank = dist.PrefixStore("alike", store), launched.rank
    digests = {subject.name: subject.digest for subject in subjects}
    store.set(f"digests {rank}", json.dumps([socket.gethostname(), digests]))
    if rank == 0:
        hosts, of_ranks = zip(*(json.loads(store.get(f"digests {r}")) for r in range(launched.world_size)), strict=True)
        store.set("kinds", json.dumps(_kinds(of_ranks)))
    kinds: dict[str, list[list[int]]] = json.loads(store.get("kinds"))
    for subject in subjects:
        if any(rank == ranks[0] for ranks in kinds.get(subject.name, ())):
            values = [subject.remedy, subject.partial, dict(subject.values)]
            store.set(f"{subject.name} of {rank}", json.dumps(values))
    if not kinds:
        return
    if rank == 0:
        store.set("difference", _difference(store, kinds, hosts))
    if difference := store.get("difference").decode():
        raise ConfigError(f"the processes of this job differ in {difference}")


def _kinds(digests: Iterable[Mapping[str, str]]) -> dict[str, list[list[int]]]:
    """Subject -> ranks of each digest, where there are several. Args: digests: of each rank, by subject."""
    kinds: dict[str, dict[str, list[int]]] = {}
    for rank, of_rank in enumerate(digests):
        for name, digest in of_rank.items():
            kinds.setdefault(name, {}).setdefault(digest, []).append(rank)
    return {name: list(groups.values()) for name, groups in kinds.items() if len(groups) > 1}


def _difference(store: dist.Store, kinds: Mapping[str, Sequence[Sequence[int]]], hosts: Sequence[str]) -> str:
    """What to tell the user: the keys of the first subject that differs, and names of the others; empty: none."""
    found: dict[str, str] = {}
    for name, groups in kinds.items():
        given = [json.loads(store.get(f"{name} of {ranks[0]}")) for ranks in groups]
        remedy, partial, _ = given[0]
        where = [describe_ranks(ranks, hosts) for ranks in groups]
        if text := _keys([values for *_, values in given], where, partial=partial):
            found[name] = f"{text}; {remedy}"
    if not found:
        return ""
    first, *others = found
    more = f" (they also differ in {', '.join(others)})" if others else ""
    return f"{first}: {found[first]}{more}"


def _keys(given: Sequence[Mapping[str, str]], where: Sequence[str], *, partial: bool) -> str:
    """The keys that differ, with their values and ranks. Args: given, where: of each kind of rank."""
    differences = []
    for key in dict.fromkeys(key for values in given for key in values):
        by_value: dict[str | None, list[str]] = {}
        for values, ranks in zip(given, where, strict=True):
            if key in values or not partial:
                by_value.setdefault(values.get(key), []).append(ranks)
        if len(by_value) > 1:
            parts = [f"{_value(value)} on {' and '.join(ranks)}" for value, ranks in by_value.items()]
            differences.append(f"{key} = {', but '.join(parts)}")
    more = [f"{len(differences) - _MOST_KEYS} more"] if len(differences) > _MOST_KEYS else []
    return "; ".join([*differences[:_MOST_KEYS], *more])


def _value(value: str | None) -> str:
    return "nothing" if value is None else one_line(value, 100) if value else '""'


def describe_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Ranks, in order, and the hosts that they are on. Args: hosts: of all ranks."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    shown = [f"{first}" if first == last else f"{first}-{last}" for first, last in spans]
    return f"rank{'s' if len(ranks) > 1 else ''} {_some(shown)} ({_some(list(dict.fromkeys(hosts[r] for r in ranks)))})"


def _some(words: Sequence[str]) -> str:
    return ", ".join([*words[:4], *(["..."] if len(words) > 4 else [])])
