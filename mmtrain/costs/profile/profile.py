"""A measured profile: the seconds of each kind of layer of a job on a machine, as a file. Pure.

`mmtrain profile` writes it as JSON, version 2: the machine, the settings that a job must share with the measured one,
a fit and its points for each kind of layer, and the times of actions, transfers and the end of a step.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mmtrain.config.config import Config
from mmtrain.costs.cost_model import HostCopy
from mmtrain.costs.noise import EXACT, Noise
from mmtrain.costs.overheads import Overheads
from mmtrain.costs.profile.fits import SizeFit, fit_sizes
from mmtrain.costs.sub_microbatch import Curve
from mmtrain.errors import ConfigError, PlanError
from mmtrain.families.shapes import FULL
from mmtrain.schedule.io import strict_json
from mmtrain.spec.layer import LayerSpec
from mmtrain.spec.model_shapes import language_shape
from mmtrain.spec.module_sizes import families
from mmtrain.spec.recomputation import Recomputation
from mmtrain.spec.spec import ModelSpec
from mmtrain.spec.vocabulary import loss_chunk_tokens
from mmtrain.spec.work_size import WorkSize

VERSION = 2
"""Version of the JSON form."""

TIMES = ("forward", "backward", "split_forward", "backward_input", "backward_weight")
"""The measured times of a layer: F and B with whole backwards; F, I and W with split backwards."""
SPLIT_TIMES = TIMES[2:]

HELD = "held_bytes"
"""Key of the bytes that autograd holds for a layer from forward to backward."""

_SIZES = tuple(f.name for f in fields(WorkSize))
_FIRST_SIZES = _SIZES[:4]
"""Sizes of works without clips; the others are written only for layers whose works have clips."""
_EARLIER_SIZES = _SIZES[:7]
"""The sizes of clips in profiles that were made when each clip was one call."""
_CLIP_WEIGHTS = ("cross_pair", "text", "clip")
"""Weights of a `SizeFit` that are written only if they are not 0."""


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One kind of layer: equal layers of a module count as one."""

    module: str
    role: str
    """`embed`, `blocks`, `blocks, windowed`, `layers`, `norm`, `projector` or `head`."""
    num_params: int
    num_trainable_params: int
    input_grad: bool
    """Whether a gradient left the layer while it was measured."""
    fits: Mapping[str, SizeFit]
    """Fits of TIMES in seconds, and of HELD in bytes if it was measured; without the fixed part in `actions`."""
    points: Mapping[str, tuple[tuple[WorkSize, float], ...]] = field(default_factory=dict)
    """The measured points of the fits: (size, seconds or bytes)."""

    @classmethod
    def fitted(
        cls, module: str, layer: LayerSpec, input_grad: bool, points: Mapping[str, tuple[tuple[WorkSize, float], ...]]
    ) -> "LayerProfile":
        """The profile of a layer, with fits of the measured points (size, seconds or bytes)."""
        fits = {name: fit_sizes([p[0] for p in of], [p[1] for p in of]) for name, of in points.items() if of}
        return cls(
            module=module,
            role=role(layer),
            num_params=layer.num_params,
            num_trainable_params=layer.num_trainable_params,
            input_grad=input_grad,
            fits=fits,
            points={name: of for name, of in points.items() if of},
        )

    def at(self, name: str, size: WorkSize) -> float:
        """The fitted seconds (of HELD, bytes) for a work; 0 if the layer has no such measurement."""
        return self.fits[name](size) if name in self.fits else 0.0


def role(layer: LayerSpec) -> str:
    """The role of a layer in its module; equal layers have one role."""
    name = layer.name.partition(".")[0]
    return name if layer.kind == FULL else f"{name}, {layer.kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """Seconds of the end of a step on one rank: the time outside of actions and waits."""

    fixed_s: float = 0.0
    """Checks of the batch, clipping, the optimizer's calls."""
    param_s: float = 0.0
    """Norm, clipping and update of one trainable parameter."""
    pipeline_s: float = 0.0
    """Collectives between several pipeline ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferProfile:
    """A transfer between two pipeline ranks."""

    latency_s: float
    byte_s: float
    """Seconds per byte: 1 / bandwidth."""
    error: float = 0.0
    """Mean relative error of latency_s + byte_s x bytes over the measured sizes."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured times of the layers of a job on a machine."""

    machine: Mapping[str, str | int | float]
    """Date, processor, versions, threads, load; for output only."""
    job: Mapping[str, str | int]
    """The settings that a job must share with the measured one: see `job_of`."""
    recomputation: Recomputation
    """The recomputation in backwards while they were measured."""
    layers: tuple[LayerProfile, ...]
    overheads: Overheads
    """Seconds of actions and messages in addition to layers and transfers."""
    noise: Noise = EXACT
    """How far the measured seconds of actions lay from the fits."""
    step: StepProfile
    transfer: TransferProfile | None = None
    """None: it was measured on one pipeline rank."""
    host_copy: HostCopy | None = None
    """None: not measured."""
    repeats: Mapping[str, float] = field(default_factory=dict)
    """`selective`, `recompute` -> time added to a block's forward and backward, as a fraction of its forward."""
    curve: Curve | None = None
    """Seconds of a vision work by its number of images, or of a DiT work by its number of clips; None: neither."""

    def layer(self, module: str, layer: LayerSpec) -> LayerProfile:
        """The profile of a layer. Raises: PlanError: the layer was not measured."""
        wanted_role = role(layer)
        for profiled in self.layers:
            if (profiled.module, profiled.role) == (module, wanted_role):
                return profiled
        roles = ", ".join(f"{x.module} {x.role}" for x in self.layers)
        raise PlanError(f"the profile has no {module} {wanted_role} (layer {layer.name}); it has {roles}")

    # ------------------------------------------------------------------------------------- as JSON

    def to_json(self) -> str:
        """The profile as JSON text of version 2; `from_json` returns an equal profile."""
        table: dict[str, Any] = {
            "version": VERSION,
            "machine": dict(self.machine),
            "job": dict(self.job),
            "recomputation": {"enable": self.recomputation.enable, "save_ops": list(self.recomputation.save_ops)},
            "overheads": asdict(self.overheads),
            "noise": asdict(self.noise),
            "step": asdict(self.step),
            "transfer": asdict(self.transfer) if self.transfer else None,
            "curve": asdict(self.curve) if self.curve else None,
            "host_copy": asdict(self.host_copy) if self.host_copy else None,
            "repeats": dict(self.repeats),
        }
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items()]
        body = ",\n".join(_layer_to_json(layer) for layer in self.layers)
        return "{\n" + ",\n".join([*lines, f' "layers": [\n{body}\n ]']) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> "Profile":
        """The profile in a JSON text. Raises: PlanError: it breaks a rule of the format; names the dotted path."""
        return _read(strict_json.loads(text))

    @classmethod
    def read(cls, path: str | Path) -> "Profile":
        """The profile in a .json or .json.gz file. Raises: PlanError: the file is missing, or its content is wrong."""
        try:
            return cls.from_json(strict_json.read_text(path))
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error

    def write(self, path: str | Path) -> None:
        """Writes the JSON form to a .json or .json.gz file."""
        strict_json.write_text(path, self.to_json())


def job_of(config: Config) -> dict[str, str | int]:
    """The settings on which the times of layers depend: families, dtype, kernels, and how ranks divide a work."""
    section, training = config.parallelism, config.training
    return {
        **families(config.model),
        "dtype": training.param_dtype,
        "attention_backend": training.attention_backend,
        "attention_part_blocks": training.attention_part_blocks,
        "loss_chunk_tokens": loss_chunk_tokens(config, language_shape(config.model).vocab_size),
        "tensor_parallel_degree": section.tensor_parallel_degree,
        "tensor_parallel_rows": section.tensor_parallel_rows,
        "context_parallel_degree": section.context_parallel_degree,
        "context_parallel_head_groups": section.context_parallel_head_groups,
        "encoder_tensor_parallel": section.encoder_tensor_parallel,
        "encoder_context_parallel": section.encoder_context_parallel,
    }


_UNWRITTEN = {"tensor_parallel_rows": "divided", "attention_part_blocks": 0, "context_parallel_head_groups": 1,
              "loss_chunk_tokens": 0}  # fmt: skip
"""Setting that older files do not have -> the value with which they were measured."""


def check_fits(profile: Profile, config: Config, spec: ModelSpec, where: str) -> None:
    """Checks that a profile is of the job's model, dtype and submesh.

    Args: where: the profile's file, for the message.
    Raises: ConfigError: it is not; names the value of the profile and that of the job.
    """
    advice = f"measure this job with `mmtrain profile`, or set planner.profile to another file than {where}"
    for key, value in job_of(config).items():
        measured = profile.job.get(key, _UNWRITTEN.get(key, "none"))
        if measured != value:
            raise ConfigError(
                f"planner.profile: {where} was measured with {key} = {measured}, but this job has {value}; {advice}"
            )
    for module in spec.modules:
        section = config.model.sections.get(module.section)
        chooses = bool(getattr(section, "trainable_layers", ""))
        for layer in module.layers:
            try:
                profiled = profile.layer(module.name, layer)
            except PlanError as error:
                raise ConfigError(f"planner.profile: {where}: {error}; {advice}") from error
            if chooses and not layer.trainable:
                continue  # measured as one of the layers that train
            for what in ("num_params", "num_trainable_params"):
                measured, expected = getattr(profiled, what), getattr(layer, what)
                if measured != expected:
                    raise ConfigError(
                        f"planner.profile: {where} was measured with {module.name} {profiled.role} of {what} = "
                        f"{measured:,}, but {layer.name} of this job has {expected:,}; {advice}"
                    )


# --------------------------------------------------------------------------------------------------- JSON


def _layer_to_json(layer: LayerProfile) -> str:
    head = {f.name: getattr(layer, f.name) for f in fields(layer) if f.name not in ("fits", "points")}
    lines = [f"   {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    fits = ",\n".join(f"    {json.dumps(name)}: {json.dumps(_fit_to_json(fit))}" for name, fit in layer.fits.items())
    sizes = _FIRST_SIZES
    if any(size.clips for rows in layer.points.values() for size, _ in rows):
        sizes = _SIZES
    points = ",\n".join(
        f"    {json.dumps(name)}: "
        + json.dumps([[*(getattr(size, key) for key in sizes), value] for size, value in rows])
        for name, rows in layer.points.items()
    )
    lines += [f'   "fits": {{\n{fits}\n   }}', f'   "points": {{\n{points}\n   }}']
    return "  {\n" + ",\n".join(lines) + "\n  }"


def _fit_to_json(fit: SizeFit) -> dict[str, float]:
    return {name: weight for name, weight in asdict(fit).items() if weight or name not in _CLIP_WEIGHTS}


def _read(table: Any) -> Profile:
    keys = ("version", "machine", "job", "recomputation", "overheads", "noise", "step", "transfer", "curve", "layers")
    strict_json.fields(table, "", keys, optional=("host_copy", "repeats"))
    if strict_json.integer(table["version"], "version") != VERSION:
        raise PlanError(
            f"version = {table['version']}; this program reads version {VERSION}, measure again with `mmtrain profile`"
        )
    recomputation = table["recomputation"]
    strict_json.fields(recomputation, "recomputation", ("enable", "save_ops"))
    if not isinstance(recomputation["enable"], bool):
        raise PlanError(f"recomputation.enable = {recomputation['enable']!r} must be true or false")
    ops = strict_json.items(recomputation["save_ops"], "recomputation.save_ops")
    return Profile(
        machine=_plain(table["machine"], "machine"),
        job=_plain(table["job"], "job"),
        recomputation=Recomputation(
            enable=recomputation["enable"],
            save_ops=tuple(strict_json.string(op, f"recomputation.save_ops[{i}]") for i, op in enumerate(ops)),
        ),
        overheads=Overheads(**_read_numbers(table["overheads"], "overheads", Overheads)),
        noise=Noise(**_read_numbers(table["noise"], "noise", Noise)),
        step=StepProfile(**_read_numbers(table["step"], "step", StepProfile)),
        transfer=_read_transfer(table["transfer"]),
        host_copy=_read_host_copy(table.get("host_copy")),
        repeats=_read_repeats(table.get("repeats", {})),
        curve=_read_curve(table["curve"]),
        layers=tuple(
            _read_layer(value, f"layers[{i}]") for i, value in enumerate(strict_json.items(table["layers"], "layers"))
        ),
    )


def _read_transfer(value: Any) -> TransferProfile | None:
    if value is None:
        return None
    transfer = TransferProfile(**_read_numbers(value, "transfer", TransferProfile))
    if not transfer.byte_s:
        raise PlanError("transfer.byte_s = 0; a transfer takes time, it must be above 0")
    return transfer


def _read_repeats(value: Any) -> dict[str, float]:
    strict_json.fields(value, "repeats", (), optional=("selective", "recompute"))
    return {name: _read_number(fraction, f"repeats.{name}") for name, fraction in value.items()}


def _read_host_copy(value: Any) -> HostCopy | None:
    if value is None:
        return None
    strict_json.fields(value, "host_copy", ("bytes_per_s", "overlaps"))
    rate = strict_json.number(value["bytes_per_s"], "host_copy.bytes_per_s")
    if rate <= 0 or not isinstance(value["overlaps"], bool):
        raise PlanError(f"host_copy = {value!r}; bytes_per_s must be above 0, and overlaps true or false")
    return HostCopy(bytes_per_s=rate, overlaps=value["overlaps"])


def _read_curve(value: Any) -> Curve | None:
    if value is None:
        return None
    strict_json.fields(value, "curve", ("patches", "seconds"))
    rows = strict_json.items(value["seconds"], "curve.seconds")
    points = []
    for i, row in enumerate(rows):
        cells = strict_json.items(row, f"curve.seconds[{i}]")
        if len(cells) != 2:
            raise PlanError(f"curve.seconds[{i}] has {len(cells)} entries; it is [images or clips, seconds]")
        number = strict_json.integer(cells[0], f"curve.seconds[{i}][0]")
        points.append((number, _read_number(cells[1], f"curve.seconds[{i}][1]")))
    return Curve(patches=strict_json.integer(value["patches"], "curve.patches"), seconds=tuple(points))


def _read_layer(value: Any, where: str) -> LayerProfile:
    strict_json.fields(value, where, [f.name for f in fields(LayerProfile)])
    if not isinstance(value["input_grad"], bool):
        raise PlanError(f"{where}.input_grad = {value['input_grad']!r} must be true or false")
    for name in ("fits", "points"):
        strict_json.fields(value[name], f"{where}.{name}", (), (*TIMES, HELD))
    return LayerProfile(
        module=strict_json.string(value["module"], f"{where}.module"),
        role=strict_json.string(value["role"], f"{where}.role"),
        num_params=strict_json.integer(value["num_params"], f"{where}.num_params"),
        num_trainable_params=strict_json.integer(value["num_trainable_params"], f"{where}.num_trainable_params"),
        input_grad=value["input_grad"],
        fits={
            n: SizeFit(**_read_numbers(fit, f"{where}.fits.{n}", SizeFit, optional=_CLIP_WEIGHTS))
            for n, fit in value["fits"].items()
        },
        points={n: _read_points(of, f"{where}.points.{n}") for n, of in value["points"].items()},
    )


def _read_points(value: Any, where: str) -> tuple[tuple[WorkSize, float], ...]:
    points = []
    for i, row in enumerate(strict_json.items(value, where)):
        cells = strict_json.items(row, f"{where}[{i}]")
        names = _SIZES if len(cells) > len(_FIRST_SIZES) + 1 else _FIRST_SIZES
        names = _EARLIER_SIZES if len(cells) == len(_EARLIER_SIZES) + 1 else names
        if len(cells) != len(names) + 1:
            raise PlanError(f"{where}[{i}] has {len(cells)} entries; it is [{', '.join(names)}, amount]")
        sizes = {n: strict_json.integer(c, f"{where}[{i}]") for n, c in zip(names, cells, strict=False)}
        if names is _EARLIER_SIZES:
            sizes["calls"] = sizes["clips"]
        points.append((WorkSize(**sizes), _read_number(cells[-1], f"{where}[{i}]")))
    return tuple(points)


def _read_numbers(value: Any, where: str, cls: Any, optional: tuple[str, ...] = ()) -> dict[str, float]:
    strict_json.fields(value, where, [f.name for f in fields(cls) if f.name not in optional], optional)
    return {name: _read_number(amount, f"{where}.{name}") for name, amount in value.items()}


def _read_number(value: Any, where: str) -> float:
    amount = strict_json.number(value, where)
    if not 0 <= amount < float("inf"):
        raise PlanError(f"{where} = {value}; it must be finite and at least 0")
    return amount


def _plain(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise PlanError(f"{where} must be an object")
    for key, cell in value.items():
        if type(cell) not in (str, int, float):
            raise PlanError(f"{where}.{key} = {cell!r} must be a text or a number")
    return dict(value)
