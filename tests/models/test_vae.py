"""VAEs: what planning knows of them, their chunk against the whole class, weights, and what is refused."""

import dataclasses
import json

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmtrain.config.model import VaeConfig
from mmtrain.errors import ConfigError, DataError
from mmtrain.families.catalogue import VAES as FAMILIES
from mmtrain.models.build import materialise
from mmtrain.models.initialise import init_weights
from mmtrain.models.pretrained import load_pretrained
from mmtrain.models.vae import VaeDecoder, vae_adapter
from mmtrain.spec.builders import model_spec
from mmtrain.spec.spec import frames_work
from mmtrain.spec.vae_shapes import _SHAPES, LatentScale, vae_shape
from mmtrain.spec.work_size import WorkSize
from tests.models.dits import KL, VAES, WAN_VAE, chunk, t2v

CLASSES = {"kl": diffusers.AutoencoderKL, "wan": diffusers.AutoencoderKLWan}
LATENTS = ((1, 2, 3), (3, 4, 2), (4, 1, 1))
CONFIGS = [
    ("kl", {}),
    ("kl", {"layers_per_block": 2, "use_quant_conv": False, "mid_block_add_attention": False}),
    ("kl", {"block_out_channels": [8, 8, 12], "down_block_types": ["DownEncoderBlock2D"] * 3,
            "up_block_types": ["UpDecoderBlock2D"] * 3}),
    ("wan", {}),
    ("wan", {"num_res_blocks": 2, "temperal_downsample": [True, False, True]}),
]  # fmt: skip


def model_of(name, **changes):
    model = t2v(vae=name)
    return dataclasses.replace(model, vae=VaeConfig(config={**VAES[name], **changes}))


def whole(name, **changes):
    torch.manual_seed(3)
    return CLASSES[name](**{key: value for key, value in {**VAES[name], **changes}.items() if key != "model_type"})


def clip(scale, latents, seed=0):
    return torch.randn(3, *scale.pixels(latents), generator=torch.Generator().manual_seed(seed))


def encoded(name, net, pixels):
    """[C, F, H, W]: the mode of the posterior by the whole class."""
    with torch.no_grad():
        if name == "kl":
            return net.encode(pixels.transpose(0, 1)).latent_dist.mode().transpose(0, 1)
        return net.encode(pixels[None]).latent_dist.mode()[0]


def test_every_family_has_a_shape_and_a_host():
    assert set(FAMILIES) == set(_SHAPES)
    for adapter in map(vae_adapter, FAMILIES):
        assert hasattr(diffusers, adapter.name)


@pytest.mark.parametrize(("name", "changes"), CONFIGS)
def test_parameters_and_flops_are_those_of_the_class(name, changes):
    model, net = model_of(name, **changes), whole(name, **changes)
    spec, scale = model_spec(model), vae_shape(model).scale
    module = spec.module("vae")
    own = [p.numel() for n, p in net.named_parameters() if n.startswith(("encoder.", "quant_conv."))]
    assert module.num_params == sum(own)
    assert module.is_whole and not module.trainable and not spec.has_backward("vae", 0)
    for latents in LATENTS:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
            found = encoded(name, net, clip(scale, latents))
        assert found.shape[1:] == latents
        assert spec.flops("vae", frames_work(module, [latents])).forward == pytest.approx(counted.get_total_flops())


def test_sizes_of_works():
    module = model_spec(t2v(vae="wan")).module("vae")
    size = frames_work(module, [(1, 2, 3), (3, 2, 2), (3, 2, 2)])
    assert size == WorkSize(rows=6 + 2 * 9 * 4, pairs=36 + 2 * 3 * 16, outputs=6 + 2 * 12)
    assert module.output_shape(0, size) == (30, 4)
    scale = LatentScale(frames=4, side=8)
    assert scale.pixels((3, 2, 5)) == (9, 16, 40)
    assert [scale.latent_frames(n) for n in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]


def test_a_dit_behind_a_vae_hands_on_clean_latents_too():
    plain, behind = (model_spec(t2v(vae=name, out_channels=4)) for name in ("", "kl"))
    assert behind.module("dit").after == ("vae", "language")
    assert [module.name for module in behind.modules] == ["vae", "language", "dit"]
    for ours, theirs in zip(behind.module("dit").layers[:-1], plain.module("dit").layers, strict=False):
        assert (ours.output_width, theirs.output_width) == (32 + 16, 32)
        assert ours.output_bytes == theirs.output_bytes * 1.5
        assert (ours.num_params, ours.matmul_flops) == (theirs.num_params, theirs.matmul_flops)


@pytest.mark.parametrize("name", ["kl", "wan"])
def test_a_chunk_makes_normalised_latents_of_the_whole_class(name, tmp_path):
    net = whole(name)
    net.save_pretrained(tmp_path)
    model = dataclasses.replace(t2v(vae=name), vae=VaeConfig(pretrained=str(tmp_path)))
    made = chunk(model, "vae")
    assert load_pretrained(made, model) == len(list(made.parameters()))
    assert not any(parameter.requires_grad for parameter in made.parameters())
    assert {n.split(".")[1] for n, _ in made.named_parameters()} == {"encoder", "quant_conv"}
    shape = vae_shape(model)
    clips = [clip(shape.scale, latents, seed) for seed, latents in enumerate(LATENTS)]
    found = made(clips, latents=LATENTS)
    assert found.shape == (sum(f * h * w for f, h, w in LATENTS), 4) and not found.requires_grad
    for pixels, latents, rows in zip(clips, LATENTS, found.split([f * h * w for f, h, w in LATENTS]), strict=True):
        mode = encoded(name, net, pixels)
        if name == "kl":
            wanted = (mode - KL["shift_factor"]) * KL["scaling_factor"]
        else:
            mean, std = (torch.tensor(WAN_VAE[key])[:, None, None, None] for key in ("latents_mean", "latents_std"))
            wanted = (mode - mean) / std
        torch.testing.assert_close(rows.T.unflatten(1, latents), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["kl", "wan"])
def test_initial_weights_are_those_of_the_class_by_their_names(name):
    one, same, other = chunk(t2v(vae=name), "vae"), chunk(t2v(vae=name), "vae"), chunk(t2v(vae=name), "vae")
    init_weights(other, 1)
    net = dict(whole(name).named_parameters())
    for (parameter_name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        theirs = net[parameter_name.removeprefix("vae.")]
        if theirs.std() == 0 or theirs.numel() == 1:  # of norms
            assert torch.equal(a, theirs)
            continue
        assert not torch.equal(a, c)
        if theirs.numel() > 200:
            assert a.std().item() == pytest.approx(theirs.std().item(), rel=0.3)


@pytest.mark.parametrize("name", ["kl", "wan"])
def test_the_decoder_decodes(name, tmp_path):
    net = whole(name)
    net.save_pretrained(tmp_path)
    model = dataclasses.replace(t2v(vae=name), vae=VaeConfig(pretrained=str(tmp_path)))
    decoder = VaeDecoder(model)
    materialise(decoder, "cpu", torch.float32)
    init_weights(decoder, 0)
    load_pretrained(decoder, model)
    shape = vae_shape(model)
    latents = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    shift, factor = (torch.tensor(x)[:, None, None, None] for x in (shape.shift, shape.factor))
    raw = latents / factor + shift
    with torch.no_grad():
        if name == "kl":
            wanted = net.decode(raw.transpose(0, 1)).sample.transpose(0, 1)
        else:
            wanted = net.decode(raw[None]).sample[0]
    found = decoder(latents)
    assert found.shape == (3, *shape.scale.pixels((3, 2, 2)))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_files_of_old_versions_of_diffusers(tmp_path):
    whole("kl").save_pretrained(tmp_path)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    weights = {}
    for name, tensor in load_file(path).items():
        for new, before in old.items():
            name = name.replace(f"attentions.0.{new}.", f"attentions.0.{before}.")
        weights[name] = tensor
    model = dataclasses.replace(t2v(vae="kl"), vae=VaeConfig(pretrained=str(tmp_path)))
    made = chunk(model, "vae")
    load_pretrained(made, model)
    wanted = made.state_dict()
    assert any("query" in name for name in weights)
    save_file(weights, path)
    again = chunk(model, "vae")
    load_pretrained(again, model)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in again.state_dict().items())
    del weights["encoder.conv_in.weight"]
    save_file(weights, path)
    with pytest.raises(ConfigError, match=r"model.vae.pretrained = .* misses encoder.conv_in.weight"):
        load_pretrained(again, model)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "kl",
            {"model_type": "vq"},
            '"vq" is no supported VAE; supported are autoencoder_kl, AutoencoderKL, autoencoder_kl_',
        ),
        ("kl", {"latent_channels": 8}, "makes latents of 8 channels, but model.dit has in_channels = 4"),
        ("kl", {"down_block_types": ["DownEncoderBlock2D"]}, 'there must be one "DownEncoderBlock2D" for each'),
        ("kl", {"down_block_types": ["AttnDownEncoderBlock2D"] * 2}, "there must be one"),
        ("kl", {"norm_num_groups": 5}, "block_out_channels has 8, no multiple of norm_num_groups = 5"),
        ("kl", {"in_channels": 1}, "pixels are read as RGB"),
        ("kl", {"latents_mean": [0.0] * 4}, "latents_mean is given"),
        ("kl", {"shift_factor": "x"}, "shift_factor = 'x'; it must be a number"),
        ("kl", {"colour": 1}, 'unknown key "colour"'),
        ("kl", {"block_out_channels": [8.0]}, "block_out_channels = .* it must be a list of integers"),
        ("wan", {"is_residual": True}, "is_residual = True is of another kind of VAE"),
        ("wan", {"patch_size": 2}, "patch_size = 2 is of another kind of VAE"),
        ("wan", {"temperal_downsample": [True, False, False]}, "two of them true"),
        ("wan", {"temperal_downsample": [1, 1, 0]}, "it must be a list of true and false"),
        ("wan", {"latents_mean": [0.0]}, "latents_mean has 1 numbers, but there are z_dim = 4"),
        ("wan", {"latents_std": [1.0, 1.0, 0.0, 1.0]}, "each must be above 0"),
        ("wan", {"dropout": 0.1}, "dropout is not supported"),
    ],
)
def test_what_is_not_supported_is_refused(name, changes, message):
    with pytest.raises(ConfigError, match=message):
        vae_shape(model_of(name, **changes))


def test_a_class_of_a_folder_that_is_not_supported_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKLLTXVideo"}))
    with pytest.raises(ConfigError, match='"AutoencoderKLLTXVideo" is no supported VAE; supported are '):
        vae_shape(dataclasses.replace(t2v(vae="kl"), vae=VaeConfig(pretrained=str(tmp_path))))


def test_pixels_and_latents_that_disagree_are_refused():
    made = chunk(t2v(vae="wan"), "vae")
    with pytest.raises(DataError, match=r"clips of shapes \[\[3, 8, 16, 16\]\] arrived; .* \[\[3, 9, 16, 16\]\]"):
        made([torch.randn(3, 8, 16, 16)], latents=((3, 2, 2),))
