"""The operators of a layer of a vision, audio or language module. Pure.

Shape legend: D width; C columns of all query heads; K columns of all key heads; I inner width of an MLP.
"""

from mmtrain.costs.operators.cluster import sent_bytes
from mmtrain.costs.operators.exchanges import (
    gather,
)
from mmtrain.costs.operators.functions import add, concat, mean_rows, replace_rows, reshape, select, split
from mmtrain.costs.operators.layer_builder import PROJECTOR_LINEARS, DescribedModule, LayerBuilder
from mmtrain.costs.operators.modules import (
    AddRow,
    Attention,
    ChunkedHead,
    Convolution,
    CrossEntropy,
    Elementwise,
    Embedding,
    Norm,
    activation,
)
from mmtrain.costs.operators.operator_graph import OpKind
from mmtrain.costs.operators.pair_loss import contrast
from mmtrain.costs.operators.tape import Tape, Var
from mmtrain.families.shapes import WINDOWED, LanguageShape, VisionShape
from mmtrain.spec.contrast import CONTRAST
from mmtrain.spec.layer import LayerSpec
from mmtrain.spec.linears import block_linears
from mmtrain.spec.work_size import Rates


class TransformerLayer(LayerBuilder):
    """A layer of a vision or language module."""

    def __init__(
        self,
        module: DescribedModule,
        shape: VisionShape | LanguageShape,
        tape: Tape,
        layer: LayerSpec,
        input_grad: bool,
    ) -> None:
        super().__init__(module, shape.width, tape, layer, input_grad)
        self.shape = shape

    def build(self) -> Var:
        shape, name = self.shape, self.layer.name
        if self.layer.is_block:
            return self._block()
        if name == CONTRAST:
            return contrast(self.tape, self.layer, input_grad=self.input_grad)
        if isinstance(shape, LanguageShape):
            return self._of_vocabulary(shape)
        if name == "norm":
            return self._norm("norm", shape.width)(self._pooled(self._between()))
        if name == "embed":
            return self._embed_audio(shape) if shape.one_row else self._embed_patches(shape)
        return self._pool(shape) if name == "pool" else self._projector(shape)

    def _norm(self, name: str, columns: float) -> Norm:
        shape = self.shape
        rms = shape.rms_norm and (isinstance(shape, LanguageShape) or self.layer.is_block)
        return Norm(name, columns, rms=rms, trainable=self.trainable)

    def _pooled(self, x: Var) -> Var:
        """The mean of each few rows, where an encoder makes one feature of them."""
        if isinstance(self.shape, LanguageShape) or self.shape.pool == 1:
            return x
        x = self.between.gather("pool.rows", self.tp, self.link)(x)
        return self.between.shard("pool.shard", self.tp, self.link)(mean_rows(x, self.outputs))

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
        if isinstance(shape, LanguageShape) and shape.rotary:  # in the model's dtype
            query, key = (Elementwise(f"rotary.{i}", 9.0, 11.0, 5, 7)(v) for i, v in enumerate((query, key)))
        elif shape.rotary:  # of an encoder, through float32
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
            inner = Elementwise("mlp.gated", forward=3.0, backward=5.0).of((inner, columns[1]))
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

    def _pool(self, shape: VisionShape) -> Var:
        """The embedding that a tower makes of an image."""
        D, I, x = shape.width, shape.mlp_width, self._between()
        if shape.pooling == "token":
            x = self._norm("pool.norm", D)(select("pool.token", x, self.outputs))
            return self._linear("pool.projection", D, shape.embedding_width, bias=False)(x)
        one = AddRow("pool.probe", D, trainable=self.trainable)
        query = one(self.tape.input("queries", rows=self.outputs, columns=D))
        query = self._linear("pool.query", D, D, bias=True)(query)
        key, value = split("pool.key_value", self._linear("pool.key_value", D, 2 * D, bias=True)(x), 2)
        x = Attention("pool.attention", Rates(row=1.0), D / shape.num_heads)(query, key, value)
        x = self._linear("pool.output", D, D, bias=True)(x)
        inner = self._linear("pool.fc1", D, I, bias=True)(self._norm("pool.norm", D)(x))
        inner = activation("pool.activation", shape.hidden_act)(inner)
        return add("pool.residual", x, self._linear("pool.fc2", I, D, bias=True)(inner))

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
            merged_rows, columns = self._for_parts("projector", x), projection.outputs / self.tp
            x = self._linear("projector.linear", merged, columns, bias=True)(merged_rows)
            if self.adapted:
                x = self._adapted("projector.linear", merged_rows, x, merged, columns)
            x = gather("projector.columns", self.tp, self.link)(x)
            x = reshape(x, rows=self.outputs, columns=projection.outputs)
            return self.between.shard("projector.shard", self.tp, self.link)(x)
        features = [self._two_linears("projector", PROJECTOR_LINEARS, x, merged, inner, projection.outputs, act)]
        for number, _ in enumerate(shape.taps):
            name = f"projector.tap{number}"
            tap = self.between.gather(f"{name}.rows", self.tp, self.link)(self._between(name))
            tap = reshape(tap, rows=self.outputs, columns=merged)
            tap = Norm(f"{name}.norm", merged, trainable=self.trainable)(tap)
            features.append(self._two_linears(name, PROJECTOR_LINEARS, tap, merged, inner, projection.outputs, act))
        x = concat("projector.features", *features) if shape.taps else features[0]
        return self.between.shard("projector.shard", self.tp, self.link)(x)

    def _of_vocabulary(self, shape: LanguageShape) -> Var:
        """The first or last layer of a language model, or the layer of a part of its vocabulary."""
        name, is_part = self.layer.name, self.of.is_part
        if name == "embed":
            x = self._embed_tokens(shape)
            return x if is_part else self._with_features(x)
        if name == "inputs":
            return self._with_features(self._added())
        if name == "norm" and self.layer.output_rows == "rows":
            return self._norm("norm", shape.width)(self._between())
        if name == "norm" and shape.embedding_width:
            x = self._norm("norm", shape.width)(select("labelled", self._between(), self.outputs))
            return self._linear("embedding", shape.width, shape.embedding_width, bias=shape.embedding_bias)(x)
        if name == "norm":  # the parts of the head leave summands of its gradient
            rows = self.between.gather_for_parts("norm.rows", self.tp, self.link)(self._between())
            return self._norm("norm", shape.width)(select("labelled", rows, self.outputs))
        if name == "loss":
            return self._joined()
        return self._losses(shape, self._input("x", self.outputs) if is_part else self._labelled(shape))

    def _embed_tokens(self, shape: LanguageShape) -> Var:
        ids = self.tape.input("ids", rows=self.rows, columns=0)
        x = Embedding("embed", shape.vocab_size / self.tp, shape.width, trainable=self.trainable)(ids)
        if not shape.rotary:
            x = AddRow("positions", shape.max_positions * shape.width, trainable=self.trainable)(x)
        return self.between.sum_shard("embed.sum", self.tp, self.link)(x)

    def _added(self) -> Var:
        first, *others = (self._between(f"part{number}") for number in range(self.of.num_parts))
        for number, x in enumerate(others):
            first = add(f"inputs.sum{number}", first, x)
        return first

    def _joined(self) -> Var:
        """The loss from the four float32 numbers of each part for each labelled position."""
        x = self.tape.input("parts", rows=self.outputs, columns=4 * self.of.num_parts, needs_grad=self.input_grad)
        num_bytes = x.rows * (4 * x.columns)
        loss = self.tape.var("loss", rows=Rates(), columns=0, needs_grad=x.needs_grad)
        # Stacked; the logarithm of the sum of exponentials; the sum of targets; their difference's sum.
        return self.tape.pointwise(
            "loss", (x,), loss, forward_bytes=num_bytes * 4, backward_bytes=num_bytes * 4, launches=(5, 5)
        )

    def _with_features(self, x: Var) -> Var:
        if self.of.projection is None:
            return x
        features = self.tape.input("features", rows=Rates(), columns=self.width, needs_grad=self.input_grad)
        return replace_rows(x, features)

    def _labelled(self, shape: LanguageShape) -> Var:
        x = self.between.gather("head.rows", self.tp, self.link)(self._between())
        x = self._norm("head.norm", shape.width)(select("labelled", x, self.outputs))
        return self._for_parts("head", x)

    def _losses(self, shape: LanguageShape, x: Var) -> Var:
        if self.layer.loss_chunk_tokens:
            loss = ChunkedHead(
                "lm_head",
                shape.width,
                shape.vocab_size / self.tp,
                chunk_tokens=self.layer.loss_chunk_tokens,
                repeats=self.of.is_part,
                trainable=self.trainable,
            )(x)
        else:
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
