"""A measured profile as a text table. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mmtrain.config.model import section_of
from mmtrain.costs.overheads import DISPATCH
from mmtrain.costs.profile.calibration import LAUNCH, Calibration
from mmtrain.costs.profile.fits import SizeFit
from mmtrain.costs.profile.profile import HELD, TIMES, LayerProfile, Profile, role
from mmtrain.costs.sub_microbatch import SHARE, Curve, smallest_efficient
from mmtrain.modality.catalogue import division_of, modality_of
from mmtrain.modality.submesh import Submesh
from mmtrain.spec.layer import LayerSpec
from mmtrain.spec.spec import ModelSpec, ModuleSpec

_LABELS = {
    "forward": "F",
    "backward": "B",
    "split_forward": "F, split",
    "backward_input": "I",
    "backward_weight": "W",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """Weights of a fit that share a column."""

    weights: tuple[str, ...]
    formula: str
    head: str
    scale: float
    clips: bool | None = None
    """The models that have the column. True: a column of models with a DiT; False: of other models; None: of all."""


_COLUMNS = (
    _Column(weights=("row",), formula="row x rows", head="row us", scale=1e6),
    _Column(weights=("pair", "window_pair"), formula="pair x attended pairs", head="pair ns", scale=1e9),
    _Column(weights=("cross_pair",), formula="cross x pairs with text tokens", head="cross ns", scale=1e9, clips=True),
    _Column(weights=("text",), formula="text x text tokens", head="text us", scale=1e6, clips=True),
    _Column(weights=("clip",), formula="clip x clips", head="clip us", scale=1e6, clips=True),
    _Column(weights=("output",), formula="output x rows that leave", head="out us", scale=1e6, clips=False),
    _Column(weights=("fixed",), formula="fixed", head="fixed us", scale=1e6),
)


def table(profile: Profile, spec: ModelSpec, submesh: Submesh, calibration: Calibration | None = None) -> str:
    """The profile as text: layers with their fits, actions, transfers, ends of steps, held bytes, sub-microbatches.

    Args: submesh: the submesh of the job.
    """
    machine = profile.machine
    lines = [
        f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads a process, "
        f"{machine['copies']} copies side by side, torch {machine['torch']}, load {machine['load']}, {machine['date']}",
        "",
    ]
    columns = [column for column in _COLUMNS if column.clips is None or column.clips == spec.reads_clips]
    formula = " + ".join(column.formula for column in columns)
    heads = " ".join(f"{column.head:>8s}" for column in columns)
    lines += [
        f"A layer takes  {formula}  seconds.",
        f"{'layer':22s} {'':9s}{'at the largest work':>32s} {'GFLOP/s':>8s} | {heads} | error of the fit: mean, worst",
    ]
    for layer in profile.layers:
        lines += _layer_lines(layer, _spec_of(layer, spec), columns)
    lines += ["", *_lines_below_layers(profile, spec, submesh)]
    if calibration:
        lines += ["", *_calibration_lines(calibration)]
    return "\n".join(lines) + "\n"


def _spec_of(layer: LayerProfile, spec: ModelSpec) -> LayerSpec:
    return next(layer_spec for layer_spec in spec.module(layer.module).layers if role(layer_spec) == layer.role)


def _layer_lines(layer: LayerProfile, spec: LayerSpec, columns: Sequence[_Column]) -> Iterator[str]:
    name = f"{layer.module} {layer.role}"
    for key in TIMES:
        if key not in layer.fits or not layer.points.get(key):
            continue
        fit = layer.fits[key]
        size, seconds = max(layer.points[key], key=lambda point: point[1])
        if not seconds:
            continue
        flops = spec.flops(size, input_grad=layer.input_grad)
        counted = {
            "backward": flops.backward_input + flops.backward_weight,
            "backward_input": flops.backward_input if spec.splits_backward else flops.total - flops.forward,
            "backward_weight": flops.backward_weight if spec.splits_backward else 0.0,
        }.get(key, flops.forward)
        where = f"{seconds * 1e3:.2f} ms, {size.rows:,} rows"
        rate = f"{counted / seconds / 1e9:8.1f}" if counted else f"{'-':>8s}"
        yield f"{name:22s} {_LABELS[key]:9s}{where:>32s} {rate} | {_weights(fit, columns)}"
        name = ""


def _weights(fit: SizeFit, columns: Sequence[_Column]) -> str:
    cells = " ".join(f"{column.scale * sum(getattr(fit, name) for name in column.weights):8.3f}" for column in columns)
    return f"{cells} | {100 * fit.error:5.1f} %, {100 * fit.worst:.1f} %"


def _lines_below_layers(profile: Profile, spec: ModelSpec, submesh: Submesh) -> Iterator[str]:
    overheads, step, transfer = profile.overheads, profile.step, profile.transfer
    seconds = [(kind.value, getattr(overheads, name)) for kind, name in DISPATCH.items()]
    actions = ", ".join(f"{kind} {1e3 * value:.2f} ms" for kind, value in seconds)
    yield f"Each action in addition to its layers: {actions}."
    noise = profile.noise
    yield (
        f"Actual seconds of actions lie {100 * noise.forward:.1f} % (F), {100 * noise.backward:.1f} % (B, I) and "
        f"{100 * noise.backward_weight:.1f} % (W) from these; {100 * noise.shared:.0f} % of the variance is common to "
        "the actions of one step."
    )
    yield (
        f"End of a step: {1e3 * step.fixed_s:.2f} ms + {1e9 * step.param_s:.2f} ns a trainable parameter of the rank"
        + (f" + {1e3 * step.pipeline_s:.2f} ms with several pipeline ranks." if step.pipeline_s else ".")
    )
    if transfer:
        yield (
            f"Transfer between pipeline ranks: {1e6 * transfer.latency_s:.0f} us + bytes / "
            f"{1e-9 / transfer.byte_s:.2f} GB/s (mean error {100 * transfer.error:.0f} %); "
            f"of the sender {1e6 * overheads.send_s:.0f} us, of the receiver {1e6 * overheads.receive_s:.0f} us, and "
            f"{1e6 * overheads.message_s:.0f} us more where it waits."
        )
    ratios = []
    for layer in profile.layers:
        if HELD in layer.fits:
            size, measured = max(layer.points[HELD], key=lambda point: point[1])
            division = division_of(submesh, spec.module(layer.module))
            planned = _spec_of(layer, spec).of_rank(division).activation_bytes(size)
            if measured and planned:
                ratios.append(f"{layer.module} {layer.role} {measured / planned:.2f}")
    if ratios:
        yield f"Bytes held from F to B, measured over planned: {', '.join(ratios)}."
    if profile.curve and spec.counted:
        yield from _curve_lines(profile.curve, spec.counted)


def _curve_lines(curve: Curve, module: ModuleSpec) -> Iterator[str]:
    rule, kind = smallest_efficient(curve), modality_of(module)
    units = f"{kind.item}s"
    steps = ", ".join(f"{number}: {100 * of_best:.0f} %" for number, of_best in rule.efficiency)
    yield f"{units.capitalize()} a second of a {kind.works} work, relative to the best, by their number: {steps}."
    end = "; more than were measured may be better still" if rule.still_rises else ""
    yield (
        f"{section_of(module.name)}.sub_microbatch_size = {rule.size} is the smallest with {100 * SHARE:.0f} % of the "
        f"best, for {units} of {curve.patches} {kind.parts}{end}."
    )


def _calibration_lines(calibration: Calibration) -> Iterator[str]:
    factors = ", ".join(
        f"{'fixed part of a launch' if name == LAUNCH else name} {factor:.2f}"
        for name, factor in calibration.factors.items()
    )
    yield (
        f"Hardware profile {calibration.hardware.name}: mean error of a layer {100 * calibration.error_before:.0f} %; "
        f"with the factors a below {100 * calibration.error:.1f} %."
    )
    yield f"a, measured over simulated seconds: {factors}."
