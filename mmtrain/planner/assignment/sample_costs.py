"""What single samples cost: seconds of each module, from the job's cost model and their metadata alone. Pure.

`mmtrain profile --samples` writes them as JSON, version 1: the settings that a job must share, and for each sample its
metadata, its size under the limits of a microbatch, and nanoseconds of each module.

Source: Entrain (Jang, Efficient Multimodal Model Training at Scale, dissertation, University of Michigan, 2026,
section 4.4.1).
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mmtrain.config.config import Config
from mmtrain.costs.cost_model import CostModel, equal_layers
from mmtrain.costs.job_costs import cost_model
from mmtrain.costs.profile.profile import job_of
from mmtrain.errors import ConfigError, PlanError
from mmtrain.modality.catalogue import modalities
from mmtrain.modality.metadata import ClipMeta, DocumentMeta, ImageMeta, IterationMeta, MicrobatchMeta
from mmtrain.modality.submesh import Submesh
from mmtrain.planner.assignment.assignment import SampleCost
from mmtrain.schedule.io import strict_json
from mmtrain.spec.builders import DTYPE_BYTES, model_spec
from mmtrain.spec.recomputation import Recomputation
from mmtrain.spec.spec import ModelSpec
from mmtrain.spec.vocabulary import with_loss_chunks
from mmtrain.spec.work_size import WorkSize

VERSION = 1
"""Version of the JSON form."""

_NS = 1e9


@dataclass(frozen=True, slots=True)
class PassesNs:
    """Nanoseconds of one module for one sample."""

    forward: int
    backward: int
    """Recomputation included."""

    @property
    def total(self) -> int:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass(kw_only=True)
class SamplePricer:
    """The seconds of samples in a job, as their part of a full microbatch.

    A sample is priced as a microbatch that is full of equal samples, divided by their number: by itself it would pay
    for launches and half-empty tiles that packed samples share.
    """

    spec: ModelSpec
    costs: CostModel
    submesh: Submesh
    recomputation: Recomputation
    seq_len: int
    """Tokens of a microbatch."""
    _modules: dict[tuple[str, WorkSize, bool], tuple[float, float]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, config: Config) -> "SamplePricer":
        """The pricer of a job. Raises: ConfigError: the model cannot be built, or has no costs."""
        spec = model_spec(config.model, dtype_bytes=DTYPE_BYTES[config.training.param_dtype])
        spec = with_loss_chunks(spec, config)
        return cls(
            spec=spec,
            costs=cost_model(config, spec),
            submesh=Submesh.of(config),
            recomputation=Recomputation.of(config.activation_checkpoint),
            seq_len=config.training.seq_len,
        )

    def sizes(self, sample: DocumentMeta | ClipMeta) -> dict[str, WorkSize]:
        """Module -> the size of the sample's work; modules that it has nothing for are left out.

        Raises: DataError: a module cannot process an image or clip.
        """
        return self._sizes(MicrobatchMeta.of([sample]))

    def _sizes(self, microbatch: MicrobatchMeta) -> dict[str, WorkSize]:
        sizes = {}
        for name, kind in modalities(self.spec, self.submesh.attention_mask).items():
            if units := kind.units(microbatch):
                sizes[name] = kind.size(self.spec.module(name), units)
        return sizes

    def microbatch_s(self, microbatch: MicrobatchMeta) -> float:
        """Seconds of all modules, forward and backward. Errors: see `sizes`."""
        sizes = self._sizes(microbatch)
        fed = len(sizes) > 1
        return sum(sum(self.seconds(name, size, fed=fed)) for name, size in sizes.items())

    def ns(self, sample: DocumentMeta | ClipMeta) -> dict[str, PassesNs]:
        """Module -> nanoseconds; at least 1 forward and, where it has one, 1 backward. Errors: see `sizes`."""
        copies = 1 if isinstance(sample, ClipMeta) else max(1, self.seq_len // sample.num_tokens)
        sizes = self.sizes(sample)
        passes = {}
        for name, size in sizes.items():
            fed = any(source in sizes for source in self.spec.module(name).after)
            forward_s, backward_s = self.seconds(name, times(size, copies), fed=fed)
            passes[name] = PassesNs(
                max(1, round(forward_s * _NS / copies)), max(backward_s > 0, round(backward_s * _NS / copies))
            )
        return passes

    def cost(self, sample: DocumentMeta | ClipMeta, size: tuple[int, ...] = ()) -> SampleCost:
        """What assignment needs. Args: size: of the sample under each limit of a microbatch. Errors: see `sizes`."""
        return cost_of(self.spec, self.ns(sample), size)

    def seconds(self, module: str, size: WorkSize, *, fed: bool) -> tuple[float, float]:
        """The seconds of forward and backward of all layers of a module for a work. Args: fed: other modules feed
        it."""
        enters = fed and self.spec.grad_enters(module)
        key = (module, size, enters)
        if key not in self._modules:
            layers = self.layer_seconds(module, size, fed=fed)
            self._modules[key] = (sum(forward for forward, _ in layers), sum(backward for _, backward in layers))
        return self._modules[key]

    def layer_seconds(self, module: str, size: WorkSize, *, fed: bool) -> list[tuple[float, float]]:
        """[layer] -> (forward, backward) seconds for a work. Args: fed: other modules feed it."""
        of, enters = self.spec.module(module), fed and self.spec.grad_enters(module)
        priced: dict[tuple[int, bool], tuple[float, float]] = {}
        layers = []
        for index, kind in enumerate(equal_layers(of)):
            if (kind, enters) not in priced:
                priced[kind, enters] = self._layer(module, index, size, enters)
            layers.append(priced[kind, enters])
            enters = enters or of.layers[index].trainable
        return layers

    def _layer(self, module: str, index: int, size: WorkSize, enters: bool) -> tuple[float, float]:
        of = self.spec.module(module)
        spent = self.costs.layer(of, index, size, input_grad=enters)
        backward_s = spent.backward_input_s + spent.backward_weight_s
        if enters or of.layers[index].trainable:
            backward_s += self.costs.repeated_s(of, index, size, self.recomputation)
        return spent.forward_s, backward_s


def last_module(spec: ModelSpec) -> str:
    """The module that no other one reads, whose work may be deferred: the language model, or a DiT."""
    read = {source for module in spec.modules for source in module.after}
    return next(module.name for module in reversed(spec.modules) if module.name not in read)


def cost_of(spec: ModelSpec, passes: Mapping[str, PassesNs], size: tuple[int, ...] = ()) -> SampleCost:
    """What assignment needs of a sample. Args: passes: module -> nanoseconds. size: under each limit."""
    last = last_module(spec)
    before = sum(of.total for name, of in passes.items() if name != last)
    return SampleCost(encoder_ns=before, language_ns=passes[last].total if last in passes else 1, size=size)


def times(size: WorkSize, factor: float) -> WorkSize:
    """The size of several equal works together, rounded. Args: factor: their number."""
    return WorkSize(**{f.name: round(factor * getattr(size, f.name)) for f in fields(WorkSize)})


# ------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True, kw_only=True)
class PricedSample:
    """One sample with its costs."""

    meta: DocumentMeta | ClipMeta
    size: tuple[int, ...]
    """The size of the sample under each limit of a microbatch."""
    ns: Mapping[str, PassesNs]
    """Module -> nanoseconds; modules that it has nothing for are left out."""


@dataclass(frozen=True, kw_only=True)
class SampleCosts:
    """The costs of some samples of a job's source."""

    job: Mapping[str, str | int]
    """The settings that a job must share: see `settings_of`."""
    limits: tuple[int, ...]
    """Most of a microbatch under each limit."""
    is_whole: bool
    """Whether these are all usable samples of the source."""
    samples: tuple[PricedSample, ...]

    def check_fits(self, config: Config, where: str) -> None:
        """Checks that they are of the job's model, tokenizer, source and division over ranks.

        Args: where: their file, for the message.
        Raises: ConfigError: they are not; names the setting and both values.
        """
        expected = settings_of(config, str(self.job.get("source", "")) if self._drawn else "")
        for key in sorted({*expected, *self.job}):
            written, wanted = self.job.get(key, "none"), expected.get(key, "none")
            if written != wanted:
                raise ConfigError(
                    f"{where}: written with {key} = {written}, but this job has {wanted}; write it again with `mmtrain "
                    "profile --samples`, or change the job"
                )

    @property
    def _drawn(self) -> bool:
        return str(self.job.get("source", "")).startswith(_DRAWN)

    def to_json(self) -> str:
        """The costs as JSON text of version 1; `from_json` returns equal ones."""
        head = {"version": VERSION, "job": dict(self.job), "limits": list(self.limits), "is_whole": self.is_whole}
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        body = ",\n".join(f"  {json.dumps(_sample_to_json(sample))}" for sample in self.samples)
        return "{\n" + ",\n".join([*lines, f' "samples": [\n{body}\n ]']) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> "SampleCosts":
        """The costs in a JSON text. Raises: PlanError: it breaks a rule of the format; names the dotted path."""
        return _read(strict_json.loads(text))

    @classmethod
    def read(cls, path: str | Path) -> "SampleCosts":
        """The costs in a .json or .json.gz file. Raises: PlanError: the file is missing, or its content is wrong."""
        text = strict_json.read_text(path)
        try:
            return cls.from_json(text)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error

    def write(self, path: str | Path) -> None:
        """Writes the JSON form to a .json or .json.gz file."""
        strict_json.write_text(path, self.to_json())


_DRAWN = "workload "


def drawn_source(workload: str) -> str:
    """The name of a drawn workload in place of a source."""
    return f"{_DRAWN}{workload}"


def settings_of(config: Config, source: str = "") -> dict[str, str | int]:
    """The settings on which the costs of samples depend. Args: source: empty: the job's data."""
    spec = model_spec(config.model, dtype_bytes=DTYPE_BYTES[config.training.param_dtype])
    params = {f"{module.name} parameters": module.num_params for module in spec.modules}
    trainable = {f"{module.name} trainable parameters": module.num_trainable_params for module in spec.modules}
    return {
        **job_of(config),
        **params,
        **trainable,
        "tokenizer": config.tokenizer.path or "built-in",
        "source": source or config.data.description,
        "training.seq_len": config.training.seq_len,
        "activation_checkpoint.mode": config.activation_checkpoint.mode,
        "costs": config.planner.profile or config.planner.hardware.partition("x")[0] or "planner.device.flops_per_s",
    }


def priced(
    pricer: SamplePricer, samples: Sequence[tuple[DocumentMeta | ClipMeta, tuple[int, ...]]]
) -> tuple[PricedSample, ...]:
    """The samples with their costs. Args: samples: metadata, and the size under each limit of a microbatch.

    Raises: DataError: a module cannot process an image or clip.
    """
    return tuple(PricedSample(meta=_counted(meta), size=size, ns=pricer.ns(meta)) for meta, size in samples)


def _counted(meta: DocumentMeta | ClipMeta) -> DocumentMeta | ClipMeta:
    """The metadata that the costs depend on."""
    if isinstance(meta, ClipMeta):
        return replace(meta, index=0, blank=False)
    images, seen = [], Counter[str]()
    for image in meta.images:
        images.append(replace(image, index=seen[image.module], frame=None, seconds=0.0, time_step=1.0))
        seen[image.module] += 1
    return replace(meta, images=tuple(images), answers=(), grade="")


def drawn_samples(metas: Iterator[IterationMeta], most: int) -> list[tuple[DocumentMeta | ClipMeta, tuple[int, ...]]]:
    """The first samples of drawn iterations, with their sizes under the limits: tokens, or frames and 1 clip."""
    samples: list[tuple[DocumentMeta | ClipMeta, tuple[int, ...]]] = []
    while len(samples) < most:
        for microbatch in next(metas).microbatches:
            samples += [(document, (document.num_tokens,)) for document in microbatch.documents]
            samples += [(clip, (clip.frames, 1)) for clip in microbatch.clips]
    return samples[:most]


def _sample_to_json(sample: PricedSample) -> dict[str, Any]:
    meta = sample.meta
    table: dict[str, Any] = {"sample": meta.sample, "source": meta.source, "size": list(sample.size)}
    if isinstance(meta, ClipMeta):
        table["clip"] = [meta.frames, meta.height, meta.width, meta.num_tokens, meta.num_text_tokens]
    else:
        table["document"] = [meta.num_tokens, meta.num_targets, meta.prefix]
        table["images"] = [[image.module, *image.grid, image.num_tokens, image.start] for image in meta.images]
    return table | {"ns": {name: [of.forward, of.backward] for name, of in sample.ns.items()}}


def _read(table: Any) -> SampleCosts:
    strict_json.fields(table, "", ("version", "job", "limits", "is_whole", "samples"))
    if strict_json.integer(table["version"], "version") != VERSION:
        raise PlanError(f"version = {table['version']}; this program reads version {VERSION}")
    job = table["job"]
    if not isinstance(job, Mapping) or not all(type(value) in (str, int) for value in job.values()):
        raise PlanError("job must be an object of texts and integers")
    if not isinstance(table["is_whole"], bool):
        raise PlanError(f"is_whole = {strict_json.show(table['is_whole'])} must be true or false")
    limits = tuple(strict_json.integers(table["limits"], "limits"))
    samples = strict_json.items(table["samples"], "samples")
    if not samples:
        raise PlanError("samples is empty; it has at least one sample")
    return SampleCosts(
        job=dict(job),
        limits=limits,
        is_whole=table["is_whole"],
        samples=tuple(_read_sample(value, f"samples[{i}]", len(limits)) for i, value in enumerate(samples)),
    )


def _read_sample(value: Any, where: str, num_limits: int) -> PricedSample:
    is_clip = isinstance(value, Mapping) and "clip" in value
    kinds = ("clip",) if is_clip else ("document", "images")
    strict_json.fields(value, where, ("sample", "source", "size", *kinds, "ns"))
    number = strict_json.integer(value["sample"], f"{where}.sample")
    source = strict_json.string(value["source"], f"{where}.source")
    size = _counts(value["size"], f"{where}.size", num_limits, least=1)
    meta: DocumentMeta | ClipMeta
    if is_clip:
        frames, height, width, tokens, texts = _counts(value["clip"], f"{where}.clip", 5, least=1)
        meta = ClipMeta(
            sample=number,
            source=source,
            frames=frames,
            height=height,
            width=width,
            num_tokens=tokens,
            num_text_tokens=texts,
        )
    else:
        tokens, targets, prefix = _counts(value["document"], f"{where}.document", 3)
        meta = DocumentMeta(
            sample=number,
            source=source,
            num_tokens=max(1, tokens),
            num_targets=targets,
            prefix=prefix,
            images=_read_images(value["images"], f"{where}.images", number, source),
        )
    strict_json.fields(value["ns"], f"{where}.ns", (), tuple(value["ns"]) if isinstance(value["ns"], Mapping) else ())
    passes = {name: PassesNs(*_counts(of, f"{where}.ns.{name}", 2)) for name, of in value["ns"].items()}
    return PricedSample(meta=meta, size=size, ns=passes)


def _read_images(value: Any, where: str, number: int, source: str) -> tuple[ImageMeta, ...]:
    images, seen = [], Counter[str]()
    for i, row in enumerate(strict_json.items(value, where)):
        module, *numbers = strict_json.items(row, f"{where}[{i}]") or ("",)
        name = strict_json.string(module, f"{where}[{i}][0]")
        t, h, w, tokens, start = _counts(numbers, f"{where}[{i}]", 5)
        images.append(
            ImageMeta(
                sample=number,
                source=source,
                index=seen[name],
                module=name,
                grid=(max(1, t), max(1, h), max(1, w)),
                num_tokens=max(1, tokens),
                start=start,
            )
        )
        seen[name] += 1
    return tuple(images)


def _counts(value: Any, where: str, number: int, least: int = 0) -> tuple[int, ...]:
    """Integers of at least `least`. Args: number: of them."""
    counts = strict_json.integers(value, where)
    if len(counts) != number or min(counts, default=0) < least:
        raise PlanError(f"{where} = {strict_json.show(value)} must be {number} integers of at least {least}")
    return tuple(counts)
