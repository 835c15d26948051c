"""Packed documents, as a language model consumes them."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mmtrain.modality.base import Layout, Modality, Units, Weigh, WorkItem, first_of
from mmtrain.modality.bitfield import Bits, LanguageMask, extra_pairs, language_bits
from mmtrain.modality.metadata import DocumentMeta, IterationMeta, MicrobatchMeta
from mmtrain.modality.submesh import Indices, Submesh, pad_indices
from mmtrain.modality.token_split import split_tokens
from mmtrain.spec.rows import share_of
from mmtrain.spec.spec import ModuleSpec, documents_work
from mmtrain.spec.work_size import WorkSize


@dataclass(frozen=True)
class Texts(Modality):
    """The documents of a microbatch, as a tower reads them that makes an embedding of each."""

    item, works = "text", "language"
    remedy = "the model reads clips alone"
    required = True
    counts: ClassVar[Mapping[str, str]] = {"tokens": "rows", "targets": "outputs"}

    attention_mask: LanguageMask = "causal"
    """Mask of the language model, which determines the number of attended pairs."""

    def units(self, microbatch: MicrobatchMeta) -> Units:
        """All documents of a microbatch."""
        return microbatch.documents

    def size(self, module: ModuleSpec, units: Sequence[DocumentMeta]) -> WorkSize:
        """Tokens, attended pairs, and labelled positions."""
        lengths = [document.num_tokens for document in units]
        targets = sum(document.num_targets for document in units)
        return documents_work(lengths, targets, sum(extra_pairs(document, self.attention_mask) for document in units))

    def weigh(self, module: ModuleSpec) -> Weigh:
        """The number of tokens."""
        return lambda document: float(document.num_tokens)

    def unit_counts(self, units: Sequence[DocumentMeta]) -> dict[str, int]:
        """Tokens and labelled positions."""
        return {"tokens": sum(d.num_tokens for d in units), "targets": sum(d.num_targets for d in units)}

    def layout(self, submesh: Submesh, module: ModuleSpec, works: dict[int, WorkItem], meta: IterationMeta) -> Layout:
        """The layout of one rank."""
        return TextsLayout(submesh, works)


class Documents(Texts):
    """The documents of a microbatch, which form one packed sequence."""

    item = "document"

    def split(self, units: Units, size: int, weigh: Weigh) -> list[Units]:
        """One group."""
        return [units] if units else []

    def layout(self, submesh: Submesh, module: ModuleSpec, works: dict[int, WorkItem], meta: IterationMeta) -> Layout:
        """The division of tokens over the cp ranks, and between blocks of a cp rank's rows over its tp ranks."""
        return DocumentsLayout(submesh, works, meta)


class TokenIds(Documents):
    """The tokens of a microbatch, as a part of an embedding that stands for itself looks them up."""

    works = "embedding"


class Labels(Documents):
    """The labelled positions of a microbatch, as a part of a head, or the loss behind it, consumes them."""

    works = "head"

    def readers(self, module: ModuleSpec) -> tuple[int, ...]:
        """No stages: every rank has the labels."""
        return ()


class Pairs(Documents):
    """The pairs of an image and a caption, as the loss behind two towers tells them apart."""

    item, works = "pair", "contrast"
    counts: ClassVar[Mapping[str, str]] = {"pairs": "outputs"}

    def size(self, module: ModuleSpec, units: Sequence[DocumentMeta]) -> WorkSize:
        """Embeddings, which are two of each pair; combinations of an image and a caption; pairs."""
        number = sum(document.num_targets for document in units)
        return WorkSize(rows=2 * number, pairs=number * number, outputs=number)

    def unit_counts(self, units: Sequence[DocumentMeta]) -> dict[str, int]:
        """Pairs: documents with a label, which those of a blank microbatch do not have."""
        return {"pairs": sum(document.num_targets for document in units)}

    def readers(self, module: ModuleSpec) -> tuple[int, ...]:
        """No stages: it reads embeddings alone."""
        return ()


class TextsLayout:
    """The works of a tower that reads texts, on one rank."""

    def __init__(self, submesh: Submesh, works: dict[int, WorkItem]) -> None:
        self.submesh, self.works = submesh, works
        self._first = first_of(works, lambda units: sum(document.num_tokens for document in units))

    def local_size(self, work: int, cp_rank: int, tp_rank: int) -> WorkSize:
        """Tokens and labelled positions of a work."""
        return self.works[work].size

    def tokens(self, work: int) -> slice:
        """The tokens of a work among those of its microbatch."""
        first = self._first[work]
        return slice(first, first + self.works[work].size.rows)


class DocumentsLayout:
    """The division of the works that read documents. With several cp ranks it is computed in the constructor."""

    def __init__(self, submesh: Submesh, works: dict[int, WorkItem], meta: IterationMeta) -> None:
        self.submesh = submesh
        self.works = works
        self._meta = meta
        self._tokens: dict[int, tuple[Indices, ...]] = {}
        self._bits: dict[int, Bits] = {}
        self._labelled: Sequence[Indices] = ()
        for item in works.values() if submesh.cp > 1 else ():
            self.tokens(item.work.microbatch)

    def local_size(self, work: int, cp_rank: int, tp_rank: int) -> WorkSize:
        """The size of one rank's rows between two stages, padding included, and its labelled positions.

        Several cp ranks need `with_labelled` for these; without it they are 0.
        """
        microbatch = self.works[work].work.microbatch
        count = len(self.tokens(microbatch)[cp_rank])
        if self.submesh.cp == 1:
            outputs = sum(document.num_targets for document in self._meta.microbatches[microbatch].documents)
        else:
            outputs = len(self.labelled(microbatch, cp_rank)) if self._labelled else 0
        return WorkSize(rows=share_of(count, self.submesh.row_parts), pairs=0, outputs=outputs)

    def bits(self, microbatch: int) -> Bits:
        """[T] int64: mask words of a microbatch of the language model."""
        if microbatch not in self._bits:
            counts = self._meta.microbatches[microbatch]
            self._bits[microbatch] = language_bits(counts, self.submesh.attention_mask)
        return self._bits[microbatch]

    def tokens(self, microbatch: int) -> tuple[Indices, ...]:
        """[cp rank] -> int64 indices of its tokens, ascending, without padding."""
        if microbatch not in self._tokens:
            submesh = self.submesh
            if submesh.cp == 1:
                split: tuple[Indices, ...] = (np.arange(self._meta.microbatches[microbatch].num_tokens),)
            else:
                split = split_tokens(self.bits(microbatch), submesh.cp, submesh.split, submesh.block_size)
            self._tokens[microbatch] = split
        return self._tokens[microbatch]

    def places(self, microbatch: int, cp_rank: int) -> Indices:
        """[padded tokens] int64: indices of the tokens of a cp rank, then -1 up to a multiple of `row_parts`."""
        return pad_indices(self.tokens(microbatch)[cp_rank], self.submesh.row_parts)

    def with_labelled(self, labelled: Sequence[Indices]) -> "DocumentsLayout":
        """This division, and where the labels are. Args: labelled: ascending indices of the labelled tokens of each
        microbatch."""
        known = copy(self)
        known._labelled = labelled
        return known

    def labelled(self, microbatch: int, cp_rank: int) -> Indices:
        """[labels] int64: where in `places` of a cp rank the labelled tokens of a microbatch are, ascending."""
        own = self.tokens(microbatch)[cp_rank]
        return np.flatnonzero(np.isin(own, self._labelled[microbatch], assume_unique=True))
