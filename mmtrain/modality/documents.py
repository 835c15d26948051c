"""Packed documents, as a language model consumes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mmtrain.modality.base import Modality, Units, Weigh, WorkItem
from mmtrain.modality.bitfield import Bits, LanguageMask, extra_pairs, language_bits
from mmtrain.modality.metadata import DocumentMeta, IterationMeta, MicrobatchMeta
from mmtrain.modality.submesh import Indices, Submesh, pad_indices
from mmtrain.modality.token_split import split_tokens
from mmtrain.spec.rows import share_of
from mmtrain.spec.spec import ModuleSpec, documents_work
from mmtrain.spec.work_size import WorkSize


@dataclass(frozen=True)
class Documents(Modality):
    """The documents of a microbatch, which form one packed sequence."""

    item, works = "document", "language"
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
        """The number of tokens; it is not used, as a sequence is not split."""
        return lambda document: float(document.num_tokens)

    def split(self, units: Units, size: int, weigh: Weigh) -> list[Units]:
        """One group."""
        return [units] if units else []

    def owed(self, units: Sequence[DocumentMeta]) -> dict[str, int]:
        """Tokens and labelled positions."""
        return {"tokens": sum(d.num_tokens for d in units), "targets": sum(d.num_targets for d in units)}

    def layout(
        self, submesh: Submesh, module: ModuleSpec, works: dict[int, WorkItem], meta: IterationMeta
    ) -> "DocumentsLayout":
        """The division of tokens over the cp ranks, and between blocks of a cp rank's rows over its tp ranks."""
        return DocumentsLayout(submesh, works, meta)


class DocumentsLayout:
    """The division of a language model's works. With several cp ranks it is computed in the constructor."""

    def __init__(self, submesh: Submesh, works: dict[int, WorkItem], meta: IterationMeta) -> None:
        self.submesh = submesh
        self.works = works
        self._meta = meta
        self._tokens: dict[int, tuple[Indices, ...]] = {}
        self._bits: dict[int, Bits] = {}
        for item in works.values() if submesh.cp > 1 else ():
            self.tokens(item.work.microbatch)

    def local_size(self, work: int, cp_rank: int, tp_rank: int) -> WorkSize:
        """The size of one rank's rows between two stages, padding included."""
        count = len(self.tokens(self.works[work].work.microbatch)[cp_rank])
        return WorkSize(rows=share_of(count, self.submesh.row_parts), pairs=0, outputs=0)

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
