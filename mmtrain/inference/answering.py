"""Answers of a multimodal model: a run's checkpoint or an exported folder, by transformers' own `generate`, or by our
forward where transformers has no class for its modules."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, TextStreamer

from mmtrain.checkpoint.run_folder import CheckpointStep, StoredRun, Weights, load_module, open_run
from mmtrain.config.config import Config
from mmtrain.config.data import DataConfig
from mmtrain.config.toml_sections import build
from mmtrain.config.whole_model import SOUND, with_parts
from mmtrain.data.conversation_records import CONVERSATIONS, Record, kinds_of, record_kind
from mmtrain.data.conversations import ReadDocument, make_processor, packed
from mmtrain.data.media import RawMedium, raw_image, raw_sound, raw_video
from mmtrain.data.processor import Document, Processor
from mmtrain.data.questions import Question, question_before, with_answer
from mmtrain.data.record_keys import is_spoken
from mmtrain.data.record_parts import placeholder
from mmtrain.data.sources import RecordKind, open_source
from mmtrain.data.tokenizer import read_tokenizer
from mmtrain.errors import ConfigError, DataError, MMTrainError, for_terminal, one_line
from mmtrain.export.whole_folder import assembled
from mmtrain.families.catalogue import COMPOSITES
from mmtrain.modality.metadata import MicrobatchMeta
from mmtrain.models.reference import ReferenceModel
from mmtrain.models.whole import class_inputs
from mmtrain.models.whole_files import read_whole, whole_class_config
from mmtrain.spec.builders import model_spec
from mmtrain.spec.hub_files import processor_config
from mmtrain.spec.module_sizes import whole_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    """The sampling temperature. 0: the most likely token each time."""
    top_p: float = 1.0
    """Part of the probability that the tokens hold among which one is drawn."""
    seed: int = 0


class Streamer(TextStreamer):
    """Shows tokens as they come; what they spell may be anything."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(for_terminal(text), stream_end)


class Answerer(ABC):
    """A model with its processor, in this process."""

    def __init__(self, processor: Processor, kind: RecordKind[Record] = CONVERSATIONS) -> None:
        """Args: kind: of the records that the model reads."""
        self._processor, self.kind, self.tokenizer = processor, kind, processor.tokenizer
        self._stop = processor.ending.token

    @staticmethod
    def of(source: Path, step: CheckpointStep | None = None, weights: Weights | None = None) -> "Answerer":
        """The model of a run, or of an exported folder.

        Args:
            step: of the run's checkpoint, see `open_run`; None: the newest.
            weights: of the run's checkpoint; None: those that trained.
        Raises: ConfigError: it is neither, or makes clips or embeddings.
        """
        if (source / "config.toml").is_file():
            run = open_run(source, step, weights=weights or "trained")
            if run.job.model.dit is not None:
                raise ConfigError(f"{source} is a text-to-video run; make clips with `mmtrain sample {source}`")
            if run.job.model.reads_pairs:
                raise _no_answers(source)
            return _WholeModel(assembled(run), make_processor(run.job)) if whole_kind(run.job.model) else _Modules(run)
        if not (source / "config.json").is_file():
            raise ConfigError(f"{source} has neither config.toml nor config.json; name a run or an exported folder")
        if step is not None:
            raise ConfigError(f"--step {step}: {source} is an exported folder, which has one step; leave --step out")
        if weights is not None:
            raise ConfigError(
                f"--weights {weights}: {source} is an exported folder, which has one kind; leave --weights out"
            )
        return _exported(source)

    def blanked(self, *, images: bool = True, audio: bool = False) -> "Answerer":
        """This model, which sees grey instead of each image, or hears silence instead of each sound.

        Raises: ConfigError: it reads nothing of that kind.
        """
        for asked, kinds, option in (
            (images, ("image", "video"), "--blank-images"),
            (audio, ("audio",), "--blank-audio"),
        ):
            if asked and self._processor.readers.of_kind.keys().isdisjoint(kinds):
                raise ConfigError(f"{option} has no effect: the model reads no {' or '.join(kinds)}; leave it out")
        other = copy.copy(self)
        other._processor = self._processor.blanked(images=images, audio=audio)
        return other

    def answer(self, record: Record, sampling: Sampling, *, streamer: Any = None) -> str:
        """The answer to a conversation that ends with a question.

        Args: streamer: of transformers, which takes tokens as they come.
        Raises: DataError: the conversation, its images, videos or sounds cannot be read.
        """
        torch.manual_seed(sampling.seed)
        with torch.no_grad():
            tokens = self._answer(self._processor.prompt(record), sampling, streamer)
        return self._processor.answer([int(token) for token in tokens])

    @abstractmethod
    def _answer(self, document: Document, sampling: Sampling, streamer: Any) -> Sequence[int] | Tensor:
        """The tokens behind a prompt."""


class _WholeModel(Answerer):
    """A class of transformers, by its own `generate`."""

    def __init__(self, model: Any, processor: Processor) -> None:
        super().__init__(processor)
        self.model = model
        self.model.generation_config = GenerationConfig()  # a folder's own would change what `Sampling` says

    def inputs(self, record: Record) -> dict[str, Tensor]:
        """The arguments of the whole class for a conversation that ends with a question: [1, T] token ids, images,
        videos.

        Raises: DataError: the conversation, its images or its videos cannot be read.
        """
        return self._inputs(self._processor.prompt(record))

    def _inputs(self, document: Document) -> dict[str, Tensor]:
        ids = torch.from_numpy(document.input_ids)[None]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return inputs | class_inputs(document.meta, self._processor.pixels(document), self.model.config)

    def _answer(self, document: Document, sampling: Sampling, streamer: Any) -> Sequence[int] | Tensor:
        inputs = self._inputs(document)
        drawn: dict[str, float] = {}
        if sampling.temperature:  # top_k 0: no limit; transformers' default is 50
            drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        tokens: Tensor = self.model.generate(
            **inputs,
            max_new_tokens=sampling.max_new_tokens,
            do_sample=bool(sampling.temperature),
            eos_token_id=self._stop,
            pad_token_id=self._stop or 0,  # of one sequence nothing is padded
            streamer=streamer,
            logits_processor=[_Finite()],
            **drawn,
        )
        return tokens[0, inputs["input_ids"].shape[1] :]


class _Exported(_WholeModel):
    """A whole model from a folder made by others, whose config may fail wherever the class reads it."""

    def _answer(self, document: Document, sampling: Sampling, streamer: Any) -> Sequence[int] | Tensor:
        try:
            return super()._answer(document, sampling, streamer)
        except MMTrainError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {one_line(error, 300)}"
            raise ConfigError(
                f"{self.model.name_or_path} cannot answer: {reason}; its config.json, tokenizer and weights must be of "
                "one model"
            ) from None


class _Finite(LogitsProcessor):
    """Refuses logits of a damaged model, in place of an answer that means nothing."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return _finite(scores)


def _finite(logits: Tensor) -> Tensor:
    """The logits. Raises: ConfigError: they are no probabilities, since weights are not finite or overflow."""
    if not torch.isfinite(logits.logsumexp(dim=-1)).all():
        raise ConfigError(
            "the model's logits are not finite, so it has no answer: its weights hold NaN or infinite numbers, or are "
            f"too large for {str(logits.dtype).removeprefix('torch.')}; take another model, or a checkpoint with --step"
        )
    return logits


class _Modules(Answerer):
    """The modules of a run that make no class of transformers, by the forward that training runs.

    Encoders run once a question, the language model once a token, without a cache of keys and values.
    """

    def __init__(self, run: StoredRun) -> None:
        model = run.job.model
        super().__init__(make_processor(run.job), record_kind(kinds_of(model)))
        self._model = ReferenceModel(model, model_spec(model), seed=0, stored=partial(load_module, run))

    def _answer(self, document: Document, sampling: Sampling, streamer: Any) -> Sequence[int] | Tensor:
        prompt = replace(document, meta=replace(document.meta, prefix=document.meta.num_tokens))
        read = ReadDocument(document=prompt, pixels=self._processor.pixels(document))
        self._model.chunks["language"].predict = partial(_chosen, sampling)
        features: dict[str, Tensor] | None = None
        tokens: list[int] = []
        if streamer is not None:
            streamer.put(torch.from_numpy(document.input_ids))
        while len(tokens) < sampling.max_new_tokens and tokens[-1:] != [self._stop]:
            extended = with_answer(read, tokens)
            tensors, counts = packed([extended]), MicrobatchMeta(documents=(extended.document.meta,))
            features = self._model.features(tensors, counts) if features is None else features
            predictions = self._model.text(tensors, counts, features, True).predictions
            assert predictions is not None
            tokens.append(int(predictions[-1]))
            if streamer is not None:
                streamer.put(predictions[-1:])
        if streamer is not None:
            streamer.end()
        return tokens


def _chosen(sampling: Sampling, logits_LV: Tensor) -> Tensor:
    """[L]: a token for each position, the most likely one or one that is drawn."""
    if not sampling.temperature:
        return _finite(logits_LV).argmax(dim=-1)
    chances, order = (_finite(logits_LV).float() / sampling.temperature).softmax(dim=-1).sort(dim=-1, descending=True)
    before = chances.cumsum(dim=-1) - chances
    kept = chances.masked_fill(before >= sampling.top_p, 0.0)
    return order.gather(-1, torch.multinomial(kept, 1)).squeeze(-1)


def _exported(folder: Path) -> Answerer:
    """The model and processor of an exported folder, or of one that somebody else made."""
    settings = whole_class_config(folder)
    if COMPOSITES[settings.model_type].loss:
        raise _no_answers(folder)
    table = {
        **whole_table(str(folder), folder, settings),
        "training": {"steps": 1, "seq_len": 2, "global_batch_size": 1},
    }
    table["data"] = {"source": "none", **table["data"]}
    config: Config = build(Config, with_parts(table, str(folder)), "", str(folder))
    processor = make_processor(config)  # checks config.json before the model is made
    return _Exported(read_whole(folder, settings), processor)


def whole_table(source: str, folder: Path, settings: Any) -> dict[str, Any]:
    """[model], [tokenizer] and what the model says of [data] of a job that starts from a whole model.

    Args: source: folder or hub id of the model. folder: that holds its files. settings: of `whole_class_config`.
    Raises: ConfigError: its tokenizer cannot be read.
    """
    tokenizer, whole = read_tokenizer(str(folder)), COMPOSITES[settings.model_type]

    def token(key: str) -> str | None:
        number = getattr(settings, f"{key}_id", None)  # the default of a class may be that of a larger vocabulary
        known = type(number) is int and 0 <= number < len(tokenizer)
        return str(tokenizer.convert_ids_to_tokens(number)) if known else None

    tokens = {key: token(key) for key in ("image_token", "video_token")}
    parts: dict[str, Any] = {"projector": {"kind": whole.projector}}
    if (sound := token("audio_token")) is not None:
        parts = {"modules": {SOUND: {"kind": "audio", "token": sound}}}
    return {
        "model": {"pretrained": source, **parts},
        "tokenizer": {key: name for key, name in tokens.items() if name is not None},
        "data": _video_frames(folder),
    }


def _no_answers(source: Path) -> ConfigError:
    return ConfigError(f"{source} has two towers, which embed images and captions; name a model that answers")


def _video_frames(folder: Path) -> dict[str, Any]:
    """The keys of [data] that say which frames the folder's video processor takes."""
    values = processor_config("the folder", str(folder), "video") or {}
    keys = {f"video_{name}": values.get(name) for name in ("fps", "min_frames", "max_frames")}
    return {key: value for key, value in keys.items() if value is not None}


def asked(prompt: str, images: Sequence[Path], videos: Sequence[Path] = (), sounds: Sequence[Path] = ()) -> Record:
    """The conversation of one question about images, videos and sounds, which stand before it unless it says where."""
    content = prompt
    for kind, paths in (("audio", sounds), ("video", videos), ("image", images)):
        mark = placeholder(kind)
        marks = prompt.count(mark)
        if marks not in (0, len(paths)):
            raise DataError(
                f"--prompt has {marks} `{mark}`, but there are {len(paths)} {kind}s; write it once for each, or not at "
                "all"
            )
        for path in paths:
            if not (path.is_file() or (kind == "video" and path.is_dir())):
                raise DataError(f"--{kind} {path} is no {_INPUTS[kind]}; correct the path")
        content = content if marks else mark * len(paths) + content
    raw: list[RawMedium] = [raw_image(str(path), f"--image {path}", "") for path in images]
    raw += [raw_video(str(path), f"--video {path}", "", None) for path in videos]
    raw += [raw_sound(str(path), f"--audio {path}", "") for path in sounds]
    return Record(sample=0, messages=({"role": "user", "content": content},), images=tuple(raw))


_INPUTS = {"image": "file", "video": "file, nor a folder of frames", "audio": "file"}
"""What a path of a kind must be, for errors."""


def questions(
    source: str, split: str, limit: int | None, kind: RecordKind[Record] = CONVERSATIONS
) -> Iterator[Question]:
    """The first question of each record of a source, and its answer. Args: kind: of the records.

    Raises: ConfigError, DataError.
    """
    records = open_source(DataConfig(source=source), split, kind)
    count = records.num_samples
    for index in range(min(count if count is not None else 10**9, 10**9 if limit is None else limit)):
        record = records[index]
        if record is None:
            return
        answers = [turn for turn, message in enumerate(record.messages) if turn and is_spoken(message)]
        if not answers:
            roles = [message.get("role") for message in record.messages]
            raise DataError(f"sample {index} of {source}: its roles are {roles}; it needs a question and an answer")
        yield question_before(record, answers[0])
