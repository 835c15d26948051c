"""The operators of a layer of a diffusion transformer. Pure.

Shape legend: D width; I inner width of an MLP; X columns of the text encoder.
"""

from mmtrain.costs.operators.exchanges import (
    RowSums,
    gather,
)
from mmtrain.costs.operators.functions import add, bundle, reshape
from mmtrain.costs.operators.layer_builder import KEYS, DescribedModule, LayerBuilder
from mmtrain.costs.operators.modules import (
    AddRow,
    Attention,
    Elementwise,
    Norm,
    SquaredError,
    activation,
)
from mmtrain.costs.operators.tape import Tape, Var
from mmtrain.spec.layer import LayerSpec
from mmtrain.spec.model_shapes import DitShape
from mmtrain.spec.work_size import TIME_ROWS, Rates


class DitLayer(LayerBuilder):
    """A layer of a diffusion transformer: latent tokens, together with the text and timestep rows."""

    def __init__(
        self, module: DescribedModule, shape: DitShape, tape: Tape, layer: LayerSpec, input_grad: bool
    ) -> None:
        super().__init__(module, shape.width, tape, layer, input_grad)
        self.shape = shape
        self.texts, self.clips = (Rates(**{name: 1 / module.division.groups}) for name in ("text", "clip"))
        self.narrow = tape.dtype_bytes < 4
        """Whether norms and gates go through float32 and back."""

    def build(self) -> Var:
        if self.layer.is_block:
            return self._block()
        return self._embed() if self.layer.name == "embed" else self._head()

    def _embed(self) -> Var:
        D, tape = self.shape.width, self.tape
        patches = tape.input("latents", rows=self.rows, columns=self.shape.patch_dim)
        # A convolution whose windows do not overlap is a product.
        x = self._linear("patch_embedding", self.shape.patch_dim, D, bias=True)(patches)
        X, local_texts = self.shape.text_width, self.texts * (1 / self.row_parts)
        states = tape.input("states", rows=local_texts, columns=X, needs_grad=self.input_grad)
        states = self.between.gather("states.gather", self.tp, self.link)(states)
        linears = ("linear_1", "linear_2")
        text = self._two_linears("text_embedder", linears, states, X, D, D, "gelu_pytorch_tanh")
        waves = tape.input("waves", rows=self.clips, columns=self.shape.time_width)
        time = self._two_linears("time_embedder", linears, waves, self.shape.time_width, D, D, "silu")
        time_columns = self._for_parts("time_proj", activation("time_proj.activation", "silu")(time))
        modulation = self._linear("time_proj", D, (TIME_ROWS - 1) * D / self.tp, bias=True)(time_columns)
        modulation = reshape(modulation, rows=self.clips * ((TIME_ROWS - 1) / self.tp), columns=D)
        x = self.between.shard("rows", self.tp, self.link)(x)
        return bundle(x, text, gather("time_proj.columns", self.tp, self.link)(modulation), time)

    def _block(self) -> Var:
        D, I = self.shape.width, self.shape.mlp_width
        x, text = self._between(), self._input("text", self.texts)
        time = self._input("time", self.clips * (TIME_ROWS - 1))
        modulation = AddRow("modulation", (TIME_ROWS - 1) * D, trainable=self.trainable)(time)
        modulation = self.between.use_for_rows("modulation.parts", self.tp, self.link)(modulation)
        per_pair = 1 / self.of.division.groups

        columns = self._gathered("attn1", self._modulated("norm1", x, modulation))
        query, key, value = (self._columns(f"attn1.to_{n}", columns, D, D, bias=True) for n in "qkv")
        query, key = (self._head_norm(f"attn1.norm_{n}", v) for n, v in (("q", query), ("k", key)))
        query, key = (self._rotary(f"attn1.rotary_{n}", v) for n, v in (("q", query), ("k", key)))
        attended = self._attend("attn1", Rates(pair=per_pair), query, self._attended_keys(KEYS, key, value))
        x = self._gated("attn1.gated", x, attended, modulation)

        columns = self._gathered("attn2", self._cross_norm(x))
        query = self._head_norm("attn2.norm_q", self._columns("attn2.to_q", columns, D, D, bias=True))
        shared = self._for_parts("attn2.texts", text)
        key, value = (self._columns(f"attn2.to_{n}", shared, D, D, bias=True) for n in "kv")
        keys = (self._head_norm("attn2.norm_k", key), value)
        x = add("attn2.residual", x, self._attend("attn2", Rates(cross_pair=per_pair), query, keys))

        columns = self._gathered("ffn", self._modulated("norm3", x, modulation))
        inner = activation("ffn.activation", "gelu_pytorch_tanh")(self._columns("ffn.0", columns, D, I, bias=True))
        x = self._gated("ffn.gated", x, self._rows("ffn.2", inner, I, D, bias=True), modulation)
        return bundle(x, text, time)

    def _head(self) -> Var:
        x, time = self.between.gather("head.rows", self.tp, self.link)(self._between()), self._input("time", self.clips)
        modulation = AddRow("modulation", 2 * self.shape.width, trainable=self.trainable)(time)
        x = self._modulated("norm_out", x, modulation)
        x = self._linear("proj_out", self.shape.width, self.shape.output_dim, bias=True)(x)
        return SquaredError("loss")(x)

    # Reads and writes below are in elements of the model's dtype; in float32 each element counts twice.

    def _modulated(self, name: str, x: Var, modulation: Var) -> Var:
        """A norm without parameters, times one plus a scale, plus a shift, of each clip."""
        normed = Norm(name, self.shape.width, affine=False)(x)
        cost = (16.0, 19.0, 4, 7) if self.narrow else (4.0, 5.0, 2, 4)
        return Elementwise(f"{name}.moved", *cost).of((normed, modulation))

    def _cross_norm(self, x: Var) -> Var:
        if self.shape.cross_norm:
            x = Norm("norm2", self.shape.width, trainable=self.trainable)(x)
        return Elementwise("norm2.casts", 8.0, 8.0, 2, 2)(x) if self.narrow else x

    def _gated(self, name: str, x: Var, branch: Var, modulation: Var) -> Var:
        """x plus a branch times a gate of each clip."""
        cost = (15.0, 16.0, 4, 7) if self.narrow else (5.0, 5.0, 2, 3)
        return Elementwise(name, *cost).of((x, branch, modulation))

    def _head_norm(self, name: str, x: Var) -> Var:
        """The norm of queries or keys over the columns of all heads; one kernel where they are not divided."""
        x = Norm(name, self.shape.width / self.tp, rms=True, fused=self.tp == 1, trainable=self.trainable)(x)
        return RowSums(f"{name}.sum", self.tp, self.link)(x)

    def _rotary(self, name: str, x: Var) -> Var:
        cost = (15.0, 24.0, 8, 14) if self.narrow else (9.0, 14.0, 8, 14)
        return Elementwise(name, *cost)(x)

    def _attend(self, name: str, pairs: Rates, query: Var, keys: tuple[Var, ...]) -> Var:
        D = self.shape.width
        attended = Attention(name, pairs, D / self.shape.num_heads)(query, *keys)
        return self._rows(f"{name}.to_out", attended, D, D, bias=True)
