"""Video clips with captions, as the three modules of a text-to-video model consume them."""

import math
from collections.abc import Sequence
from functools import cache

from mmtrain.errors import PlanError
from mmtrain.modality.base import Modality, Units, Weigh, WorkItem, forward_rates
from mmtrain.modality.metadata import ClipMeta, IterationMeta, MicrobatchMeta
from mmtrain.modality.submesh import Submesh
from mmtrain.spec.rows import share_of
from mmtrain.spec.spec import Division, ModuleSpec, WorkSize, clips_work, documents_work, frames_work


class Clips(Modality):
    """What the modules have in common: a clip is one unit of each of them."""

    item = "clip"
    remedy = "the model has no diffusion transformer; add [model.dit]"
    required = True

    def units(self, microbatch: MicrobatchMeta) -> Units:
        """All clips."""
        return microbatch.clips

    def weigh(self, module: ModuleSpec) -> Weigh:
        """By the tokens of latents and captions."""
        rates = forward_rates(module)
        of_tokens = cache(lambda tokens, texts: rates(clips_work([tokens], [texts], tokens)))
        return lambda clip: of_tokens(clip.num_tokens, clip.num_text_tokens)

    def layout(
        self, submesh: Submesh, module: ModuleSpec, works: dict[int, WorkItem], meta: IterationMeta
    ) -> "ClipsLayout":
        """Rows over the tp ranks; cp ranks do not divide clips yet."""
        return ClipsLayout(self, submesh, works)

    def of_rank(self, item: WorkItem, tp: int) -> WorkSize:
        """Rows and outputs that each of several tp ranks holds of a work between two stages."""
        return WorkSize(rows=share_of(item.size.rows, tp), pairs=0, outputs=0)


class ClipsLayout:
    """The division of the works of a text-to-video model's module."""

    def __init__(self, kind: Clips, submesh: Submesh, works: dict[int, WorkItem]) -> None:
        self._kind, self.submesh, self.works = kind, submesh, works

    def local_size(self, work: int, cp_rank: int, tp_rank: int) -> WorkSize:
        """Rows and outputs that one rank holds between two stages, padding included.

        Raises: PlanError: cp ranks, which do not divide clips yet.
        """
        if self.submesh.cp > 1:
            raise PlanError(
                f"a stage's submesh has {self.submesh.cp} context-parallel ranks, but these do not divide the works of "
                "a text-to-video model yet; set parallelism.context_parallel_degree = 1"
            )
        item = self.works[work]
        return item.size if self.submesh.tp == 1 else self._kind.of_rank(item, self.submesh.tp)


class Latents(Clips):
    """The noisy latents of clips, which a diffusion transformer denoises."""

    works = "DiT"

    def size(self, module: ModuleSpec, units: Sequence[ClipMeta]) -> WorkSize:
        """Latent tokens, their pairs among themselves and with the caption's, those with a loss."""
        tokens, texts = [clip.num_tokens for clip in units], [clip.num_text_tokens for clip in units]
        return clips_work(tokens, texts, sum(clip.num_targets for clip in units))

    def readers(self, module: ModuleSpec) -> tuple[int, ...]:
        """The first, which mixes latents with noise, and the last, for targets; none, if another module makes them."""
        return () if module.latents_arrive else (0, -1)

    def of_rank(self, item: WorkItem, tp: int) -> WorkSize:
        """Rows of each clip apart, with all of the texts."""
        rows = sum(share_of(clip.num_tokens, tp) for clip in item.units)
        return WorkSize(rows=rows, pairs=0, outputs=0, texts=item.size.texts, clips=item.size.clips)

    def owed(self, units: Sequence[ClipMeta]) -> dict[str, int]:
        """Latent tokens, those with a loss, captions' tokens, clips."""
        return {
            "latent tokens": sum(clip.num_tokens for clip in units),
            "targets": sum(clip.num_targets for clip in units),
            "caption tokens": sum(clip.num_text_tokens for clip in units),
            "clips": len(units),
        }

    def paid(self, size: WorkSize) -> dict[str, int]:
        """Rows, outputs, texts and clips."""
        return {
            "latent tokens": size.rows,
            "targets": size.outputs,
            "caption tokens": size.texts,
            "clips": size.clips,
        }


class Captions(Clips):
    """The captions of clips, every state of which leaves the text encoder."""

    works = "text"

    def size(self, module: ModuleSpec, units: Sequence[ClipMeta]) -> WorkSize:
        """Tokens, causal pairs, tokens."""
        lengths = [clip.num_text_tokens for clip in units]
        return documents_work(lengths, sum(lengths))

    def owed(self, units: Sequence[ClipMeta]) -> dict[str, int]:
        """Captions' tokens, each of whose states leaves."""
        tokens = sum(clip.num_text_tokens for clip in units)
        return {"caption tokens": tokens, "states": tokens}

    def paid(self, size: WorkSize) -> dict[str, int]:
        """Rows and outputs."""
        return {"caption tokens": size.rows, "states": size.outputs}


class Frames(Clips):
    """The pixels of clips, of which a VAE makes latents."""

    works = "VAE"

    def size(self, module: ModuleSpec, units: Sequence[ClipMeta]) -> WorkSize:
        """Indices of latent frames times frames of pixels, pairs inside of a latent frame, latent places."""
        return frames_work(module, [clip.bucket for clip in units])

    def division(self, submesh: Submesh, module: ModuleSpec) -> Division:
        """None: each rank encodes everything."""
        return Division()

    def of_rank(self, item: WorkItem, tp: int) -> WorkSize:
        """All of it."""
        return item.size

    def owed(self, units: Sequence[ClipMeta]) -> dict[str, int]:
        """Latent places; how many frames become a latent one is the VAE's own affair."""
        return {"latent places": sum(math.prod(clip.bucket) for clip in units)}

    def paid(self, size: WorkSize) -> dict[str, int]:
        """Outputs."""
        return {"latent places": size.outputs}
