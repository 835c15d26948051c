"""The sizes of a frozen VAE's latents, and the convolutions of its encoder, for planning and data. Pure; no weights.

To support a class of VAEs, add a function here that reads its config, and its family.

Amounts are `Rates` of a work: `row` counts positions of a latent frame times frames of pixels; `output` counts
positions of a latent frame times latent frames. A VAE that compresses time encodes the first frame by itself, so
1 + 4 k frames become 1 + k, and the number of frames at each level between is a linear function of the two.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mmtrain.config.model import ModelConfig, VaeConfig
from mmtrain.errors import ConfigError
from mmtrain.spec.model_configs import dit_config, vae_config
from mmtrain.spec.work_size import Rates

Size = tuple[int, int, int]
"""Frames, rows and columns."""

PIXEL_CHANNELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentScale:
    """The compression of a VAE in time and space; 1 and 1 in a job without a VAE, whose latents are given."""

    frames: int = 1
    """Frames after the first one that become one latent frame."""
    side: int = 1
    """Pixels along a side of a frame that become one latent position."""

    def frames_of(self, latent_frames: int) -> int:
        """Number of frames of pixels that become `latent_frames` latent frames."""
        return 1 + self.frames * (latent_frames - 1)

    def latent_frames(self, frames: int) -> int:
        """Number of whole latent frames of `frames` frames of pixels, at least one; remaining frames are cut off."""
        return 1 + (frames - 1) // self.frames

    def pixels(self, latents: Size) -> Size:
        """Frames, rows and columns of pixels. Args: latents: frames, rows and columns of latents."""
        frames, rows, columns = latents
        return self.frames_of(frames), rows * self.side, columns * self.side


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConvolution:
    """One convolution (or linear layer) of the encoder, with its bias."""

    name: str
    inputs: int
    outputs: int
    taps: int
    """Size of the kernel, over all axes."""
    positions: Rates
    """Output positions of a work, each with all output channels."""
    normed: bool = False
    """Whether a norm comes before it."""
    activated: bool = False
    """Whether an activation function comes before it."""

    @property
    def flops(self) -> Rates:
        """FLOPs of a forward."""
        return _times(self.positions, 2 * self.taps * self.inputs * self.outputs)

    @property
    def num_params(self) -> int:
        """Number of parameters of weight and bias, without those of a norm."""
        return (self.taps * self.inputs + 1) * self.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeShape:
    """The sizes of a VAE's encoder."""

    model_type: str
    scale: LatentScale
    channels: int
    """Channels of the latents."""
    shift: tuple[float, ...]
    """[channels]: subtracted from the mode of the posterior."""
    factor: tuple[float, ...]
    """[channels]: multiplied with the difference."""
    convolutions: tuple[EncoderConvolution, ...]
    """The convolutions in the order in which they run."""
    norm_params: int
    """Parameters of a norm for each channel."""
    attention_width: int
    """Columns of the attention among the positions of a latent frame, with one head; 0: there is no attention."""

    @property
    def num_params(self) -> int:
        """Number of parameters of the encoder, including the convolution after it."""
        norms = sum(c.inputs for c in self.convolutions if c.normed) * self.norm_params
        return sum(c.num_params for c in self.convolutions) + norms

    @property
    def flops(self) -> Rates:
        """Forward FLOPs of all convolutions."""
        return sum((c.flops for c in self.convolutions), Rates())

    @property
    def attention_flops(self) -> Rates:
        """Forward FLOPs of the attention."""
        return Rates(pair=4 * self.attention_width)


def vae_shape(model: ModelConfig) -> VaeShape:
    """The sizes of the VAE of a model that has one.

    Raises: ConfigError: the config is wrong or not supported, or the DiT does not read latents of as many channels.
    """
    assert model.vae is not None
    shape = _read(model.vae)
    if model.dit is not None and (channels := dit_config(model.dit)["in_channels"]) != shape.channels:
        raise ConfigError(
            f"{_name(model.vae)} makes latents of {shape.channels} channels, but model.dit has in_channels = "
            f"{channels}; make the two agree"
        )
    return shape


def latent_scale(section: VaeConfig) -> LatentScale:
    """The compression of a VAE. Errors: see `vae_shape`."""
    return _read(section).scale


def _read(section: VaeConfig) -> VaeShape:
    values = vae_config(section)
    return _SHAPES[values["model_type"]](values, _name(section))


def _name(section: VaeConfig) -> str:
    return f"model.vae ({section.pretrained})" if section.pretrained else "model.vae.config"


# -------------------------------------------------------------------------------------------- AutoencoderKL


def _autoencoder_kl(values: dict[str, Any], where: str) -> VaeShape:
    """AutoencoderKL, which encodes each frame as an image."""
    widths, kinds = values["block_out_channels"], values["down_block_types"]
    groups = values["norm_num_groups"]
    if not widths or len(kinds) != len(widths) or set(kinds) != {"DownEncoderBlock2D"}:
        raise ConfigError(
            f"{where}: down_block_types = {list(kinds)} with block_out_channels = {list(widths)}; there must be one "
            '"DownEncoderBlock2D" for each'
        )
    for width in widths:
        if width % groups:
            raise ConfigError(
                f"{where}: block_out_channels has {width}, no multiple of norm_num_groups = {groups}; change one"
            )
    _check_pixels(values, where)
    channels, last_level = values["latent_channels"], len(widths) - 1

    def positions(level: int) -> Rates:
        return Rates(row=4 ** (last_level - level))

    convolutions = [EncoderConvolution(name="conv_in", inputs=3, outputs=widths[0], taps=9, positions=positions(0))]
    inputs = widths[0]
    for level, width in enumerate(widths):
        for i in range(values["layers_per_block"]):
            convolutions += _residual(f"down_blocks.{level}.resnets.{i}", inputs, width, 9, positions(level))
            inputs = width
        if level < last_level:
            name = f"down_blocks.{level}.downsampler"
            convolutions.append(
                EncoderConvolution(name=name, inputs=width, outputs=width, taps=9, positions=positions(level + 1))
            )
    attends = values["mid_block_add_attention"]
    convolutions += _tail(
        inputs, 2 * channels, 9, positions(last_level), attends=attends, quantises=values["use_quant_conv"]
    )
    for key in ("latents_mean", "latents_std"):
        if values.get(key) is not None:
            raise ConfigError(
                f"{where}: {key} is given, but latents of this class are (x - shift_factor) * scaling_factor; remove it"
            )
    shift = values.get("shift_factor")
    if isinstance(shift, bool) or not isinstance(shift, int | float | None):
        raise ConfigError(f"{where}: shift_factor = {shift!r}; it must be a number")
    return VaeShape(
        model_type=values["model_type"],
        scale=LatentScale(side=2**last_level),
        channels=channels,
        shift=(float(shift or 0.0),) * channels,
        factor=(float(values["scaling_factor"]),) * channels,
        convolutions=tuple(convolutions),
        norm_params=2,
        attention_width=inputs if attends else 0,
    )


# ---------------------------------------------------------------------------------------------------- Wan


def _autoencoder_kl_wan(values: dict[str, Any], where: str) -> VaeShape:
    """AutoencoderKLWan, whose convolutions are causal in time; two of its levels halve the number of frames."""
    _check_wan(values, where)
    widths = [values["base_dim"] * factor for factor in values["dim_mult"]]
    halves_frames, channels = values["temperal_downsample"], values["z_dim"]
    last_level = len(widths) - 1
    base_dim = values["base_dim"]
    num_halvings = 0

    def positions(level: int) -> Rates:
        return _times(_frames(num_halvings), 4 ** (last_level - level))

    convolutions = [EncoderConvolution(name="conv_in", inputs=3, outputs=base_dim, taps=27, positions=positions(0))]
    inputs, number = base_dim, 0
    for level, width in enumerate(widths):
        for _ in range(values["num_res_blocks"]):
            convolutions += _residual(f"down_blocks.{number}", inputs, width, 27, positions(level))
            inputs, number = width, number + 1
        if level == last_level:
            break
        name = f"down_blocks.{number}"
        positions_below = positions(level + 1)
        convolutions.append(
            EncoderConvolution(name=f"{name}.resample", inputs=width, outputs=width, taps=9, positions=positions_below)
        )
        number += 1
        if halves_frames[level]:
            num_halvings += 1
            later_positions = _times(_later_frames(num_halvings), 4 ** (last_level - level - 1))
            convolutions.append(
                EncoderConvolution(name=f"{name}.time", inputs=width, outputs=width, taps=3, positions=later_positions)
            )
    convolutions += _tail(inputs, 2 * channels, 27, positions(last_level), attends=True, quantises=True)
    return VaeShape(
        model_type=values["model_type"],
        scale=LatentScale(frames=4, side=2**last_level),
        channels=channels,
        shift=tuple(float(x) for x in values["latents_mean"]),
        factor=tuple(1 / float(x) for x in values["latents_std"]),
        convolutions=tuple(convolutions),
        norm_params=1,
        attention_width=inputs,
    )


def _check_wan(values: dict[str, Any], where: str) -> None:
    """Refuses values that the class has not, or that do not fit together."""
    factors, halves_frames, channels = values["dim_mult"], values["temperal_downsample"], values["z_dim"]
    if not factors or len(halves_frames) != len(factors) - 1 or sum(halves_frames) != 2:
        raise ConfigError(
            f"{where}: temperal_downsample = {list(halves_frames)} with dim_mult = {list(factors)}; it has "
            "one entry less than dim_mult, two of them true, since the class encodes four frames at once"
        )
    for key, absent in (("is_residual", False), ("patch_size", None), ("attn_scales", ())):
        if (value := values.get(key, absent)) and value != absent:
            raise ConfigError(
                f"{where}: {key} = {value!r} is of another kind of VAE (Wan 2.2), which is not supported; choose "
                "one of Wan 2.1"
            )
    for key in ("latents_mean", "latents_std"):
        if len(values[key]) != channels:
            raise ConfigError(
                f"{where}: {key} has {len(values[key])} numbers, but there are z_dim = {channels} latent channels; "
                "give one for each"
            )
    if min(values["latents_std"]) <= 0:
        raise ConfigError(f"{where}: latents_std = {list(values['latents_std'])}; each must be above 0")
    _check_pixels(values, where)


def _frames(halved: int) -> Rates:
    """Frames for each position after 0, 1 or 2 halvings: 1 + 4 k, 1 + 2 k, or 1 + k."""
    remaining = 4 / 2**halved
    return Rates(row=(remaining - 1) / 3, output=(4 - remaining) / 3)


def _later_frames(halved: int) -> Rates:
    """The frames of `_frames` without the first one, which the strided convolution over time leaves out."""
    remaining = 4 / 2**halved
    return Rates(row=remaining / 3, output=-remaining / 3)


# --------------------------------------------------------------------------------------------------- both


def _residual(name: str, inputs: int, outputs: int, taps: int, positions: Rates) -> Iterator[EncoderConvolution]:
    """A residual block: two convolutions with norms before them, and one in the shortcut if the width changes."""
    for convolution, width in (("conv1", inputs), ("conv2", outputs)):
        yield EncoderConvolution(
            name=f"{name}.{convolution}",
            inputs=width,
            outputs=outputs,
            taps=taps,
            positions=positions,
            normed=True,
            activated=True,
        )
    if inputs != outputs:
        yield EncoderConvolution(name=f"{name}.shortcut", inputs=inputs, outputs=outputs, taps=1, positions=positions)


def _tail(
    width: int, outputs: int, taps: int, positions: Rates, *, attends: bool, quantises: bool
) -> Iterator[EncoderConvolution]:
    """The middle block and the last convolutions."""
    yield from _residual("mid_block.resnets.0", width, width, taps, positions)
    if attends:
        yield EncoderConvolution(
            name="mid_block.qkv", inputs=width, outputs=3 * width, taps=1, positions=positions, normed=True
        )
        yield EncoderConvolution(name="mid_block.proj", inputs=width, outputs=width, taps=1, positions=positions)
    yield from _residual("mid_block.resnets.1", width, width, taps, positions)
    yield EncoderConvolution(
        name="conv_out", inputs=width, outputs=outputs, taps=taps, positions=positions, normed=True, activated=True
    )
    if quantises:
        yield EncoderConvolution(name="quant_conv", inputs=outputs, outputs=outputs, taps=1, positions=positions)


def _check_pixels(values: dict[str, Any], where: str) -> None:
    if values["in_channels"] != PIXEL_CHANNELS:
        raise ConfigError(f"{where}: in_channels = {values['in_channels']}; pixels are read as RGB, so set it to 3")


def _times(rates: Rates, factor: float) -> Rates:
    return Rates(row=rates.row * factor, output=rates.output * factor)


_SHAPES: dict[str, Callable[[dict[str, Any], str], VaeShape]] = {
    "autoencoder_kl": _autoencoder_kl,
    "autoencoder_kl_wan": _autoencoder_kl_wan,
}
