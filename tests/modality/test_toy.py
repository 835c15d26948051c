"""A kind of content that mmtrain does not have: vectors of numbers that enter a language model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from mmtrain.errors import DataError
from mmtrain.modality.base import Modality, Units, Weigh, WorkItem, forward_rates
from mmtrain.modality.catalogue import MODALITIES
from mmtrain.modality.metadata import IterationMeta, MicrobatchMeta
from mmtrain.modality.submesh import Submesh
from mmtrain.planner.batching import Batching, check_conservation, make_batching
from mmtrain.planner.layout import IterationLayout
from mmtrain.spec.rows import share_of
from mmtrain.spec.spec import ModelSpec, ModuleSpec
from mmtrain.spec.work_size import WorkSize
from tests.planner.specs import microbatch, vlm


@dataclass(frozen=True)
class Vector:
    """One list of numbers of a sample."""

    sample: int
    length: int

    @property
    def name(self) -> str:
        return f"the vector of sample {self.sample}"


@dataclass(frozen=True, kw_only=True)
class WithVectors(MicrobatchMeta):
    vectors: tuple[Vector, ...] = ()


class Vectors(Modality):
    item, works, remedy = "vector", "vector", "the model reads no vectors"

    def units(self, microbatch: MicrobatchMeta) -> Units:
        return getattr(microbatch, "vectors", ())

    def size(self, module: ModuleSpec, units: Sequence[Vector]) -> WorkSize:
        return WorkSize(rows=sum(unit.length for unit in units), pairs=0, outputs=len(units))

    def weigh(self, module: ModuleSpec) -> Weigh:
        rates = forward_rates(module)
        return lambda unit: rates(self.size(module, [unit]))

    def unit_counts(self, units: Sequence[Vector]) -> dict[str, int]:
        return {"vectors": len(units)}

    def work_counts(self, size: WorkSize) -> dict[str, int]:
        return {"vectors": size.outputs}

    def layout(
        self, submesh: Submesh, module: ModuleSpec, works: dict[int, WorkItem], meta: IterationMeta
    ) -> "VectorsLayout":
        return VectorsLayout(submesh, works)


class VectorsLayout:
    def __init__(self, submesh: Submesh, works: dict[int, WorkItem]) -> None:
        self.submesh, self.works = submesh, works

    def local_size(self, work: int, cp_rank: int, tp_rank: int) -> WorkSize:
        return WorkSize(rows=share_of(self.works[work].size.rows, self.submesh.size), pairs=0, outputs=0)


@pytest.fixture
def batching(monkeypatch: pytest.MonkeyPatch) -> tuple[IterationMeta, Batching]:
    """Images and vectors into one language model; the second microbatch has vectors alone."""
    monkeypatch.setitem(MODALITIES, "vectors", lambda mask, module: Vectors())
    vision, language = vlm().modules
    gauge = ModuleSpec(name="gauge", consumes="vectors", layers=vision.layers)
    spec = ModelSpec(modules=(vision, gauge, replace(language, after=("vision", "gauge"))))
    texts = microbatch(0, [(4, 4)]), microbatch(1, [])
    vectors = (Vector(0, 8), Vector(0, 2), Vector(0, 2)), (Vector(1, 4),)
    meta = IterationMeta(
        microbatches=tuple(
            WithVectors(documents=m.documents, vectors=found) for m, found in zip(texts, vectors, strict=True)
        )
    )
    return meta, make_batching(meta, spec, 2)


def test_its_works_stand_before_the_work_that_they_enter(batching: tuple[IterationMeta, Batching]) -> None:
    meta, made = batching
    check_conservation(meta, made)
    works = [(made.module_of(w), item.size.rows, item.work.after) for w, item in enumerate(made.items)]
    text = [m.num_tokens for m in meta.microbatches]
    assert works == [
        ("vision", 16, ()), ("gauge", 8, ()), ("gauge", 4, ()), ("language", text[0], (0, 1, 2)),
        ("gauge", 4, ()), ("language", text[1], (4,)),
    ]  # fmt: skip


def test_a_vector_that_is_lost_is_named(batching: tuple[IterationMeta, Batching]) -> None:
    meta, made = batching
    items = list(made.items)
    items[4] = replace(items[4], units=())
    with pytest.raises(DataError, match="the vector of sample 1 occurs 1 times in the batch, but 0 times in its"):
        check_conservation(meta, replace(made, items=tuple(items)))


def test_ranks_divide_it_as_it_says(batching: tuple[IterationMeta, Batching]) -> None:
    meta, made = batching
    assert IterationLayout(Submesh(tp=2), made, meta).local_size(1, 0, 0).rows == 4


def test_a_model_without_it_refuses_it(batching: tuple[IterationMeta, Batching]) -> None:
    meta, _ = batching
    with pytest.raises(DataError, match=r"microbatch 0 has 3 vectors, .* but the model reads no vectors"):
        make_batching(meta, vlm())
