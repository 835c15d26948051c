"""Video clips with captions, as the three modules of a text-to-video model consume them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import ClassVar

from mmtrain.errors import PlanError
from mmtrain.modality.base import Modality, Units, Weigh, WorkItem, forward_rates
from mmtrain.modality.metadata import ClipMeta, IterationMeta, MicrobatchMeta
from mmtrain.modality.submesh import Submesh
from mmtrain.spec.layer import Division
from mmtrain.spec.rows import share_of
from mmtrain.spec.spec import ModuleSpec, clips_work, documents_work, frames_work
from mmtrain.spec.work_size import WorkSize


class Clips(Modality):
    """The common base of the three modules' content: a clip is one unit of each of them."""

    item = "clip"
    remedy = "the model has no diffusion transformer; add [model.dit]"
    required = True

    def units(self, microbatch: MicrobatchMeta) -> Units:
        """All clips of a microbatch."""
        return microbatch.clips

    def weigh(self, module: ModuleSpec) -> Weigh:
        """The FLOPs of a clip, from the tokens of its latents and caption."""
        rates = forward_rates(module)
        of_tokens = cache(lambda tokens, texts: rates(clips_work([tokens], [texts], tokens)))
        return lambda clip: of_tokens(clip.num_tokens, clip.num_text_tokens)

    def layout(
        self, submesh: Submesh, module: ModuleSpec, works: dict[int, WorkItem], meta: IterationMeta
    ) -> "ClipsLayout":
        """The division of rows over the tp ranks; cp ranks do not divide clips yet."""
        return ClipsLayout(self, submesh, works)

    def of_rank(self, item: WorkItem, parts: int) -> WorkSize:
        """The size of a work's rows and outputs between two stages on each of the ranks that divide them."""
        return WorkSize(rows=share_of(item.size.rows, parts), pairs=0, outputs=0)


class ClipsLayout:
    """The division of the works of a text-to-video model's module."""

    def __init__(self, kind: Clips, submesh: Submesh, works: dict[int, WorkItem]) -> None:
        self._kind, self.submesh, self.works = kind, submesh, works

    def local_size(self, work: int, cp_rank: int, tp_rank: int) -> WorkSize:
        """The size of one rank's rows and outputs between two stages, padding included.

        Raises: PlanError: there are several cp ranks, which do not divide clips yet.
        """
        if self.submesh.cp > 1:
            raise PlanError(
                f"a stage's submesh has {self.submesh.cp} context-parallel ranks, but these do not divide the works of "
                "a text-to-video model yet; set parallelism.context_parallel_degree = 1"
            )
        item = self.works[work]
        return item.size if self.submesh.row_parts == 1 else self._kind.of_rank(item, self.submesh.row_parts)


class Latents(Clips):
    """The noisy latents of clips, which a diffusion transformer denoises."""

    works = "DiT"
    counts: ClassVar[Mapping[str, str]] = {
        "latent tokens": "rows",
        "targets": "outputs",
        "caption tokens": "texts",
        "clips": "clips",
    }

    def size(self, module: ModuleSpec, units: Sequence[ClipMeta]) -> WorkSize:
        """Latent tokens, pairs among them, pairs with caption tokens, and latent tokens with a loss."""
        tokens, texts = [clip.num_tokens for clip in units], [clip.num_text_tokens for clip in units]
        buckets = [clip.bucket for clip in units]
        return clips_work(tokens, texts, sum(clip.num_targets for clip in units), buckets)

    def readers(self, module: ModuleSpec) -> tuple[int, ...]:
        """The first stage, which adds noise, and the last, for targets; none if another module makes the latents."""
        return () if module.latents_arrive else (0, -1)

    def of_rank(self, item: WorkItem, parts: int) -> WorkSize:
        """The divided rows of each clip, with all text tokens."""
        rows = sum(share_of(clip.num_tokens, parts) for clip in item.units)
        return replace(item.size, rows=rows, pairs=0, outputs=0, cross_pairs=0)

    def unit_counts(self, units: Sequence[ClipMeta]) -> dict[str, int]:
        """Latent tokens, latent tokens with a loss, caption tokens, and clips."""
        return {
            "latent tokens": sum(clip.num_tokens for clip in units),
            "targets": sum(clip.num_targets for clip in units),
            "caption tokens": sum(clip.num_text_tokens for clip in units),
            "clips": len(units),
        }


class Captions(Clips):
    """The captions of clips; the text encoder outputs the states of all their tokens."""

    works = "text"
    counts: ClassVar[Mapping[str, str]] = {"caption tokens": "rows", "states": "outputs"}

    def size(self, module: ModuleSpec, units: Sequence[ClipMeta]) -> WorkSize:
        """Tokens, causal pairs, and output states."""
        lengths = [clip.num_text_tokens for clip in units]
        return documents_work(lengths, sum(lengths))

    def unit_counts(self, units: Sequence[ClipMeta]) -> dict[str, int]:
        """Caption tokens, and as many output states."""
        tokens = sum(clip.num_text_tokens for clip in units)
        return {"caption tokens": tokens, "states": tokens}


class Frames(Clips):
    """The pixels of clips, which a VAE encodes to latents."""

    works = "VAE"
    counts: ClassVar[Mapping[str, str]] = {"latent positions": "outputs"}

    def size(self, module: ModuleSpec, units: Sequence[ClipMeta]) -> WorkSize:
        """Positions of a latent frame times frames of pixels, pairs inside of latent frames, and latent positions."""
        return frames_work(module, [clip.bucket for clip in units])

    def division(self, submesh: Submesh, module: ModuleSpec) -> Division:
        """No division: each rank encodes all clips of a work."""
        return Division()

    def of_rank(self, item: WorkItem, parts: int) -> WorkSize:
        """The whole size."""
        return item.size

    def unit_counts(self, units: Sequence[ClipMeta]) -> dict[str, int]:
        """Latent positions; frames of pixels depend on the VAE."""
        return {"latent positions": sum(math.prod(clip.bucket) for clip in units)}
