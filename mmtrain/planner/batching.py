"""The works of one iteration: which images, documents and clips run together, from the metadata alone.

Source: DIP, arXiv:2504.14145, section 4: N images of a microbatch become ceil(N / B) sub-microbatches.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

from mmtrain.errors import DataError
from mmtrain.modality.base import Modality, Units, WorkItem
from mmtrain.modality.bitfield import LanguageMask
from mmtrain.modality.catalogue import MODALITIES, modalities
from mmtrain.modality.metadata import IterationMeta, MicrobatchMeta
from mmtrain.schedule.graph import Work
from mmtrain.spec.spec import ModelSpec, WorkSize


@dataclass(frozen=True, kw_only=True)
class Batching:
    """The works of one iteration, with what each of them processes."""

    spec: ModelSpec
    """The model, whose modules `Work.module` indexes."""
    items: tuple[WorkItem, ...]
    attention_mask: LanguageMask = "causal"

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

    @cached_property
    def kinds(self) -> dict[str, Modality]:
        """Name of a module -> what it consumes."""
        return modalities(self.spec, self.attention_mask)

    def module_of(self, work: int) -> str:
        """The name of the module of a work."""
        return self.modules[self.items[work].work.module]


def make_batching(
    meta: IterationMeta, spec: ModelSpec, sub_microbatch_size: int = 0, attention_mask: LanguageMask = "causal"
) -> Batching:
    """The works of an iteration: of each microbatch those of each module, in the order of the modules.

    N images or clips of a microbatch are ceil(N / sub_microbatch_size) works of consecutive ones, the largest with as
    few FLOPs as possible; its documents are one. A work comes `after` those of the modules that feed its own: after
    all of the microbatch, or, where both consume the same units, after the one that has the same.

    Args:
        spec: the model.
        sub_microbatch_size: images or clips in one work; 0: all of the microbatch.
        attention_mask: of the language model; it decides how many pairs are attended.
    Raises: DataError: a microbatch has nothing that it must have, or something that no module consumes; an image that
        the model cannot merge or that lies outside of its document.
    """
    kinds = modalities(spec, attention_mask)
    # Modules that consume the same units are given the same groups, as the last of them is best divided.
    weights = {
        kinds[module.name].item: (kinds[module.name], kinds[module.name].weigh(module)) for module in spec.modules
    }
    items: list[WorkItem] = []
    for index, microbatch in enumerate(meta.microbatches):
        _check_content(index, microbatch, kinds)
        groups = {
            item: kind.split(kind.units(microbatch), sub_microbatch_size, w) for item, (kind, w) in weights.items()
        }
        numbers: dict[str, list[int]] = {}
        for place, module in enumerate(spec.modules):
            kind = kinds[module.name]
            first = len(items)
            for sub, units in enumerate(groups[kind.item]):
                after = _feeding(sub, kind, {name: (kinds[name], numbers[name]) for name in module.after})
                work = Work(module=place, microbatch=index, sub_microbatch=sub, after=after)
                items.append(WorkItem(work=work, units=units, size=kind.size(module, units)))
            numbers[module.name] = list(range(first, len(items)))
    return Batching(spec=spec, items=tuple(items), attention_mask=attention_mask)


def _feeding(sub: int, kind: Modality, feeds: Mapping[str, tuple[Modality, list[int]]]) -> tuple[int, ...]:
    """The works that a work comes after. Args: feeds: module -> what it consumes, its works of the microbatch."""
    found: list[int] = []
    for other, works in feeds.values():
        found += works[sub : sub + 1] if other.item == kind.item else works
    return tuple(found)


def _check_content(index: int, microbatch: MicrobatchMeta, kinds: Mapping[str, Modality]) -> None:
    """Refuses a microbatch with units that nobody consumes, or without some that it must have."""
    consumed = {kind.item: kind for kind in kinds.values()}
    for kind in (make("causal") for make in MODALITIES.values()):
        units = kind.units(microbatch)
        if units and kind.item not in consumed:
            raise DataError(
                f"microbatch {index} has {len(units)} {kind.item}s, the first {units[0].name}, but {kind.remedy}"
            )
    for kind in consumed.values():
        if kind.required and not kind.units(microbatch):
            raise DataError(f"microbatch {index} has no {kind.item}; every microbatch needs one")


def check_conservation(meta: IterationMeta, batching: Batching) -> None:
    """Refuses works that lose, double or reorder a unit, or change the number of tokens or targets.

    Raises: DataError: with the microbatch and the unit or the counts.
    """
    kinds = batching.kinds
    numbers: dict[tuple[int, str], list[int]] = {}
    for w, item in enumerate(batching.items):
        numbers.setdefault((item.work.microbatch, batching.module_of(w)), []).append(w)
    unknown = [index for index, _ in numbers if not 0 <= index < len(meta.microbatches)]
    if unknown:
        raise DataError(
            f"a work belongs to microbatch {unknown[0]}, but the batch has {len(meta.microbatches)} of them; drop it"
        )
    for index, microbatch in enumerate(meta.microbatches):
        for module in batching.spec.modules:
            kind, works = kinds[module.name], numbers.get((index, module.name), [])
            found = tuple(unit for w in works for unit in batching.items[w].units)
            wanted = kind.units(microbatch)
            if wanted != found:
                _refuse(index, kind, wanted, found)
            paid: Counter[str] = Counter()
            for w in works:
                paid.update(kind.paid(batching.items[w].size))
            for what, count in kind.owed(wanted).items():
                if paid[what] != count:
                    raise DataError(
                        f"microbatch {index} has {count} {what}, but its {kind.works} works process {paid[what]}; each "
                        "must be processed exactly once"
                    )
            feeds = {name: (kinds[name], numbers.get((index, name), [])) for name in module.after}
            for sub, w in enumerate(works):
                after = _feeding(sub, kind, feeds)
                if batching.items[w].work.after != after:
                    sources = " and ".join(_called(batching, other) for other in after) or "none"
                    raise DataError(
                        f"microbatch {index}: {_called(batching, w)} comes after works {batching.items[w].work.after}, "
                        f"but what it reads comes from {sources}"
                    )


def _called(batching: Batching, work: int) -> str:
    """How errors call a work."""
    kind = batching.kinds[batching.module_of(work)]
    return f"the {kind.works} work of {batching.items[work].units[0].name}"


def _refuse(index: int, kind: Modality, wanted: Units, found: Units) -> NoReturn:
    """Says what differs between the units of a microbatch and those of its works for a module."""
    wanted_times, found_times = Counter(wanted), Counter(found)
    for one in (*wanted, *found):
        if wanted_times[one] != found_times[one]:
            raise DataError(
                f"microbatch {index}: {one.name} stands {wanted_times[one]} times in the batch, but in "
                f"{found_times[one]} places of its {kind.works} works; each {kind.item} must be used exactly once"
            )
    expected, one = next((a, b) for a, b in zip(wanted, found, strict=True) if a != b)
    raise DataError(f"microbatch {index}: {one.name} stands where {expected.name} belongs; keep their order")
