"""A model whose vocabulary is divided over the pipeline ranks, each of which has some rows of embedding and head; and
heads that make their logits in pieces.

The parts are modules of one stage each, so orders, memory, costs and the runtime need no rule of their own. Source:
Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", arXiv:2411.05288, in its plain form: the
parts of the head give sums of exponentials and the target's logit, which one stage joins.

Legend: V tokens of the vocabulary, v those of a part; D width; e bytes of one element of an activation; P parts.
"""

from dataclasses import replace
from itertools import pairwise

from mmtrain.config.config import Config
from mmtrain.errors import ConfigError
from mmtrain.spec.layer import LayerSpec, Replaced, WholeBytes
from mmtrain.spec.spec import ModelSpec, ModuleSpec, VocabularyRows
from mmtrain.spec.work_size import Rates

HEAD_COLUMNS = 4
"""Numbers that a part of the head gives for each labelled position, float32: the logarithm of the sum of its
exponentials; the target's logit, or 0 if another part has it; its largest logit, and whose it is (0 unless predictions
are wanted)."""

LOSS_CHUNK_BYTES = 2**29
"""Largest size of the float32 logits that a head makes at one time where `training.loss_chunk_tokens` is -1."""

_FLOAT32 = 4
_INT64 = 8


EMBED, HEAD = "embed", "head"
"""How the names of modules with a part of the embedding, or of the head, begin: embed.0, embed.1, ..."""


def vocabulary_rows(size: int, parts: int, tp: int = 1) -> tuple[VocabularyRows, ...]:
    """[part] -> its rows, which tp ranks divide further. Args: size: V, a multiple of tp.

    Raises: ConfigError: a part has none.
    """
    units = size // tp
    if parts > units:
        raise ConfigError(
            f"parallelism.pipeline_parallel_degree = {parts} ranks (times tensor_parallel_degree = {tp}) cannot divide "
            f"a vocabulary of {size} tokens, of which each needs one; lower a degree, or set "
            'parallelism.vocabulary_parallel = "tensor"'
        )
    bounds = [units * part // parts * tp for part in range(parts + 1)]
    return tuple(VocabularyRows(a, b, size) for a, b in pairwise(bounds))


def divided_vocabulary(spec: ModelSpec, parts: int, tp: int = 1) -> ModelSpec:
    """The model with a part of embedding and head on each of P pipeline ranks.

    Args: parts: P. tp: ranks that divide the rows of each part.
    Raises: ConfigError: the model has no head, or fewer rows than parts.
    """
    language = spec.text
    embed, *blocks, head = language.layers
    if head.name != "head":
        raise ConfigError(
            'parallelism.vocabulary_parallel = "pipeline" divides the head of a language model, and this one is a text '
            'encoder without a head; set "tensor"'
        )
    width = embed.output_width
    rows = vocabulary_rows(embed.num_params // width, parts, tp)
    embeds = [_embed(language, embed, part, own) for part, own in enumerate(rows)]
    heads = [_head(language, head, part, own, tied=spec.tied_embeddings) for part, own in enumerate(rows)]
    names = tuple(module.name for module in embeds)
    divided = replace(language, after=(*language.after, *names), layers=(_inputs(embed), *blocks, _norm(embed, head)))
    loss = ModuleSpec(
        name="loss",
        consumes="labels",
        after=tuple(module.name for module in heads),
        pp_rank=parts - 1,
        layers=(
            LayerSpec(
                name="loss",
                num_params=0,
                trainable=False,
                matmul_flops=Rates(),
                activation_bytes=Rates(output=_FLOAT32 * HEAD_COLUMNS * parts),
                whole_bytes=WholeBytes(activation=Rates(output=_FLOAT32 * HEAD_COLUMNS * parts)),
            ),
        ),
    )
    modules: list[ModuleSpec] = []
    for module in spec.modules:
        modules += [*embeds, divided, *heads, loss] if module is language else [module]
    return replace(spec, modules=tuple(modules))


def _embed(language: ModuleSpec, embed: LayerSpec, part: int, rows: VocabularyRows) -> ModuleSpec:
    kept = Rates(row=_INT64)
    layer = replace(
        embed,
        num_params=(rows.last - rows.first) * embed.output_width,
        activation_bytes=kept,
        whole_bytes=WholeBytes(activation=kept),
        row_bytes=WholeBytes(),
    )
    return ModuleSpec(name=f"{EMBED}.{part}", consumes="token_ids", layers=(layer,), pp_rank=part, vocabulary=rows)


def _inputs(embed: LayerSpec) -> LayerSpec:
    """What adds the parts of the embedding and takes the features of encoders in."""
    taps = embed.row_bytes.activation
    return LayerSpec(
        name="inputs",
        num_params=0,
        trainable=False,
        matmul_flops=Rates(),
        activation_bytes=taps,
        output_bytes=embed.output_bytes,
        output_width=embed.output_width,
        row_bytes=WholeBytes(activation=taps),
    )


def _norm(embed: LayerSpec, head: LayerSpec) -> LayerSpec:
    """The labelled rows, normed."""
    width, e = embed.output_width, _element(embed)
    kept = Rates(output=_FLOAT32 * (width + 1) + width * e + _INT64)
    return LayerSpec(
        name="norm",
        num_params=width,
        trainable=head.trainable,
        matmul_flops=Rates(),
        activation_bytes=kept,
        output_bytes=Rates(output=width * e),
        output_width=width,
        output_rows="outputs",
        whole_bytes=WholeBytes(activation=kept, output=Rates(output=width * e)),
    )


def _head(language: ModuleSpec, head: LayerSpec, part: int, rows: VocabularyRows, *, tied: bool) -> ModuleSpec:
    embed = language.layers[0]
    width, e, tokens = embed.output_width, _element(embed), rows.last - rows.first
    results = Rates(output=_FLOAT32 * HEAD_COLUMNS)
    whole = Rates(output=width * e + 2 * _INT64)
    layer = LayerSpec(
        name="head",
        num_params=tokens * width,
        num_shared_params=tokens * width if tied else 0,
        trainable=head.trainable,
        matmul_flops=Rates(output=2 * width * tokens),
        activation_bytes=Rates(output=tokens * e) + whole,
        linear_bytes=Rates(output=(width + tokens) * e),
        output_bytes=results,
        output_width=HEAD_COLUMNS,
        output_rows="outputs",
        output_dtype="float32",
        whole_bytes=WholeBytes(activation=whole, linear=Rates(output=width * e), output=results),
    )
    return ModuleSpec(
        name=f"{HEAD}.{part}",
        consumes="labels",
        after=(language.name,),
        layers=(layer,),
        pp_rank=part,
        vocabulary=rows,
    )


def with_loss_chunks(spec: ModelSpec, config: Config) -> ModelSpec:
    """The model with the heads of a job: in pieces where `loss_chunk_tokens` says so.

    Args: spec: of the job, its vocabulary already divided over pipeline ranks, if it is.
    """
    language = spec.text
    heads = [module for module in spec.text_modules if module.layers[-1].name == "head"]
    first = language.layers[0]
    changed = {module.name: _in_chunks(module, first, config) for module in heads}
    return replace(spec, modules=tuple(changed.get(module.name, module) for module in spec.modules))


def loss_chunk_tokens(config: Config, num_tokens: int) -> int:
    """Labelled positions of a microbatch whose logits a head makes at one time; 0: of all of them, or there is no head.

    Args: num_tokens: of the head, all ranks of tensor parallelism together.
    """
    if config.model.reads_clips or config.model.reads_pairs:
        return 0
    chosen, own = config.training.loss_chunk_tokens, num_tokens // config.parallelism.tensor_parallel_degree
    if chosen < 0:
        chosen = max(1, LOSS_CHUNK_BYTES // (_FLOAT32 * max(1, own)))
    return chosen if chosen < config.training.seq_len else 0


def _in_chunks(module: ModuleSpec, first: LayerSpec, config: Config) -> ModuleSpec:
    """Args: first: layer of the language model."""
    *before, head = module.layers
    width, e = first.output_width, _element(first)
    tokens = round(head.matmul_flops.output) // (2 * width)
    chunk = loss_chunk_tokens(config, tokens)
    if not chunk:
        return module
    # A part keeps, in place of logits, the largest one of each position and the sum of its exponentials, which are as
    # many bytes as what it keeps with them. A whole head keeps the rows alone.
    kept = head.whole_bytes.activation
    own = tokens // config.parallelism.tensor_parallel_degree
    # The logits of a piece, in float32 and in the dtype of compute; the gradient of the weight; that of the rows.
    # Pieces of a part have some tokens of all rows, whose gradients they add up in float32.
    temporary = chunk * own * (_FLOAT32 + (e if e < _FLOAT32 else 0)) + own * width * e * head.trainable
    of_row = width * (e + (_FLOAT32 if module.vocabulary else 0))
    layer = replace(
        head,
        activation_bytes=kept,
        linear_bytes=Rates(),
        divided_columns=Replaced(),
        whole_bytes=replace(head.whole_bytes, activation=kept, linear=Rates()),
        loss_chunk_tokens=chunk,
        temporary_bytes=Rates(fixed=temporary, output=of_row),
    )
    return replace(module, layers=(*before, layer))


def _element(embed: LayerSpec) -> int:
    return round(embed.output_bytes.row) // embed.output_width
