"""Chunks of a text-to-video model against the whole classes of transformers and diffusers."""

import re
from typing import Any

import pytest
import torch
import transformers
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file
from torch import Tensor

from mmtrain.config.model import DitConfig
from mmtrain.errors import ConfigError, DataError
from mmtrain.models.attention.context import attention_context
from mmtrain.models.build import build_chunk
from mmtrain.models.chunk import Chunk
from mmtrain.models.dit import Conditioned, DitChunk, from_patches
from mmtrain.models.initialise import init_weights
from mmtrain.models.pretrained import load_pretrained
from mmtrain.spec.builders import model_spec
from mmtrain.spec.model_configs import dit_config
from mmtrain.spec.model_shapes import dit_shape
from mmtrain.spec.work_size import WorkSize
from tests.models.dits import TEXT, WAN, Clips, chunk, t2v

CUTS = {
    "whole": {"language": [(0, 5)], "dit": [(0, 5)]},
    "halves": {"language": [(0, 2), (2, 5)], "dit": [(0, 3), (3, 5)]},
    "layers": {"language": [(i, i + 1) for i in range(5)], "dit": [(i, i + 1) for i in range(5)]},
}


def causal_bits(lengths: tuple[int, ...]) -> Any:
    from mmtrain.modality.bitfield import language_bits
    from mmtrain.modality.metadata import DocumentMeta, MicrobatchMeta

    documents = [DocumentMeta(sample=i, num_tokens=n, num_targets=0, images=()) for i, n in enumerate(lengths)]
    return language_bits(MicrobatchMeta(documents=tuple(documents)))


def ours(chunks: dict[str, list[Chunk]], clips: Clips) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Loss, text states and predictions of chunks in a row."""
    lengths = clips.text_lengths
    states = clips.ids
    for made in chunks["language"]:
        states = made(
            states,
            attention=attention_context(causal_bits(lengths)),
            position_ids=torch.cat([torch.arange(n) for n in lengths]),
        )
        assert states.shape == made.output_shape(WorkSize(rows=sum(lengths), pairs=0, outputs=sum(lengths)))
    x: Any = clips.latents
    for made in chunks["dit"]:
        first, last = made is chunks["dit"][0], made is chunks["dit"][-1]
        more = {"features": states, "timesteps": clips.timesteps} if first else {}
        more |= {"targets": clips.targets, "want_predictions": True} if last else {}
        x = made(x, **clips.common, **more)
        if not last:
            assert x.shape == made.output_shape(clips.size)
    return x.loss_sum, states, x.predictions


def theirs(chunks: dict[str, list[Chunk]], clips: Clips) -> tuple[Tensor, Tensor, list[Tensor], dict[str, Any]]:
    """The same of the whole classes, with the weights of the chunks, clip by clip."""
    weights = {name: p.detach() for of in chunks.values() for made in of for name, p in made.named_parameters()}
    values = {key: value for key, value in TEXT.items() if key != "model_type"}
    text = transformers.Qwen2Model(transformers.Qwen2Config(**values))
    text.load_state_dict({n.removeprefix("language.model."): p for n, p in weights.items() if n.startswith("language")})
    given = {key: value for key, value in dit_config(DitConfig(config=WAN)).items() if key != "model_type"}
    dit = WanTransformer3DModel(**given)
    dit.load_state_dict({n.removeprefix("dit."): p for n, p in weights.items() if n.startswith("dit")})
    states = [text(ids[None]).last_hidden_state for ids in clips.ids.split(clips.text_lengths)]
    predictions = [
        dit(latents[None], torch.tensor([time]), state, return_dict=False)[0][0]
        for latents, time, state in zip(clips.latents, clips.timesteps, states, strict=True)
    ]
    loss = torch.stack([((p - t) ** 2).sum() for p, t in zip(predictions, clips.targets, strict=True)]).sum()
    return loss, torch.cat(states, 1)[0], predictions, {"language.model.": text, "dit.": dit}


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_chunks_equal_the_whole_model_in_loss_and_every_gradient(cut: str) -> None:
    model = t2v()
    clips = Clips.draw(model)
    chunks = {name: [chunk(model, name, layers) for layers in of] for name, of in CUTS[cut].items()}
    loss, states, predictions = ours(chunks, clips)
    states.retain_grad()
    loss.backward()
    their_loss, their_states, their_predictions, wholes = theirs(chunks, clips)
    their_states.retain_grad()
    their_loss.backward()
    torch.testing.assert_close(loss, their_loss)
    torch.testing.assert_close(states, their_states, rtol=1e-5, atol=1e-5)
    for mine, wanted in zip(predictions, their_predictions, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
    found = {name: p.grad for of in chunks.values() for made in of for name, p in made.named_parameters()}
    wanted_grads = {prefix + name: p.grad for prefix, whole in wholes.items() for name, p in whole.named_parameters()}
    assert found.keys() == wanted_grads.keys()
    assert "dit.condition_embedder.text_embedder.linear_1.weight" in found
    for name, wanted in wanted_grads.items():
        assert wanted.abs().max() > 0, name
        assert (found[name] - wanted).abs().max() <= 1e-4 * wanted.abs().max() + 1e-5, name


def test_the_gradient_of_the_text_states_is_that_of_the_whole_model() -> None:
    model = t2v(frozen=("language",))
    clips = Clips.draw(model, seed=1)
    chunks = {name: [chunk(model, name, layers) for layers in of] for name, of in CUTS["halves"].items()}
    _, states, _ = ours(chunks, clips)
    assert not states.requires_grad  # nothing before it trains, so nothing is kept for it
    assert all(p.grad is None for made in chunks["language"] for p in made.parameters())
    leaf = states.detach().requires_grad_()
    x = chunks["dit"][0](clips.latents, **clips.common, features=leaf, timesteps=clips.timesteps)
    chunks["dit"][1](x, **clips.common, targets=clips.targets).loss_sum.backward()
    *_, wholes = theirs(chunks, clips)
    parts = [part[None].detach().requires_grad_() for part in states.split(clips.text_lengths)]
    for i, part in enumerate(parts):
        out = wholes["dit."](clips.latents[i][None], torch.tensor([clips.timesteps[i]]), part, return_dict=False)[0][0]
        ((out - clips.targets[i]) ** 2).sum().backward()
    torch.testing.assert_close(leaf.grad, torch.cat([part.grad for part in parts], 1)[0], rtol=1e-4, atol=1e-4)


def test_a_frozen_dit_passes_the_gradient_of_the_text_and_keeps_none_of_its_own() -> None:
    model = t2v(frozen=("dit",))
    clips = Clips.draw(model)
    chunks = {name: [chunk(model, name, layers) for layers in of] for name, of in CUTS["layers"].items()}
    loss, _, _ = ours(chunks, clips)
    loss.backward()
    assert all(p.grad is None for made in chunks["dit"] for p in made.parameters())
    assert all(p.grad is not None for made in chunks["language"] for p in made.parameters())


def test_a_clip_is_alone_with_its_own_prompt() -> None:
    """What other clips are, and in which order, changes nothing."""
    model = t2v()
    clips = Clips.draw(model)
    made, states = chunk(model, "dit"), torch.randn(sum(clips.text_lengths), 24)
    alone = []
    starts = [0, 5, 8]
    for i, start in enumerate(starts):
        own = states[start : start + clips.text_lengths[i]]
        alone.append(
            made(
                (clips.latents[i],),
                grids=(clips.grids[i],),
                text_lengths=(clips.text_lengths[i],),
                features=own,
                timesteps=(clips.timesteps[i],),
                want_predictions=True,
            ).predictions[0]
        )
    together = made(clips.latents, **clips.common, features=states, timesteps=clips.timesteps, want_predictions=True)
    for one, other in zip(together.predictions, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert together.loss_sum == 0  # no targets


def test_a_clip_without_a_target_has_no_loss() -> None:
    model = t2v()
    clips, made = Clips.draw(model), chunk(model, "dit")
    given = {"features": torch.randn(15, 24), "timesteps": clips.timesteps}
    both = [made(clips.latents, **clips.common, **given, targets=of).loss_sum for of in [clips.targets]]
    first = made(clips.latents, **clips.common, **given, targets=(clips.targets[0], None, None)).loss_sum
    rest = made(clips.latents, **clips.common, **given, targets=(None, *clips.targets[1:])).loss_sum
    torch.testing.assert_close(first + rest, both[0])
    nothing = made(clips.latents, **clips.common, **given, targets=(None,) * 3).loss_sum
    nothing.backward()
    assert nothing == 0
    assert all(p.grad is not None and not p.grad.any() for p in made.parameters())


def test_patches_of_several_frames_are_put_back_where_they_were() -> None:
    model = t2v(patch_size=[2, 1, 4])
    clips, made = Clips.draw(model), chunk(model, "dit")
    assert isinstance(made, DitChunk)
    for grid, target in zip(clips.grids, clips.targets, strict=True):
        cut = made._patches(target, grid, 0)
        assert cut.shape == (grid[0] * grid[1] * grid[2], 3 * 8)
        assert torch.equal(from_patches(cut, grid, made.shape.patch), target)


def test_parts_of_an_activation_are_joined_as_they_were() -> None:
    x = torch.randn(6 + 4 + 14, 8)
    parts = Conditioned.of(x, [4, 2], [1, 3])
    assert [tuple(t.shape) for t in (*parts.tokens, *parts.texts)] == [(1, 4, 8), (1, 2, 8), (1, 1, 8), (1, 3, 8)]
    assert parts.times.shape == (2, 7, 8)
    assert torch.equal(parts.joined(), x)
    assert not parts.joined()._is_view()


def test_clean_latents_travel_beside_an_activation_and_get_no_gradient() -> None:
    x = torch.randn(6 + 4 + 14, 8 + 3)
    x[6:, 8:] = 0
    x.requires_grad_()
    parts = Conditioned.of(x, [4, 2], [1, 3], 3)
    assert [tuple(t.shape) for t in (*parts.tokens, *parts.clean)] == [(1, 4, 8), (1, 2, 8), (4, 3), (2, 3)]
    assert torch.equal(parts.joined(), x)
    parts.joined().square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[:, :8], 2 * x.detach()[:, :8])
    assert not x.grad[:, 8:].any()


def test_behind_a_vae_noise_is_mixed_in_and_targets_are_made_of_what_travelled() -> None:
    """The chunks of two ranks give what the same layers give for noisy latents and targets from outside."""
    plain, behind = t2v(out_channels=4), t2v(vae="kl")
    clips, spec = Clips.draw(plain), model_spec(behind)
    states = torch.randn(sum(clips.text_lengths), 24)
    noises = [torch.randn(clip.shape) for clip in clips.latents]
    mixes = [lambda clean, noise=noise: 0.3 * clean + 0.7 * noise for noise in noises]
    targets = [lambda clean, noise=noise: noise - clean for noise in noises]
    rows = torch.cat([clip.flatten(1).T for clip in clips.latents])
    features = {"vae": rows, "language": states}
    first, last = (chunk(behind, "dit", layers, spec=spec) for layers in ((0, 2), (2, 5)))
    x = first(mixes, **clips.common, features=features, timesteps=clips.timesteps)
    assert tuple(x.shape) == first.output_shape(clips.size)
    found = last(x, **clips.common, targets=targets, want_predictions=True)
    wanted = chunk(plain, "dit")(
        [mix(clip) for mix, clip in zip(mixes, clips.latents, strict=True)],
        **clips.common,
        features=states,
        timesteps=clips.timesteps,
        targets=[make(clip) for make, clip in zip(targets, clips.latents, strict=True)],
        want_predictions=True,
    )
    torch.testing.assert_close(found.loss_sum, wanted.loss_sum)
    for ours, theirs in zip(found.predictions, wanted.predictions, strict=True):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(DataError, match="features are Tensor; behind a VAE they come from `vae` and `language`"):
        first(mixes, **clips.common, features=states, timesteps=clips.timesteps)
    with pytest.raises(DataError, match=r"\[111, 4\] latents arrived for 3 clips; there are 3 clips with \[112, 4\]"):
        first(mixes, **clips.common, features=features | {"vae": rows[1:]}, timesteps=clips.timesteps)


def test_initial_weights_do_not_depend_on_the_cut_and_buffers_are_right() -> None:
    model = t2v()
    whole = dict(chunk(model, "dit").named_parameters())
    for layers in CUTS["layers"]["dit"]:
        made = chunk(model, "dit", layers)
        for name, param in made.named_parameters():
            assert torch.equal(param, whole[name]), name
    given = {key: value for key, value in dit_config(DitConfig(config=WAN)).items() if key != "model_type"}
    wanted = dict(WanTransformer3DModel(**given).named_buffers())
    found = dict(made.dit.named_buffers())  # type: ignore[union-attr]
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    table = whole["dit.blocks.1.scale_shift_table"]
    assert table.std().item() == pytest.approx(32**-0.5, rel=0.2)


def test_bfloat16_runs_and_is_close() -> None:
    model = t2v()
    clips = Clips.draw(model)
    states = torch.randn(15, 24)
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        made = chunk(model, "dit", dtype=torch.float32).to(dtype)
        x = made(
            clips.latents, **clips.common, features=states.to(dtype), timesteps=clips.timesteps, targets=clips.targets
        )
        assert x.loss_sum.dtype == torch.float32
        losses.append(x.loss_sum.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_weights_load_from_a_folder_of_diffusers(tmp_path: Any) -> None:
    given = {key: value for key, value in dit_config(DitConfig(config=WAN)).items() if key != "model_type"}
    stored = WanTransformer3DModel(**given)
    stored.save_pretrained(tmp_path)
    model = t2v()
    model = type(model)(language=model.language, dit=DitConfig(pretrained=str(tmp_path)))
    assert dit_shape(model) == dit_shape(t2v())
    spec = model_spec(model)
    loaded = 0
    for layers in CUTS["halves"]["dit"]:
        made = build_chunk(model, spec, "dit", layers, device="cpu")
        init_weights(made, 0)
        loaded += load_pretrained(made, model)
        for name, param in made.named_parameters():
            assert torch.equal(param, stored.get_parameter(name.removeprefix("dit."))), name
    assert loaded == len(list(stored.parameters()))
    weights = {name: p.detach().clone() for name, p in stored.named_parameters() if name != "proj_out.bias"}
    save_file(weights, tmp_path / "diffusion_pytorch_model.safetensors")
    with pytest.raises(ConfigError, match=r"model.dit.pretrained = .* misses proj_out.bias"):
        load_pretrained(made, model)


# --------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_dim": 32}, "text_dim = 32, but the text encoder (model.language) makes states of 24 columns"),
        ({"image_dim": 8}, "image_dim = 8 is of a model that also reads images"),
        ({"added_kv_proj_dim": 8}, "added_kv_proj_dim = 8 is of a model that also reads images"),
        ({"attention_head_dim": 15}, "attention_head_dim = 15; rotary positions of three axes need an even one"),
        ({"freq_dim": 7}, "freq_dim = 7; sines and cosines of timesteps need an even one"),
        ({"patch_size": [2, 2]}, "patch_size = [2, 2]; it is [frames, rows, columns]"),
        ({"qk_norm": "layer_norm"}, 'qk_norm = "layer_norm", but the class always normalizes'),
        ({"ffn_dims": 4}, 'unknown key "ffn_dims"; did you mean "ffn_dim"?'),
        ({"model_type": "van"}, 'model_type = "van" is no supported diffusion transformer'),
        ({"num_layers": "3"}, 'num_layers = "3"; it must be an integer above 0'),
    ],
)
def test_configs_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        model_spec(t2v(**change))


def test_inputs_that_disagree_are_refused() -> None:
    model = t2v()
    clips = Clips.draw(model)
    first, last = chunk(model, "dit", (0, 2)), chunk(model, "dit", (4, 5))
    states = torch.randn(15, 24)
    good = {"features": states, "timesteps": clips.timesteps}
    with pytest.raises(DataError, match="3 clips with 2 timesteps and 15 text states arrived"):
        first(clips.latents, **clips.common, features=states, timesteps=clips.timesteps[:2])
    with pytest.raises(DataError, match="3 clips with 3 timesteps and 14 text states arrived"):
        first(clips.latents, **clips.common, features=states[1:], timesteps=clips.timesteps)
    with pytest.raises(DataError, match=r"latents of clip 1 are \[4, 2, 4, 6\], not \[4, 1, 4, 4\]"):
        first((clips.latents[0],) * 3, **clips.common, **good)
    with pytest.raises(DataError, match="3 clips with 2 texts"):
        first(clips.latents, grids=clips.grids, text_lengths=(5, 3), **good)
    with pytest.raises(DataError, match="no side is above rope_max_seq_len = 16"):
        first(clips.latents, grids=((17, 2, 3), *clips.grids[1:]), text_lengths=clips.text_lengths, **good)
    with pytest.raises(DataError, match="6 rows arrived, but 3 clips with their texts have 64"):
        last(torch.randn(6, 32), **clips.common, targets=clips.targets)
    with pytest.raises(DataError, match="the head got 2 targets for 3 clips"):
        last(torch.randn(64, 32), **clips.common, targets=clips.targets[:2])
    with pytest.raises(DataError, match="the head got no targets"):
        last(torch.randn(64, 32), **clips.common)
    with pytest.raises(DataError, match=r"target of clip 0 is \[3, 1, 4, 4\], but the prediction is \[3, 2, 4, 6\]"):
        last(torch.randn(64, 32), **clips.common, targets=(clips.targets[1], *clips.targets[1:]))
