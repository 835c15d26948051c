"""What planning and data need of a frozen VAE's encoder: the sizes of latents, and its convolutions. Pure; no weights.

A class of VAEs is supported by one function here, which reads its config, and one entry of `models.vae.HOSTS`, which
calls it.

Amounts are in `Rates` of a work: `row`, places of a latent frame times frames of pixels; `output`, places of a latent
frame times latent frames. Of a VAE that joins frames the first frame stays alone, so 1 + 4 k frames become 1 + k, and
whatever happens halfway is a linear function of the two.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mmtrain.config.model import ModelConfig, VaeConfig
from mmtrain.errors import ConfigError
from mmtrain.spec.families import dit_config, vae_config
from mmtrain.spec.spec import Rates

Size = tuple[int, int, int]
"""Frames, rows and columns."""

PIXEL_CHANNELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentScale:
    """How much of a clip becomes one latent place; of a job without a VAE, whose latents are given, one of one."""

    frames: int = 1
    """Frames behind the first one that become one latent frame."""
    side: int = 1
    """Pixels along a side of a frame that become one latent place."""

    def frames_of(self, latent_frames: int) -> int:
        """Frames that become so many latent ones."""
        return 1 + self.frames * (latent_frames - 1)

    def latent_frames(self, frames: int) -> int:
        """Latent frames of the longest part of so many frames, at least one, that makes whole ones."""
        return 1 + (frames - 1) // self.frames

    def pixels(self, latents: Size) -> Size:
        """Frames, rows and columns of the pixels of latents."""
        frames, rows, columns = latents
        return self.frames_of(frames), rows * self.side, columns * self.side


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConvolution:
    """One convolution (or linear layer) of the encoder, with its bias."""

    name: str
    inputs: int
    outputs: int
    taps: int
    """Inputs of one output, along all axes."""
    places: Rates
    """Results of a work, each of all output channels."""
    normed: bool = False
    """Whether a norm comes before it."""
    activated: bool = False
    """Whether an activation function comes before it."""

    @property
    def flops(self) -> Rates:
        """Of a forward."""
        return _times(self.places, 2 * self.taps * self.inputs * self.outputs)

    @property
    def num_params(self) -> int:
        """Weight and bias; of a norm nothing."""
        return (self.taps * self.inputs + 1) * self.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeShape:
    """The numbers of a VAE's encoder."""

    model_type: str
    scale: LatentScale
    channels: int
    """Of the latents."""
    shift: tuple[float, ...]
    """[channels]: what is subtracted from the mode of the posterior."""
    factor: tuple[float, ...]
    """[channels]: by what it is then multiplied."""
    convolutions: tuple[EncoderConvolution, ...]
    """In the order in which they run."""
    norm_params: int
    """Parameters of a norm for each channel."""
    attention_width: int
    """Columns of the attention among the places of a latent frame, which has one head; 0: there is none."""

    @property
    def num_params(self) -> int:
        """Of the encoder, with the convolution behind it."""
        norms = sum(c.inputs for c in self.convolutions if c.normed) * self.norm_params
        return sum(c.num_params for c in self.convolutions) + norms

    @property
    def flops(self) -> Rates:
        """Of all convolutions, forward."""
        return sum((c.flops for c in self.convolutions), Rates())

    @property
    def attention_flops(self) -> Rates:
        """Of the attention, forward."""
        return Rates(pair=4 * self.attention_width)


def vae_shape(model: ModelConfig) -> VaeShape:
    """The numbers of the VAE of a model that has one.

    Raises: ConfigError: a config that the class cannot have or that is not supported, or latents that the DiT does not
        read.
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
    """How much becomes one latent place. Errors: see `vae_shape`."""
    return _read(section).scale


def _read(section: VaeConfig) -> VaeShape:
    values = vae_config(section)
    return _SHAPES[values["model_type"]](values, _name(section))


def _name(section: VaeConfig) -> str:
    return f"model.vae ({section.pretrained})" if section.pretrained else "model.vae.config"


# -------------------------------------------------------------------------------------------- AutoencoderKL


def _autoencoder_kl(values: dict[str, Any], where: str) -> VaeShape:
    """AutoencoderKL: each frame by itself, as an image."""
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
    channels, last = values["latent_channels"], len(widths) - 1

    def places(level: int) -> Rates:
        return Rates(row=4 ** (last - level))

    found = [EncoderConvolution(name="conv_in", inputs=3, outputs=widths[0], taps=9, places=places(0))]
    before = widths[0]
    for level, width in enumerate(widths):
        for i in range(values["layers_per_block"]):
            found += _residual(f"down_blocks.{level}.resnets.{i}", before, width, 9, places(level))
            before = width
        if level < last:
            name = f"down_blocks.{level}.downsampler"
            found.append(EncoderConvolution(name=name, inputs=width, outputs=width, taps=9, places=places(level + 1)))
    attends = values["mid_block_add_attention"]
    found += _tail(before, 2 * channels, 9, places(last), attends=attends, quantises=values["use_quant_conv"])
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
        scale=LatentScale(side=2**last),
        channels=channels,
        shift=(float(shift or 0.0),) * channels,
        factor=(float(values["scaling_factor"]),) * channels,
        convolutions=tuple(found),
        norm_params=2,
        attention_width=before if attends else 0,
    )


# ---------------------------------------------------------------------------------------------------- Wan


def _autoencoder_kl_wan(values: dict[str, Any], where: str) -> VaeShape:
    """AutoencoderKLWan: convolutions over time see earlier frames alone, and two levels halve the frames."""
    widths = [values["base_dim"] * factor for factor in values["dim_mult"]]
    halves, channels = values["temperal_downsample"], values["z_dim"]
    last = len(widths) - 1
    if not widths or len(halves) != last or sum(halves) != 2:
        raise ConfigError(
            f"{where}: temperal_downsample = {list(halves)} with dim_mult = {list(values['dim_mult'])}; it has one "
            "entry less than dim_mult, two of them true, since the class encodes four frames at once"
        )
    for key, absent in (("is_residual", False), ("patch_size", None), ("attn_scales", ())):
        if (given := values.get(key, absent)) and given != absent:
            raise ConfigError(
                f"{where}: {key} = {given!r} is of another kind of VAE (Wan 2.2), which is not supported; choose "
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
    first = values["base_dim"]
    done = 0

    def places(level: int) -> Rates:
        return _times(_frames(done), 4 ** (last - level))

    found = [EncoderConvolution(name="conv_in", inputs=3, outputs=first, taps=27, places=places(0))]
    before, number = first, 0
    for level, width in enumerate(widths):
        for _ in range(values["num_res_blocks"]):
            found += _residual(f"down_blocks.{number}", before, width, 27, places(level))
            before, number = width, number + 1
        if level == last:
            break
        name = f"down_blocks.{number}"
        below = places(level + 1)
        found.append(EncoderConvolution(name=f"{name}.resample", inputs=width, outputs=width, taps=9, places=below))
        number += 1
        if halves[level]:
            done += 1
            later = _times(_later_frames(done), 4 ** (last - level - 1))
            found.append(EncoderConvolution(name=f"{name}.time", inputs=width, outputs=width, taps=3, places=later))
    found += _tail(before, 2 * channels, 27, places(last), attends=True, quantises=True)
    return VaeShape(
        model_type=values["model_type"],
        scale=LatentScale(frames=4, side=2**last),
        channels=channels,
        shift=tuple(float(x) for x in values["latents_mean"]),
        factor=tuple(1 / float(x) for x in values["latents_std"]),
        convolutions=tuple(found),
        norm_params=1,
        attention_width=before,
    )


def _frames(halved: int) -> Rates:
    """Frames after so many of two halvings, for each place: of 1 + 4 k frames all, 1 + 2 k, or 1 + k."""
    left = 4 / 2**halved
    return Rates(row=(left - 1) / 3, output=(4 - left) / 3)


def _later_frames(halved: int) -> Rates:
    """The same without the first frame, of which no convolution over time with a stride is made."""
    left = 4 / 2**halved
    return Rates(row=left / 3, output=-left / 3)


# ------------------------------------------------------------------------------------------- what both have


def _residual(name: str, inputs: int, outputs: int, taps: int, places: Rates) -> Iterator[EncoderConvolution]:
    """Two convolutions with norms before them, and one on the way around them where the width changes."""
    for part, width in (("conv1", inputs), ("conv2", outputs)):
        yield EncoderConvolution(
            name=f"{name}.{part}",
            inputs=width,
            outputs=outputs,
            taps=taps,
            places=places,
            normed=True,
            activated=True,
        )
    if inputs != outputs:
        yield EncoderConvolution(name=f"{name}.shortcut", inputs=inputs, outputs=outputs, taps=1, places=places)


def _tail(
    width: int, outputs: int, taps: int, places: Rates, *, attends: bool, quantises: bool
) -> Iterator[EncoderConvolution]:
    """The middle block and what follows it."""
    yield from _residual("mid_block.resnets.0", width, width, taps, places)
    if attends:
        yield EncoderConvolution(
            name="mid_block.qkv", inputs=width, outputs=3 * width, taps=1, places=places, normed=True
        )
        yield EncoderConvolution(name="mid_block.proj", inputs=width, outputs=width, taps=1, places=places)
    yield from _residual("mid_block.resnets.1", width, width, taps, places)
    yield EncoderConvolution(
        name="conv_out", inputs=width, outputs=outputs, taps=taps, places=places, normed=True, activated=True
    )
    if quantises:
        yield EncoderConvolution(name="quant_conv", inputs=outputs, outputs=outputs, taps=1, places=places)


def _check_pixels(values: dict[str, Any], where: str) -> None:
    if values["in_channels"] != PIXEL_CHANNELS:
        raise ConfigError(f"{where}: in_channels = {values['in_channels']}; pixels are read as RGB, so set it to 3")


def _times(rates: Rates, factor: float) -> Rates:
    return Rates(row=rates.row * factor, output=rates.output * factor)


_SHAPES: dict[str, Callable[[dict[str, Any], str], VaeShape]] = {
    "autoencoder_kl": _autoencoder_kl,
    "autoencoder_kl_wan": _autoencoder_kl_wan,
}
