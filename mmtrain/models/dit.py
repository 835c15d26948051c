"""A pipeline chunk of a diffusion transformer (DiT): diffusers' class with fewer children, names `dit.<its name>`.

Between two chunks travels one tensor of the DiT's width: the latent tokens of all clips, then the projected text tokens
of all clips, then `TIME_ROWS` rows a clip. All blocks read text and timesteps, and their gradients come back the same
way. Attention stays inside of a clip and its own prompt. Patch embedding, blocks and head are called once for all clips
of one size whose prompts have as many tokens, as a batch without padding.
Tensor-parallel ranks divide the latent tokens of each clip, filled up behind, and all have its text and its timestep;
of the text encoder's states, which they gather, each brings its rows.
Behind a VAE the tensor has more columns, which hold the clean latents in the rows of their tokens, and else zeros: the
last chunk, on another rank than the first one, makes targets of them. No gradient comes back for these columns.

Shape legend: N clips; n tokens of one clip; r those of this rank; R latent tokens of all clips, of this rank; T text
tokens of all clips; t of one clip; D width; P numbers that are predicted for one patch; C, F, H, W channels, frames,
rows and columns of latents.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmtrain.config.model import ModelConfig
from mmtrain.errors import DataError
from mmtrain.models.adapters import build_diffusers, keep_blocks
from mmtrain.models.chunk import Chunk
from mmtrain.models.loss import LOSSES, LossOutput
from mmtrain.models.projector import Grid
from mmtrain.models.transfer import to_device
from mmtrain.spec.model_configs import dit_config
from mmtrain.spec.model_shapes import DitShape
from mmtrain.spec.rows import share_of
from mmtrain.spec.spec import ModelSpec
from mmtrain.spec.work_size import TIME_ROWS

Made = Callable[..., Tensor | None]
"""Makes the noisy latents of one clip, or its target if there is one; behind a VAE of the clean latents [C, F, H, W] in
float32."""


class Conditioned(NamedTuple):
    """The parts of the activation between two chunks."""

    tokens: list[Tensor]
    """[1, r, D] of each clip."""
    texts: list[Tensor]
    """[1, t, D] of each clip."""
    times: Tensor
    """[N, TIME_ROWS, D]: shift, scale and gate of attention and of the MLP, then the timestep's embedding."""
    clean: list[Tensor]
    """[r, columns] of each clip: clean latents behind a VAE; else empty."""

    @classmethod
    def of(
        cls, x: Tensor, num_tokens: Sequence[int], text_lengths: Sequence[int], clean_columns: int = 0
    ) -> "Conditioned":
        """The parts of an activation [R + T + TIME_ROWS x N, D + clean_columns].

        Args: num_tokens: r of each clip.
        """
        times = TIME_ROWS * len(num_tokens)
        clean: list[Tensor] = []
        if clean_columns:
            x, behind = x.split([x.shape[1] - clean_columns, clean_columns], dim=1)
            clean = list(behind.detach()[: sum(num_tokens)].split(list(num_tokens)))
        rows, texts, last = x.split([sum(num_tokens), sum(text_lengths), times])
        return cls(
            tokens=[part[None] for part in rows.split(list(num_tokens))],
            # Copied, as every block keeps them: a view would keep all of x until the last weight gradient is made.
            texts=[part[None] for part in texts.clone().split(list(text_lengths))],
            times=last.unflatten(0, (-1, TIME_ROWS)),
            clean=clean,
        )

    def joined(self) -> Tensor:
        """[R + T + TIME_ROWS x N, D + clean columns], in new memory."""
        x = torch.cat([*(part[0] for part in (*self.tokens, *self.texts)), self.times.flatten(0, 1)])
        if not self.clean:
            return x
        clean = torch.cat(self.clean)
        return torch.cat([x, nn.functional.pad(clean, (0, 0, 0, len(x) - len(clean)))], dim=1)


class DitChunk(Chunk):
    """Layers of the DiT; text states and latents enter the first, the loss leaves the last.

    Behind a VAE the first chunk gets clean latents and the text states, and mixes noise into the latents itself.
    """

    def __init__(self, model: ModelConfig, shape: DitShape, spec: ModelSpec, layers: tuple[int, int]) -> None:
        assert model.dit is not None
        super().__init__(spec.module("dit"), layers)
        self.shape = shape
        self.has_head = self.is_last
        self.dit = build_dit(dit_config(model.dit))
        self.dit.blocks = keep_blocks(self.dit.blocks, self.block_indices)
        if not self.has_embed:
            self.dit.patch_embedding = self.dit.condition_embedder = None
        if not self.has_head:
            self.dit.norm_out = self.dit.proj_out = self.dit.scale_shift_table = None
        self.dit.requires_grad_(model.dit.trainable is True)
        self.loss = LOSSES[model.dit.loss](model)

    def blocks(self) -> list[nn.Module]:
        return list(self.dit.blocks.children())

    def forward(
        self,
        x: Any,
        *,
        grids: tuple[Grid, ...],
        text_lengths: tuple[int, ...],
        features: Tensor | Mapping[str, Tensor] | None = None,
        timesteps: Sequence[float] | None = None,
        targets: Sequence[Tensor | Made | None] | None = None,
        want_predictions: bool = False,
    ) -> Any:
        """The activation [R + T + TIME_ROWS x N, D] after this chunk's layers, or the `LossOutput` of the last chunk.

        Args:
            x: the activation of the chunk before; for the first chunk the (noisy) latents [C, F, H, W] of each clip, or
                functions that make them; behind a VAE from the clean ones.
            grids: patches (frames, height, width) of each clip.
            text_lengths: text tokens of each clip, at least 1.
            features: for the first chunk, states [T, columns of the text encoder] of the prompts, clip after clip; of
                tensor-parallel ranks the rows of each, an equal part of T rows and padding at the end.
                Behind a VAE by module: these as `language`, and as `vae` the clean latents [positions, C], clip after
                clip, frame by frame and row by row.
            timesteps: for the first chunk, of each clip, from 0 to 1000; numbers, which no mixed precision rounds.
            targets: for the last chunk, [C, F, H, W] of each clip, or functions that make it; behind a VAE from the
                clean latents. None: this clip has no loss.
            want_predictions: also return the prediction of each clip; targets may then be absent.
        Raises: DataError: clips, grids, texts, timesteps or targets that disagree.
        """
        self._check_clips(grids, text_lengths)
        groups = _equal_clips(grids, text_lengths)
        if self.has_embed:
            parts = self._embed(x, groups, grids, text_lengths, features, timesteps)
        else:
            degree = self.row_sharding.degree
            num_tokens = [share_of(math.prod(grid), degree) for grid in grids]
            rows = sum(num_tokens) + sum(text_lengths) + TIME_ROWS * len(grids)
            if len(x) != rows:
                raise DataError(
                    f"{self.where}: {len(x)} rows arrived, but {len(grids)} clips with their texts have {rows}"
                )
            parts = Conditioned.of(x, num_tokens, text_lengths, self.shape.clean_columns)
        if self.block_indices:
            parts = parts._replace(tokens=self._through_blocks(parts, groups, grids))
        return self._head(parts, groups, grids, targets, want_predictions) if self.has_head else parts.joined()

    def _through_blocks(self, parts: Conditioned, groups: Sequence[list[int]], grids: tuple[Grid, ...]) -> list[Tensor]:
        """[1, r, D] of each clip, after all blocks."""
        rotary = self._rotary(grids)
        tokens = [torch.cat([parts.tokens[i] for i in clips]) for clips in groups]
        texts = [torch.cat([parts.texts[i] for i in clips]) for clips in groups]
        times = [_rows_of(parts.times, clips)[:, :-1] for clips in groups]
        for block in self.blocks():
            for number, clips in enumerate(groups):
                tokens[number] = block(tokens[number], texts[number], times[number], rotary[grids[clips[0]]])
        return _of_clips(groups, [list(of_group.split(1)) for of_group in tokens])

    def _embed(
        self,
        latents: Sequence[Any],
        groups: Sequence[list[int]],
        grids: tuple[Grid, ...],
        text_lengths: tuple[int, ...],
        features: Tensor | Mapping[str, Tensor] | None,
        timesteps: Sequence[float] | None,
    ) -> Conditioned:
        clean: list[Tensor] = []
        if self.shape.behind_vae:
            clean, features = self._received(latents, grids, features)
            latents = [mix(clip.float()) for mix, clip in zip(latents, clean, strict=True)]
            clean = [to_patches(clip, grid, self.shape.patch) for clip, grid in zip(clean, grids, strict=True)]
        else:
            latents = [clip if isinstance(clip, Tensor) else clip() for clip in latents]
        assert not isinstance(features, Mapping)
        self._check_inputs(latents, grids, text_lengths, features, timesteps)
        assert features is not None and timesteps is not None
        states_TX = self.row_sharding.gather(features)[: sum(text_lengths)]
        weight = self.dit.patch_embedding.weight
        tokens = []
        for clips in groups:
            embedded = self.dit.patch_embedding(torch.stack([latents[i] for i in clips]).to(weight.dtype))
            rows_NnD = embedded.flatten(2).transpose(1, 2).contiguous()
            tokens.append(list(self.row_sharding.shard(rows_NnD).split(1)))
        times_N = to_device(torch.tensor(list(timesteps), dtype=torch.float32), weight.device)
        time_ND, projected_N6D, text_1TD, _ = self.dit.condition_embedder(times_N, states_TX[None])
        times = torch.cat([projected_N6D.unflatten(1, (TIME_ROWS - 1, -1)), time_ND[:, None]], dim=1)
        return Conditioned(
            tokens=_of_clips(groups, tokens),
            texts=list(text_1TD.split(list(text_lengths), dim=1)),
            times=times,
            clean=[self.row_sharding.shard(clip.to(weight.dtype)) for clip in clean],
        )

    def _received(
        self, mixes: Sequence[Any], grids: tuple[Grid, ...], features: Tensor | Mapping[str, Tensor] | None
    ) -> tuple[list[Tensor], Tensor]:
        """Clean latents [C, F, H, W] of each clip, and the text states, received from the VAE and the text encoder."""
        if not isinstance(features, Mapping) or set(features) != {"vae", "language"}:
            names = sorted(features) if isinstance(features, Mapping) else type(features).__name__
            raise DataError(f"{self.where}: features are {names}; behind a VAE they come from `vae` and `language`")
        sides = [tuple(g * p for g, p in zip(grid, self.shape.patch, strict=True)) for grid in grids]
        counts = [math.prod(side) for side in sides]
        if list(features["vae"].shape) != [sum(counts), self.shape.in_channels] or len(mixes) != len(grids):
            raise DataError(
                f"{self.where}: {list(features['vae'].shape)} latents arrived for {len(mixes)} clips; there are "
                f"{len(grids)} clips with [{sum(counts)}, {self.shape.in_channels}]"
            )
        parts = features["vae"].detach().split(counts)
        clean = [part.T.unflatten(1, side) for part, side in zip(parts, sides, strict=True)]
        return clean, features["language"]

    def _rotary(self, grids: tuple[Grid, ...]) -> dict[Grid, tuple[Tensor, Tensor]]:
        """Cosines and sines of the positions of each shape of clips, which all blocks share."""
        tables = {}
        for grid in dict.fromkeys(grids):
            sides = [count * side for count, side in zip(grid, self.shape.patch, strict=True)]
            tables[grid] = self.dit.rope(torch.empty(1, 1, *sides, device="meta"))  # only the shape is read
        return tables

    def _head(
        self,
        parts: Conditioned,
        groups: Sequence[list[int]],
        grids: tuple[Grid, ...],
        targets: Sequence[Tensor | Made | None] | None,
        want_predictions: bool,
    ) -> LossOutput:
        if targets is None and want_predictions:
            targets = [None] * len(grids)
        if targets is None or len(targets) != len(grids):
            have = "no" if targets is None else len(targets)
            raise DataError(f"{self.where}: the head got {have} targets for {len(grids)} clips")
        losses, predictions = [], []
        for clips in groups:
            grid = grids[clips[0]]
            gathered = self.row_sharding.gather(torch.cat([parts.tokens[i] for i in clips]))
            predicted_NnP = self._predict(gathered[:, : math.prod(grid)], _rows_of(parts.times, clips)[:, -1]).float()
            wanted = [self._target(parts, grid, i, targets[i]) for i in clips]
            known = [number for number, target in enumerate(wanted) if target is not None]
            if known:
                of_known = _rows_of(predicted_NnP, known)
                losses.append(self.loss(of_known, torch.stack([target for target in wanted if target is not None])))
            else:
                losses.append(predicted_NnP.sum() * 0.0)
            if want_predictions:
                predictions.append(
                    [from_patches(of_clip, grid, self.shape.patch) for of_clip in predicted_NnP.detach()]
                )
        return LossOutput(
            loss_sum=torch.stack(losses).sum(),
            predictions=tuple(_of_clips(groups, predictions)) if want_predictions else None,
        )

    def _predict(self, x_NnD: Tensor, time_ND: Tensor) -> Tensor:
        """[N, n, P]: the head as the whole model has it."""
        shift, scale = (self.dit.scale_shift_table + time_ND[:, None]).chunk(2, dim=1)
        x_NnD = (self.dit.norm_out(x_NnD.float()) * (1 + scale) + shift).type_as(x_NnD)
        predicted: Tensor = self.dit.proj_out(x_NnD)
        return predicted

    def _target(self, parts: Conditioned, grid: Grid, index: int, target: Tensor | Made | None) -> Tensor | None:
        """[n, P]: what the head shall predict of a clip; None: the clip has no loss."""
        if callable(target) and self.shape.behind_vae:
            clean = self.row_sharding.gather(parts.clean[index])[: math.prod(grid)]
            target = target(from_patches(clean, grid, self.shape.patch).float())
        elif callable(target):
            target = target()
        return None if target is None else self._patches(target.float(), grid, index)

    def _patches(self, clip_CFHW: Tensor, grid: Grid, index: int) -> Tensor:
        """[n, P]: a clip in the order of the head's columns, positions of a patch before channels."""
        expected = (self.shape.out_channels, *(g * p for g, p in zip(grid, self.shape.patch, strict=True)))
        if tuple(clip_CFHW.shape) != expected:
            raise DataError(
                f"{self.where}: the target of clip {index} is {list(clip_CFHW.shape)}, but the prediction is "
                f"{list(expected)}"
            )
        return to_patches(clip_CFHW, grid, self.shape.patch)

    # ------------------------------------------------------------------------------------------ checks

    def _check_clips(self, grids: tuple[Grid, ...], text_lengths: tuple[int, ...]) -> None:
        if not grids or len(text_lengths) != len(grids):
            raise DataError(
                f"{self.where}: {len(grids)} clips with {len(text_lengths)} texts; there must be as many, at least one"
            )
        for i, (grid, length) in enumerate(zip(grids, text_lengths, strict=True)):
            if min(grid) < 1 or max(grid) > self.shape.max_positions or length < 1:
                raise DataError(
                    f"{self.where}: clip {i} has {list(grid)} patches and {length} text tokens; each is at least 1, "
                    f"and no side is above rope_max_seq_len = {self.shape.max_positions}"
                )

    def _check_inputs(
        self,
        latents: Sequence[Tensor],
        grids: tuple[Grid, ...],
        text_lengths: tuple[int, ...],
        features: Tensor | None,
        timesteps: Sequence[float] | None,
    ) -> None:
        counts = (len(latents), 0 if timesteps is None else len(timesteps), 0 if features is None else len(features))
        degree = self.row_sharding.degree
        if counts != (len(grids), len(grids), share_of(sum(text_lengths), degree)):
            divided = f", divided by {degree}" if degree > 1 else ""
            raise DataError(
                f"{self.where}: {counts[0]} clips with {counts[1]} timesteps and {counts[2]} text states arrived; "
                f"there are {len(grids)} clips with {sum(text_lengths)} text tokens{divided}"
            )
        for i, (clip, grid) in enumerate(zip(latents, grids, strict=True)):
            expected = [self.shape.in_channels, *(g * p for g, p in zip(grid, self.shape.patch, strict=True))]
            if list(clip.shape) != expected:
                raise DataError(f"{self.where}: the latents of clip {i} are {list(clip.shape)}, not {expected}")


def _equal_clips(grids: Sequence[Grid], text_lengths: Sequence[int]) -> list[list[int]]:
    """The indices of clips of one size whose prompts have as many tokens, ordered by the first clip of each group."""
    groups: dict[tuple[Grid, int], list[int]] = {}
    for i, key in enumerate(zip(grids, text_lengths, strict=True)):
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def _rows_of(x_N: Tensor, indices: list[int]) -> Tensor:
    """x_N at some indices, ascending."""
    whole = len(indices) == len(x_N)
    return x_N if whole else x_N.index_select(0, to_device(torch.tensor(indices), x_N.device))


def _of_clips(groups: Sequence[list[int]], values: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """[clip]: the values of the clips of each group, in the order of the clips."""
    indices = [i for clips in groups for i in clips]
    by_clip = dict(zip(indices, (value for of_group in values for value in of_group), strict=True))
    return [by_clip[i] for i in range(len(by_clip))]


def to_patches(clip_CFHW: Tensor, grid: Grid, patch: Grid) -> Tensor:
    """[n, P]: a clip in the order of the head's columns, positions of a patch before channels."""
    cut = clip_CFHW.reshape(-1, *(side for pair in zip(grid, patch, strict=True) for side in pair))
    return cut.permute(1, 3, 5, 2, 4, 6, 0).reshape(math.prod(grid), -1)


def from_patches(patches_nP: Tensor, grid: Grid, patch: Grid) -> Tensor:
    """[C, F, H, W]: the inverse of `to_patches`."""
    cut = patches_nP.reshape(*grid, *patch, -1).permute(6, 0, 3, 1, 4, 2, 5)
    return cut.reshape(-1, *(g * p for g, p in zip(grid, patch, strict=True)))


def build_dit(values: dict[str, Any]) -> Any:
    """The whole diffusers module with parameters on the meta device and real buffers.

    Raises: ConfigError: diffusers is not installed, or its class refuses the config.
    """
    return build_diffusers("model.dit", "WanTransformer3DModel", values)


def init_tables(module: nn.Module) -> None:
    """The parameters that a module of a DiT holds itself, by the distribution that its class gives them."""
    if (table := getattr(module, "scale_shift_table", None)) is not None:
        nn.init.normal_(table, std=table.shape[-1] ** -0.5)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()
