"""The works of one iteration: which images, documents and clips run together, computed from the metadata alone.

Source: DIP, arXiv:2504.14145, section 4: N images of a microbatch become ceil(N / B) sub-microbatches.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NoReturn

from mmtrain.errors import DataError
from mmtrain.modality.base import Modality, Units, WorkItem
from mmtrain.modality.bitfield import LanguageMask
from mmtrain.modality.catalogue import MODALITIES, modalities
from mmtrain.modality.metadata import IterationMeta, MicrobatchMeta, check_deferral
from mmtrain.modality.submesh import Submesh
from mmtrain.schedule.graph import Work
from mmtrain.spec.spec import ModelSpec, ModuleSpec
from mmtrain.spec.work_size import WorkSize

SubMicrobatch = int | Mapping[str, int]
"""Images or clips in one work, of all modules or by their names; 0 or absent: all of a microbatch."""


@dataclass(frozen=True, kw_only=True)
class Batching:
    """The works of one iteration, and the units (images, documents, clips) that each of them processes."""

    spec: ModelSpec
    """The model, whose modules `Work.module` indexes."""
    items: tuple[WorkItem, ...]
    attention_mask: LanguageMask = "causal"
    not_deferred: tuple[int, ...] = ()
    """The microbatches whose deferral was given up, as the pair did not fit into the memory limits."""

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules."""
        return tuple(module.name for module in self.spec.modules)

    @cached_property
    def works(self) -> tuple[Work, ...]:
        """All works."""
        return tuple(item.work for item in self.items)

    @cached_property
    def sizes(self) -> tuple[WorkSize, ...]:
        """[work] -> rows, attended pairs and output rows."""
        return tuple(item.size for item in self.items)

    def priced_sizes(self, submesh: Submesh) -> tuple[WorkSize, ...]:
        """[work] -> the size by which it is priced: of a work that gives each rank of a submesh the counts of the most
        loaded one."""
        modules = [self.spec.module(name) for name in self.modules]
        return tuple(
            self.kinds[module.name].priced_size(submesh, module, item)
            for item in self.items
            for module in (modules[item.work.module],)
        )

    @cached_property
    def kinds(self) -> dict[str, Modality]:
        """Name of a module -> the kind of content that it consumes."""
        return modalities(self.spec, self.attention_mask)

    def module_of(self, work: int) -> str:
        """The name of the module of a work."""
        return self.modules[self.items[work].work.module]


def make_batching(
    meta: IterationMeta,
    spec: ModelSpec,
    sub_microbatch_size: SubMicrobatch = 0,
    attention_mask: LanguageMask = "causal",
) -> Batching:
    """The works of an iteration, ordered by microbatch, then by module, then by sub-microbatch.

    The N images or clips of a microbatch become ceil(N / sub_microbatch_size) works of consecutive units; the split
    minimises the FLOPs of the largest work. The documents of a microbatch are one work. A work comes `after` the works
    of the modules that feed its module: after all of them with units of its microbatch, or, if both modules consume the
    same units, after the one work with the same units. A work of several microbatches (`ModuleSpec.microbatches`) has
    all of their units, comes after all of their works, and belongs to the last of them.

    Images of deferred documents have works of their own, which are sub-microbatches of the microbatch before and come
    after its own images; so neither the forward nor the backward of those waits for the other microbatch.

    Args:
        meta: the counts of the batch.
        spec: the model.
        sub_microbatch_size: images or clips in one work, of all modules or by their names; 0: all of the microbatch.
        attention_mask: mask of the language model; it determines the number of attended pairs.
    Raises: DataError: a microbatch lacks a required unit, or has a unit that no module consumes; an image that the
        model cannot merge, or that lies outside of its document; documents are deferred that cannot be.
    Source: DIP, arXiv:2504.14145, section 4.
    """
    check_deferral(meta)
    kinds = modalities(spec, attention_mask)
    # Modules that consume the same units get the same groups: those that balance the last of these modules.
    weights = {
        kinds[module.name].item: (
            kinds[module.name],
            kinds[module.name].weigh(module),
            _size_of(sub_microbatch_size, module),
        )
        for module in spec.modules
    }
    items: list[WorkItem] = []
    numbers: dict[tuple[int, str], list[int]] = {}  # (owner, module) -> works
    for index, (microbatch, behind) in enumerate(pairwise((*meta.microbatches, MicrobatchMeta()))):
        _check_content(index, microbatch, kinds)
        groups = {
            item: [
                (deferred, group)
                for deferred, units in enumerate((_kept(kind, microbatch), kind.deferred(behind)))
                for group in kind.split(units, size, weigh)
            ]
            for item, (kind, weigh, size) in weights.items()
        }
        for module_index, module in enumerate(spec.modules):
            kind, together = kinds[module.name], _together(module, index, len(meta.microbatches))
            own = groups[kind.item]
            if len(together) != 1:
                own = [(0, _units(kind, meta, together))] if together else []
            for sub, (deferred, units) in enumerate(own):
                of_owner = numbers.setdefault((index + deferred, module.name), [])
                owners = [owner + deferred for owner in together]
                feeds = {
                    name: (kinds[name], [w for owner in owners for w in numbers.get((owner, name), [])])
                    for name in module.after
                }
                after = _feeding(len(of_owner), kind, feeds)
                of_owner.append(len(items))
                work = Work(module=module_index, microbatch=index, sub_microbatch=sub, after=after)
                size = kind.size(module, units)
                items.append(WorkItem(work=work, units=units, size=size, deferred=bool(deferred)))
    return Batching(spec=spec, items=tuple(items), attention_mask=attention_mask)


def _together(module: ModuleSpec, index: int, num_microbatches: int) -> range:
    """The microbatches whose content the works of a microbatch have in a module; empty: it has no work there."""
    size = module.microbatches or num_microbatches
    first, end = index // size * size, index + 1
    return range(first, end) if end % size == 0 or end == num_microbatches else range(0)


def _units(kind: Modality, meta: IterationMeta, microbatches: Iterable[int]) -> Units:
    """The units of some microbatches."""
    return tuple(unit for index in microbatches for unit in kind.units(meta.microbatches[index]))


def _kept(kind: Modality, microbatch: MicrobatchMeta) -> Units:
    """The units that a module consumes with their own microbatch."""
    return kind.units(microbatch)[len(kind.deferred(microbatch)) :]


def _size_of(sizes: SubMicrobatch, module: ModuleSpec) -> int:
    return sizes if isinstance(sizes, int) else sizes.get(module.name, 0)


def _feeding(sub: int, kind: Modality, feeds: Mapping[str, tuple[Modality, list[int]]]) -> tuple[int, ...]:
    """The works that a work comes after. Args: sub: its index among those of its module and owner. feeds: module -> its
    kind of content, its works of that owner."""
    feeding: list[int] = []
    for source, works in feeds.values():
        feeding += works[sub : sub + 1] if source.item == kind.item else works
    return tuple(feeding)


def _check_content(index: int, microbatch: MicrobatchMeta, kinds: Mapping[str, Modality]) -> None:
    """Checks that each unit of a microbatch is consumed, and that it has the units that modules require."""
    taken = {id(unit) for kind in kinds.values() for unit in kind.units(microbatch)}
    for kind in (make("causal", "") for make in MODALITIES.values()):
        left = [unit for unit in kind.units(microbatch) if id(unit) not in taken]
        if left:
            raise DataError(
                f"microbatch {index} has {len(left)} {kind.item}s, the first {left[0].name}, but {kind.remedy}"
            )
    for kind in kinds.values():
        if kind.required and not kind.units(microbatch):
            raise DataError(f"microbatch {index} has no {kind.item}; every microbatch needs one")


def check_conservation(meta: IterationMeta, batching: Batching) -> None:
    """Checks that the works use each unit exactly once, in order, with the right numbers of tokens and targets.

    Raises: DataError: a unit is lost, doubled or reordered, or a count differs; names the microbatch and the unit.
    """
    kinds = batching.kinds
    numbers: dict[tuple[int, str], list[int]] = {}
    for w, item in enumerate(batching.items):
        numbers.setdefault((item.owner, batching.module_of(w)), []).append(w)
    unknown = [index for index, _ in numbers if not 0 <= index < len(meta.microbatches)]
    if unknown:
        raise DataError(
            f"a work belongs to microbatch {unknown[0]}, but the batch has {len(meta.microbatches)} of them; remove it"
        )
    for index, microbatch in enumerate(meta.microbatches):
        for module in batching.spec.modules:
            kind, works = kinds[module.name], numbers.get((index, module.name), [])
            used = tuple(unit for w in works for unit in batching.items[w].units)
            together = _together(module, index, len(meta.microbatches))
            owned = _units(kind, meta, together)
            if owned != used:
                _refuse(index, kind, owned, used)
            early = tuple(unit for w in works if batching.items[w].deferred for unit in batching.items[w].units)
            if early != (kind.deferred(microbatch) if together else ()):
                raise DataError(
                    f"microbatch {index} defers {len(kind.deferred(microbatch))} {kind.item}s, but {len(early)} of its "
                    f"{kind.item}s are in {kind.works} works of the microbatch before; put exactly the deferred ones "
                    "there"
                )
            processed: Counter[str] = Counter()
            for w in works:
                processed.update(kind.work_counts(batching.items[w].size))
            for what, count in kind.unit_counts(owned).items():
                if processed[what] != count:
                    raise DataError(
                        f"microbatch {index} has {count} {what}, but its {kind.works} works process {processed[what]}; "
                        "each must be processed exactly once"
                    )
            feeds = {
                name: (kinds[name], [w for owner in together for w in numbers.get((owner, name), [])])
                for name in module.after
            }
            for sub, w in enumerate(works):
                feeding = _feeding(sub, kind, feeds)
                if batching.items[w].work.after != feeding:
                    sources = " and ".join(_called(batching, source) for source in feeding) or "none"
                    raise DataError(
                        f"microbatch {index}: {_called(batching, w)} comes after works {batching.items[w].work.after}, "
                        f"but what it reads comes from {sources}"
                    )


def _called(batching: Batching, work: int) -> str:
    """The name of a work in error messages."""
    kind = batching.kinds[batching.module_of(work)]
    return f"the {kind.works} work of {batching.items[work].units[0].name}"


def _refuse(index: int, kind: Modality, owned: Units, used: Units) -> NoReturn:
    """Raises the first difference between the units of a microbatch and the units of its works for a module."""
    owned_counts, used_counts = Counter(owned), Counter(used)
    for unit in (*owned, *used):
        if owned_counts[unit] != used_counts[unit]:
            raise DataError(
                f"microbatch {index}: {unit.name} occurs {owned_counts[unit]} times in the batch, but "
                f"{used_counts[unit]} times in its {kind.works} works; each {kind.item} must be used exactly once"
            )
    expected, unit = next((a, b) for a, b in zip(owned, used, strict=True) if a != b)
    raise DataError(f"microbatch {index}: {unit.name} is at the position of {expected.name}; keep their order")
