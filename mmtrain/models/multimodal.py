"""A multimodal model from modules of transformers, as a job: the Python counterpart of [model] and its placement.

    mllm = MultimodalModule(
        encoders={"vision": EncoderModule(sees), "audio": EncoderModule(hears)},
        language_model=llama,
    )
    job = mllm.job("modules", ParallelSpec(pp=2), {name: ParallelSpec(pp=1) for name in mllm.encoders}, data=..., ...)

The job is a value as any other: `config.dump(job)` is its TOML, and `Trainer(job).run()` trains it.

Source: the interface of Cornstarch, arXiv:2503.11367, appendix B (listing B.1).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from transformers import PreTrainedConfig, PreTrainedModel

from mmtrain.config import config
from mmtrain.config.config import Config
from mmtrain.config.model import EncoderConfig, LanguageConfig, ModelConfig, ProjectorConfig, ProjectorName, Trainable
from mmtrain.config.planner import PlannerConfig
from mmtrain.config.sections import JobConfig, ParallelismConfig
from mmtrain.errors import ConfigError
from mmtrain.launch.atomic_files import new_folder

ModuleSource: TypeAlias = PreTrainedModel | PreTrainedConfig
"""A module of transformers, whose weights are where training starts; or its config, for random weights."""


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """How one module is divided over ranks."""

    pp: int = 1
    """Pipeline ranks that hold a part of it."""
    tp: int = 1
    """Ranks that divide each of its layers; equal for all modules."""
    cp: int = 1
    """Ranks that divide the rows of each work; equal for all modules."""


@dataclass(frozen=True)
class EncoderModule:
    """An encoder, and the projector from its features into the language model."""

    module: ModuleSource
    projector: ProjectorConfig | ProjectorName = "mlp"
    """The section of the projector, or just its kind."""
    trainable: Trainable | None = None
    """What of the encoder trains. None: all of it if a parameter of the module requires a gradient; a config trains."""
    token: str = ""
    """The placeholder that its features replace; empty: <NAME>, and of `vision` tokenizer.image_token."""


@dataclass(frozen=True, kw_only=True)
class MultimodalModule:
    """Encoders by their names, and the language model that reads their features. `vision` is [model.encoder]."""

    encoders: Mapping[str, EncoderModule]
    language_model: ModuleSource
    trainable: Trainable | None = None
    """What of the language model trains, as in `EncoderModule.trainable`."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `LanguageConfig`, as attention_mask."""

    def job(
        self,
        folder: str | Path,
        language_spec: ParallelSpec = ParallelSpec(),
        encoder_specs: Mapping[str, ParallelSpec] | None = None,
        *,
        modality_parallelism: Literal["spread", "parallel", "colocated"] = "parallel",
        **sections: Any,
    ) -> Config:
        """The checked job that trains the model; its modules are written to `folder`, from which all ranks read.

        To be called in one process, before the ranks of the job start.

        Args:
            folder: does not exist yet; kept as long as the job may be started again.
            encoder_specs: by the names of the encoders; absent: one pipeline rank.
            modality_parallelism: `planner.placement`. parallel: each module has its pipeline ranks, one after the
                other. colocated: encoders share theirs. spread: all modules are cut over the same ranks.
            sections: of `Config` (data, training, optimizer, ...), without `model`. In `parallelism` and `planner` the
                degrees pp, tp, cp and the placement are replaced.
        Raises: ConfigError: specs that do not fit together, a module of an unknown family, or any rule of a config.
        """
        unknown = sorted(set(encoder_specs or {}) - set(self.encoders))
        if unknown:
            raise ConfigError(
                f"encoder_specs has {unknown[0]!r}, but the encoders are {', '.join(self.encoders)}; name one of these"
            )
        specs = {name: (encoder_specs or {}).get(name, ParallelSpec()) for name in self.encoders}
        specs["language"] = language_spec
        degrees = {axis: _equal(axis, specs) for axis in ("tp", "cp")}
        placed = {} if modality_parallelism == "spread" else {name: spec.pp for name, spec in specs.items()}
        parallelism = replace(
            sections.pop("parallelism", ParallelismConfig()),
            pipeline_parallel_degree=_ranks(modality_parallelism, specs),
            tensor_parallel_degree=degrees["tp"],
            context_parallel_degree=degrees["cp"],
        )
        planner = replace(sections.pop("planner", PlannerConfig()), placement=modality_parallelism)
        out = Path(folder)
        sections.setdefault("job", JobConfig(dump_folder=f"outputs/{out.name}"))
        model = self._model(out, placed)
        job = Config(model=model, parallelism=parallelism, planner=planner, **sections)
        config.check(job)
        with new_folder(out) as aside:
            for name, source in self._sources().items():
                source.save_pretrained(aside / name)
        return job

    def _sources(self) -> dict[str, ModuleSource]:
        return {name: encoder.module for name, encoder in self.encoders.items()} | {"language": self.language_model}

    def _model(self, folder: Path, ranks: Mapping[str, int]) -> ModelConfig:
        """Args: folder: where the modules will be. ranks: of each module that has ranks of its own."""
        sections: dict[str, EncoderConfig] = {}
        projector = ProjectorConfig()
        for name, encoder in self.encoders.items():
            given = encoder.projector
            own = given if isinstance(given, ProjectorConfig) else ProjectorConfig(kind=given)
            if name == "vision":
                projector = own
            reads_sound = hasattr(_config(encoder.module), "num_mel_bins")
            sections[name] = EncoderConfig(
                kind="audio" if reads_sound else "images",
                token=encoder.token,
                projector=None if name == "vision" else own,
                ranks=ranks.get(name, 0),
                **_source(folder / name, encoder.module, encoder.trainable),
            )
        language = LanguageConfig(
            ranks=ranks.get("language", 0),
            **_source(folder / "language", self.language_model, self.trainable),
            **self.others,
        )
        return ModelConfig(
            encoder=sections.pop("vision", None), projector=projector, modules=sections, language=language
        )


def _config(source: ModuleSource) -> PreTrainedConfig:
    return source.config if isinstance(source, PreTrainedModel) else source


def _source(folder: Path, source: ModuleSource, trainable: Trainable | None) -> dict[str, Any]:
    """The fields of a section that say where a module comes from and whether it trains."""
    has_weights = isinstance(source, PreTrainedModel)
    if trainable is None:
        trainable = any(p.requires_grad for p in source.parameters()) if isinstance(source, PreTrainedModel) else True
    return {"pretrained": str(folder), "weights": "pretrained" if has_weights else "random", "trainable": trainable}


def _equal(axis: str, specs: Mapping[str, ParallelSpec]) -> int:
    """The degree of an axis, which all modules share."""
    degrees = {name: getattr(spec, axis) for name, spec in specs.items()}
    if len(set(degrees.values())) > 1:
        named = ", ".join(f"{name} {axis} = {degree}" for name, degree in degrees.items())
        raise ConfigError(f"ParallelSpec: {named}; modules of one job are divided alike, give all the same {axis}")
    return int(degrees["language"])


def _ranks(placement: str, specs: Mapping[str, ParallelSpec]) -> int:
    """The number of pipeline ranks of a job."""
    counts = {name: spec.pp for name, spec in specs.items()}
    if placement == "parallel":
        return sum(counts.values())
    shared = {name: n for name, n in counts.items() if placement == "spread" or name != "language"}
    if len(set(shared.values())) > 1:
        named = ", ".join(f"{name} pp = {n}" for name, n in shared.items())
        raise ConfigError(f'ParallelSpec: {named}; with "{placement}" these modules share ranks, give all the same pp')
    return max(shared.values(), default=0) + (counts["language"] if placement == "colocated" else 0)
