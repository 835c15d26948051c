"""The operators of each kind of layer, on one rank of the submesh that divides it. Pure.

They are the kernels that the layers run: Hugging Face's modules kernel by kernel, tensor parallelism with rows divided
or whole between the layers (`families/tensor_table.py`), keys and values gathered over context-parallel ranks, LoRA
adapters next to their linear layers. FLOPs, parameters and the existence of a backward agree with the layer's
`LayerSpec` for one rank.

A DiT's blocks and head run for one clip after another, see `Operator.each_clip`. The tp ranks may divide its latent
tokens; each rank has all text tokens and timesteps.

Not included: the exchange of image features before the first language layer, FSDP2's gathers, padding, the copies that
join a DiT's rows at the end of a chunk, the float32 exchange of the gradients of its shifts and scales, and the gather
of clean latents in its head.

Shape legend: D width; C columns of all query heads; K columns of all key heads; I inner width of an MLP; X columns of
the text encoder.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mmtrain.costs.operators.cluster import sent_bytes
from mmtrain.costs.operators.exchanges import (
    DIVIDED_ROWS,
    WHOLE_ROWS,
    RowSums,
    gather,
    gather_for_parts,
    sum_whole,
    use_for_parts,
)
from mmtrain.costs.operators.functions import add, bundle, concat, mean_rows, replace_rows, reshape, select, split
from mmtrain.costs.operators.graph import DeviceKind, Graph, Operator, OpKind
from mmtrain.costs.operators.modules import (
    AddRow,
    Attention,
    Convolution,
    CrossEntropy,
    Elementwise,
    Embedding,
    Linear,
    Norm,
    SquaredError,
    activation,
    multiply,
)
from mmtrain.costs.operators.tape import Tape, Var
from mmtrain.costs.operators.vae_layer import encode
from mmtrain.families.shapes import WINDOWED, LanguageShape, VisionShape
from mmtrain.spec.layer import Division, LayerSpec
from mmtrain.spec.linears import Linear as NamedLinear
from mmtrain.spec.linears import block_linears
from mmtrain.spec.modules import Projection, Shape
from mmtrain.spec.shapes import DitShape
from mmtrain.spec.vae_shapes import VaeShape
from mmtrain.spec.work_size import TIME_ROWS, Rates

_KEYS = "key_value.gather"


def divides_layer(op: Operator) -> bool:
    """Whether an operator is an exchange of tensor parallelism, during which the other pass of a braid can run.

    The other collectives gather keys and values over the context-parallel ranks, inside of attention.
    """
    return op.kind.is_collective and not op.name.startswith(_KEYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedDivision(Division):
    """The division of a module over the ranks of a submesh, and the links that they use."""

    tp_link: DeviceKind = DeviceKind.NVLINK
    group_link: DeviceKind = DeviceKind.NVLINK
    head_groups: int = 1
    """Groups of key heads that are gathered one after the other, the next under the attention of the current."""


@dataclass(frozen=True, kw_only=True)
class LayerDescriber:
    """Makes the graphs of a module's layers."""

    shape: Shape
    division: LinkedDivision = field(default_factory=LinkedDivision)
    dtype_bytes: int = 2
    compute: DeviceKind = DeviceKind.GPU
    adapted: tuple[NamedLinear, ...] = ()
    """Linear layers of a block with an adapter."""
    rank: int = 0
    """Rank of the adapters."""
    projection: Projection | None = None
    """The projector of the encoder's features into the language model, of a language model that of the first encoder;
    None: there is no encoder."""

    def graph(self, layer: LayerSpec, *, input_grad: bool) -> Graph:
        """Forward and backward of one layer. Args: input_grad: whether a gradient has to leave it backwards."""
        return self.tape(layer, input_grad=input_grad).graph()

    def tape(self, layer: LayerSpec, *, input_grad: bool) -> Tape:
        """The tape of one layer, forward and backward, with its parameters. Arguments: see `graph`."""
        each_clip = isinstance(self.shape, DitShape) and layer.name != "embed"
        tape = Tape(dtype_bytes=self.dtype_bytes, compute=self.compute, each_clip=each_clip)
        if isinstance(self.shape, DitShape):
            tape.backward(_DitLayer(self, self.shape, tape, layer, input_grad).build())
        elif isinstance(self.shape, VaeShape):
            encode(tape, self.shape)
        else:
            tape.backward(_Layer(self, self.shape, tape, layer, input_grad).build())
        return tape


class _Builder:
    """One layer on one tape, and the methods that all modules share."""

    def __init__(self, describer: LayerDescriber, width: int, tape: Tape, layer: LayerSpec, input_grad: bool) -> None:
        """Args: width: columns of the activations between layers."""
        self.of, self.width, self.tape, self.layer, self.input_grad = describer, width, tape, layer, input_grad
        self.trainable = layer.trainable and layer.adapters is None
        self.adapted: Mapping[str, NamedLinear] = {x.name: x for x in describer.adapted} if layer.adapters else {}
        division = describer.division
        self.tp, self.link, self.row_parts = division.tp, division.tp_link, division.row_parts
        self.between = WHOLE_ROWS if division.whole_rows else DIVIDED_ROWS
        self.rows = Rates(row=1 / division.groups)
        """All rows of a group; a rank holds 1 / row_parts of them between layers."""
        self.outputs = Rates(output=1 / division.groups)

    def _columns(self, name: str, x: Var, inputs: float, outputs: float, *, bias: bool) -> Var:
        """A linear layer whose outputs the tp ranks divide, with its adapter."""
        result = self._linear(name, inputs, outputs / self.tp, bias=bias)(x)
        return self._with_adapter(name, x, result, inputs, outputs / self.tp, sums=False)

    def _rows(self, name: str, x: Var, inputs: float, outputs: float, *, bias: bool) -> Var:
        """A linear layer whose inputs the tp ranks divide, with its adapter; each rank gets its rows of the sum."""
        result = self._linear(name, inputs / self.tp, outputs, bias=bias and self.tp == 1)(x)
        result = self.between.sum_shard(f"{name}.sum", self.tp, self.link)(result)
        if bias and self.tp > 1:
            result = AddRow(f"{name}.bias", outputs, trainable=self.trainable)(result)
        return self._with_adapter(name, x, result, inputs / self.tp, outputs, sums=True)

    def _input(self, name: str, rows: Rates) -> Var:
        """An activation of the layer before."""
        return self.tape.input(name, rows=rows, columns=self.width, needs_grad=self.input_grad)

    def _between(self, name: str = "x", rows: Rates | None = None) -> Var:
        """The activation of the layer before: this rank's rows. Args: rows: of all tp ranks; None: of the work."""
        return self._input(name, (rows or self.rows) * (1 / self.row_parts))

    def _gathered(self, name: str, x: Var) -> Var:
        return self.between.gather_for_parts(f"{name}.gather", self.tp, self.link)(x)

    def _for_parts(self, name: str, x: Var) -> Var:
        return use_for_parts(f"{name}.parts", self.tp, self.link)(x)

    def _two_linears(
        self, name: str, names: tuple[str, str], x: Var, inputs: float, inner: float, outputs: float, function: str
    ) -> Var:
        """Two linear layers with an activation function; the tp ranks divide the inner columns. Returns whole rows."""
        x = self._for_parts(name, x)
        x = self._linear(f"{name}.{names[0]}", inputs, inner / self.tp, bias=True)(x)
        x = activation(f"{name}.activation", function)(x)
        x = self._linear(f"{name}.{names[1]}", inner / self.tp, outputs, bias=True)(x)
        return sum_whole(f"{name}.sum", self.tp, self.link)(x)

    def _linear(self, name: str, inputs: float, outputs: float, *, bias: bool) -> Linear:
        return Linear(name, inputs, outputs, bias=bias, trainable=self.trainable)

    def _with_adapter(self, name: str, x: Var, result: Var, inputs: float, outputs: float, *, sums: bool) -> Var:
        if name not in self.adapted:
            return result
        narrow = Linear(f"{name}.lora_A", inputs, self.of.rank)(x)
        if sums:
            narrow = self.between.sum_shard(f"{name}.lora_A.sum", self.tp, self.link)(narrow)
        wide = Linear(f"{name}.lora_B", self.of.rank, outputs)(narrow)
        return add(f"{name}.adapted", result, Elementwise(f"{name}.scaling", 2.0, 2.0)(wide))

    def _attended_keys(self, name: str, key: Var, value: Var) -> tuple[Var, ...]:
        """The keys and values of all rows to which this rank's queries attend. Args: name: of their exchange."""
        division = self.of.division
        if division.key_groups == 1:
            return key, value
        key_value = concat("key_value", key, value)
        return (gather_for_parts(name, division.key_groups, division.group_link)(key_value),)

    def _attended(self, query: Var, key: Var, value: Var, pairs: Rates, head: float) -> Var:
        """Attention; in groups of heads, whose keys arrive under the attention of the group before."""
        groups = max(1, min(self.of.division.head_groups, int(key.columns / head)))
        if groups == 1:
            return Attention("attention", pairs, head)(query, *self._attended_keys(_KEYS, key, value))
        named = zip(("query", "key", "value"), (query, key, value), strict=True)
        queries, *key_values = (split(f"{name}.groups", x, groups) for name, x in named)
        keys = [self._attended_keys(f"{_KEYS}.{g}", *pair) for g, pair in enumerate(zip(*key_values, strict=True))]
        return concat(
            "attention.groups",
            *(Attention(f"attention.{g}", pairs, head)(queries[g], *keys[g]) for g in range(groups)),
        )


class _Layer(_Builder):
    """A layer of a vision or language module."""

    def __init__(
        self,
        describer: LayerDescriber,
        shape: VisionShape | LanguageShape,
        tape: Tape,
        layer: LayerSpec,
        input_grad: bool,
    ) -> None:
        super().__init__(describer, shape.width, tape, layer, input_grad)
        self.shape = shape

    def build(self) -> Var:
        shape, name = self.shape, self.layer.name
        if self.layer.is_block:
            return self._block()
        if name == "norm":
            return self._norm("norm", shape.width)(self._pooled(self._between()))
        if isinstance(shape, LanguageShape):
            return self._embed_tokens(shape) if name == "embed" else self._head(shape)
        if name == "embed":
            return self._embed_audio(shape) if shape.one_row else self._embed_patches(shape)
        return self._projector(shape)

    def _norm(self, name: str, columns: float) -> Norm:
        shape = self.shape
        rms = isinstance(shape, LanguageShape) or (shape.rms_norm and self.layer.is_block)
        return Norm(name, columns, rms=rms, trainable=self.trainable)

    def _pooled(self, x: Var) -> Var:
        """The mean of each few rows, where an encoder makes one feature of them."""
        if isinstance(self.shape, LanguageShape) or self.shape.pool == 1:
            return x
        x = self.between.gather("pool.rows", self.tp, self.link)(x)
        return self.between.shard("pool.shard", self.tp, self.link)(mean_rows("pool", x, self.outputs))

    # ----------------------------------------------------------------------------------------- blocks

    def _block(self) -> Var:
        x, shape, D = self._between(), self.shape, self.shape.width
        attended = self._attention(shape, self._gathered("attention", self._norm("norm1", D)(x)))
        x = add("attention.residual", x, attended)
        return add("mlp.residual", x, self._mlp(shape, self._gathered("mlp", self._norm("norm2", D)(x))))

    def _attention(self, shape: VisionShape | LanguageShape, x: Var) -> Var:
        D = shape.width
        names = self._names(0)
        if isinstance(shape, LanguageShape):
            C, K, head = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.head_dim
            biases, out_bias = (shape.qkv_bias,) * 3, shape.output_bias
        else:
            C, K, head = D, D, D // shape.num_heads
            biases, out_bias = (shape.qkv_bias, shape.qkv_bias and shape.key_bias, shape.qkv_bias), True
        if len(names) == 1:  # query, key and value in one
            query, key, value = split("qkv", self._columns(names[0], x, D, 3 * D, bias=biases[0]), 3)
        else:
            widths = (C, K, K)
            query, key, value = (
                self._columns(name, x, D, width, bias=bias)
                for name, width, bias in zip(names, widths, biases, strict=True)
            )
        if isinstance(shape, LanguageShape) and shape.head_norms:
            query, key = (self._head_norm(f"{n}_norm", v, head) for n, v in (("q", query), ("k", key)))
        if isinstance(shape, LanguageShape):  # in the model's dtype
            query, key = (Elementwise(f"rotary.{i}", 9.0, 11.0, 5, 7)(v) for i, v in enumerate((query, key)))
        elif shape.rotary:  # through float32
            query, key = (Elementwise(f"rotary.{i}", 24.0, 26.0, 7, 9)(v) for i, v in enumerate((query, key)))
        per_pair = 1 / self.of.division.groups
        pairs = Rates(window_pair=per_pair) if self.layer.kind == WINDOWED else Rates(pair=per_pair)
        attended = self._attended(query, key, value, pairs, head)
        attended = Elementwise("attention.join", 2.0, 2.0)(attended)  # results of single images or documents
        return self._rows(self._names(1)[0], attended, C, D, bias=out_bias)

    def _head_norm(self, name: str, x: Var, head: float) -> Var:
        """The norm of each head of queries or keys. Args: head: columns of one."""
        heads = reshape(x, rows=x.rows * (x.columns / head), columns=head)
        return reshape(self._norm(name, head)(heads), rows=x.rows, columns=x.columns)

    def _mlp(self, shape: VisionShape | LanguageShape, x: Var) -> Var:
        D, I = shape.width, shape.mlp_width
        bias = shape.mlp_bias if isinstance(shape, LanguageShape) else True
        columns = [self._columns(name, x, D, I, bias=bias) for name in self._names(2)]
        inner = activation("mlp.activation", shape.hidden_act)(columns[0])
        if len(columns) > 1:
            inner = multiply("mlp.gated", inner, columns[1])
        return self._rows(self._names(3)[0], inner, I, D, bias=bias)

    def _names(self, position: int) -> list[str]:
        return [linear.name for linear in block_linears(self.shape, self.layer.kind) if linear.position == position]

    # -------------------------------------------------------------------------------- first and last

    def _embed_patches(self, shape: VisionShape) -> Var:
        patches = self.outputs * shape.patches_per_output
        pixels = self.tape.input("pixels", rows=patches, columns=shape.patch_dim)
        x = Convolution("patches", shape.patch_dim, shape.width, bias=shape.embed_bias, trainable=self.trainable)(
            pixels
        )
        x = reshape(x, rows=self.rows, columns=shape.width)  # with a class token, which has no pixels
        if shape.num_positions:
            x = AddRow("positions", shape.num_positions * shape.width, trainable=self.trainable)(x)
        if shape.fixed_grid is not None:
            count = (shape.fixed_grid[1] * shape.fixed_grid[2] + 2 * shape.class_token) * shape.width
            x = AddRow("positions", count, trainable=self.trainable)(x)
        if shape.embed_norm:
            x = self._norm("embed.norm", shape.width)(x)
        return self.between.shard("rows", self.tp, self.link)(x)

    def _embed_audio(self, shape: VisionShape) -> Var:
        D, M, firsts, trainable = shape.width, shape.mel_bins, shape.first_convolutions, self.trainable
        x = self.tape.input("frames", rows=self.rows * firsts, columns=shape.patch_dim / firsts)
        x = Convolution("conv1", M, D, taps=3, bias=True, trainable=trainable)(x)
        x = activation("conv1.activation", "gelu")(x)
        x = Convolution("conv2", D, D, taps=3, stride=firsts, bias=True, trainable=trainable)(x)
        x = activation("conv2.activation", "gelu")(x)
        x = AddRow("positions", shape.max_rows * D, trainable=False)(x)
        return self.between.shard("rows", self.tp, self.link)(x)

    def _projector(self, shape: VisionShape) -> Var:
        projection = self.of.projection
        assert projection is not None
        D, merged = shape.width, shape.width * shape.features_per_token
        x = self._between(rows=self.rows if shape.pool == 1 else self.outputs)
        x = self.between.gather("projector.rows", self.tp, self.link)(x)
        x = reshape(x, rows=self.outputs * shape.features_per_token, columns=D)  # without dropped class tokens
        if projection.kind in ("mlp", "native"):
            rms = projection.kind == "native" and shape.rms_norm
            x = Norm("projector.norm", D, rms=rms, trainable=self.trainable)(x)
        x = reshape(x, rows=self.outputs, columns=merged)
        inner, act = projection.width, projection.hidden_act
        if not inner:
            x = self._for_parts("projector", x)
            x = self._linear("projector.linear", merged, projection.outputs / self.tp, bias=True)(x)
            x = gather("projector.columns", self.tp, self.link)(x)
            x = reshape(x, rows=self.outputs, columns=projection.outputs)
            return self.between.shard("projector.shard", self.tp, self.link)(x)
        features = [self._two_linears("projector", ("fc1", "fc2"), x, merged, inner, projection.outputs, act)]
        for number, _ in enumerate(shape.taps):
            name = f"projector.tap{number}"
            tap = self.between.gather(f"{name}.rows", self.tp, self.link)(self._between(name))
            tap = reshape(tap, rows=self.outputs, columns=merged)
            tap = Norm(f"{name}.norm", merged, trainable=self.trainable)(tap)
            features.append(self._two_linears(name, ("fc1", "fc2"), tap, merged, inner, projection.outputs, act))
        x = concat("projector.features", *features) if shape.taps else features[0]
        return self.between.shard("projector.shard", self.tp, self.link)(x)

    def _embed_tokens(self, shape: LanguageShape) -> Var:
        ids = self.tape.input("ids", rows=self.rows, columns=0)
        x = Embedding("embed", shape.vocab_size / self.tp, shape.width, trainable=self.trainable)(ids)
        x = self.between.sum_shard("embed.sum", self.tp, self.link)(x)
        if self.of.projection is None:
            return x
        features = self.tape.input("features", rows=Rates(), columns=shape.width, needs_grad=self.input_grad)
        return replace_rows(x, features)

    def _head(self, shape: LanguageShape) -> Var:
        x = self.between.gather("head.rows", self.tp, self.link)(self._between())
        x = self._norm("head.norm", shape.width)(select("labelled", x, self.outputs))
        x = self._for_parts("head", x)
        logits = self._linear("lm_head", shape.width, shape.vocab_size / self.tp, bias=False)(x)
        loss = CrossEntropy("loss", shape.vocab_size / self.tp)(logits)
        if self.tp > 1:  # the largest logit; then the sum of exponentials and the target's logit
            sent = sent_bytes(OpKind.ALL_REDUCE, 4.0, self.tp)
            for numbers in (1, 2):
                self.tape.op(
                    f"loss.sum{numbers}",
                    OpKind.ALL_REDUCE,
                    device=self.link,
                    inputs=(loss.tensor,),
                    net_bytes=self.outputs * (numbers * sent),
                )
        return loss


class _DitLayer(_Builder):
    """A layer of a diffusion transformer: latent tokens, together with the text and timestep rows."""

    def __init__(
        self, describer: LayerDescriber, shape: DitShape, tape: Tape, layer: LayerSpec, input_grad: bool
    ) -> None:
        super().__init__(describer, shape.width, tape, layer, input_grad)
        self.shape = shape
        self.texts, self.clips = (Rates(**{name: 1 / describer.division.groups}) for name in ("text", "clip"))
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
        attended = self._attend("attn1", Rates(pair=per_pair), query, self._attended_keys(_KEYS, key, value))
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
