"""Makes steps: plans which samples they hold, and builds one replica's tensors and metadata of them.

Every process that makes steps plans all of them (from token counts and image headers alone) and
decodes only the pictures of its own microbatches.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from mmtrain.config import Config
from mmtrain.data.batch import Batch, Microbatch, check_batch
from mmtrain.data.geometry import ImageGeometry, image_geometry
from mmtrain.data.metadata import IterationMeta, MicrobatchMeta
from mmtrain.data.packing import Dropped, EpochOrder, LoaderState, StepPlan, bins_of_replica, plan_step
from mmtrain.data.pixels import PixelRules, pixel_rules
from mmtrain.data.processor import Document, Processor
from mmtrain.data.sources import open_source
from mmtrain.data.tokenizer import load_tokenizer
from mmtrain.errors import ConfigError, DataError
from mmtrain.models.families import encoder_config, language_config


class StepMaker:
    """Plans and builds the steps of one data-parallel replica.

    Args:
        split, shuffle: which samples, and whether their order is drawn anew each epoch.
        dp_rank, dp_degree: the replica, among how many.
    Raises: ConfigError: source, split, tokenizer or image processor do not exist or do not fit the model.
    """

    def __init__(self, config: Config, *, split: str, shuffle: bool, dp_rank: int, dp_degree: int) -> None:
        self._config = config
        self._dp_rank, self._dp_degree = dp_rank, dp_degree
        self._source = open_source(config.data, split)
        self._order = EpochOrder(self._source.num_samples, shuffle=shuffle)
        self._processor = make_processor(config)
        self._documents: dict[int, Document] = {}

    def plan(self, state: LoaderState) -> StepPlan:
        """The bins of the step that starts at `state`.

        Raises: DataError: a sample that the policies do not let pass, or too few samples.
        """
        self._documents.clear()
        training = self._config.training
        return plan_step(
            state, self._order, self._length, num_bins=training.global_batch_size, bin_tokens=training.seq_len
        )

    def build(self, plan: StepPlan) -> tuple[Batch, IterationMeta]:
        """The tensors and the metadata of this replica's microbatches of the step that was planned last.

        A sample with a corrupt picture leaves its microbatch and moves no other sample.
        Raises: DataError: a corrupt picture, with `data.on_error = "raise"`.
        """
        # Samples that planning passed over are dealt out like bins, so that each is counted once in all.
        num_skipped = len(plan.dropped[self._dp_rank :: self._dp_degree])
        microbatches, metas = [], []
        for index in bins_of_replica(len(plan.bins), self._dp_rank, self._dp_degree):
            documents = [self._documents[sample] for sample in plan.bins[index]]
            readable, pixels = self._read_pixels(documents)
            num_skipped += len(documents) - len(readable)
            # An emptied microbatch keeps text without a target, so that the step keeps its shape.
            kept = readable or [self._processor.without_images(documents[0])]
            microbatches.append(_microbatch(kept, pixels, self._processor.image_token_id))
            metas.append(MicrobatchMeta(documents=tuple(document.meta for document in kept)))
        batch, meta = (
            Batch(microbatches=microbatches),
            IterationMeta(microbatches=tuple(metas), num_skipped=num_skipped),
        )
        check_batch(batch, meta)
        return batch, meta

    def _length(self, sample: int) -> int | Dropped | None:
        """Tokens of a sample, why it is left out, or None behind a stream's end; keeps its document."""
        data, limit = self._config.data, self._config.training.seq_len
        if sample in self._documents:
            return self._documents[sample].meta.num_tokens
        try:
            record = self._source[sample]
            if record is None:
                return None
            document = self._processor.document(record)
        except DataError as error:
            if data.on_error == "raise":
                raise
            return Dropped(sample=sample, reason=str(error))
        length = document.meta.num_tokens
        if length > limit:
            reason = f"sample {sample}: {length} tokens do not fit training.seq_len = {limit}"
            if data.too_long == "raise":
                raise DataError(f'{reason}; set data.too_long = "skip" or "truncate", or a larger seq_len')
            if data.too_long == "skip":
                return Dropped(sample=sample, reason=reason)
            document = self._processor.truncated(document, limit)
        self._documents[sample] = document
        return document.meta.num_tokens

    def _read_pixels(self, documents: Iterable[Document]) -> tuple[list[Document], list[Tensor]]:
        readable, pixels = [], []
        for document in documents:
            try:
                found = self._processor.pixels(document)
            except DataError:
                if self._config.data.on_error == "raise":
                    raise
                continue
            readable.append(document)
            pixels += found
        return readable, pixels


def make_processor(config: Config) -> Processor:
    """The processor of a job: its tokenizer, chat template, picture geometry and pixel rules.

    Raises: ConfigError: a part does not exist, or they do not fit together.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    vocab_size = language_config(config.model.language)["vocab_size"]
    if len(tokenizer) > vocab_size:
        raise ConfigError(
            f"tokenizer.path = {config.tokenizer.path!r} has {len(tokenizer)} entries, but the language "
            f"model's vocab_size is {vocab_size}; raise it or use the model's own tokenizer"
        )
    geometry, rules = picture_rules(config)
    return Processor(tokenizer, config.tokenizer.image_token, geometry, rules, blank_images=config.data.blank_images)


def picture_rules(config: Config) -> tuple[ImageGeometry | None, PixelRules | None]:
    """How pictures become encoder input; None, None for a model without an encoder.

    Raises: ConfigError: encoder, projector, data.image_processor and area limits do not fit together.
    """
    if config.model.encoder is None:
        return None, None
    encoder = encoder_config(config.model.encoder)
    rules = pixel_rules(encoder["model_type"], config.data.image_processor)
    fixed = bool(encoder.get("image_size"))
    geometry = image_geometry(
        encoder,
        spatial_merge=config.model.projector.spatial_merge,
        min_pixels=config.data.min_pixels or (0 if fixed else rules.min_pixels),
        max_pixels=config.data.max_pixels or (0 if fixed else rules.max_pixels),
    )
    if fixed and rules.image_size not in (0, geometry.image_size):
        raise ConfigError(
            f"data.image_processor = {config.data.image_processor!r} makes pictures of side "
            f"{rules.image_size}, but the encoder's image_size is {geometry.image_size}; use its own one"
        )
    return geometry, rules


def _microbatch(documents: list[Document], pixels: list[Tensor], image_token_id: int) -> Microbatch:
    ids = np.concatenate([document.input_ids for document in documents])
    positions = np.concatenate([np.arange(document.meta.num_tokens) for document in documents])
    labels = np.concatenate([document.labels for document in documents])
    return Microbatch(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        labels=torch.from_numpy(labels),
        image_slots=torch.from_numpy(np.flatnonzero(ids == image_token_id)),
        pixel_values=pixels,
        image_names=[(image.sample, image.index) for d in documents for image in d.meta.images],
    )
