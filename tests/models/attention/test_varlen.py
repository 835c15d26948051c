"""Attention in one call of torch's own operator, with kernels of a CPU in place of those of CUDA."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmtrain.config import config
from mmtrain.config.sections import ActivationCheckpointConfig
from mmtrain.errors import ConfigError
from mmtrain.modality.bitfield import segment_bits
from mmtrain.modality.token_split import split_tokens
from mmtrain.models.attention import varlen
from mmtrain.models.attention.backend import (
    Operands,
    attention_line,
    check_backend,
    choose_kernels,
    why_no_varlen,
)
from mmtrain.models.attention.context import AttentionChoices, attention_context
from mmtrain.models.attention.varlen import LIMITS
from mmtrain.models.reference import ReferenceModel
from mmtrain.parallel.activation_memory import ActivationMemory
from mmtrain.spec.builders import model_spec
from tests.data.masks import KINDS
from tests.examples import examples
from tests.models.attention.masks import SCALE, Given, dense, with_gradients
from tests.models.attention.test_context import attend, causal, check_whole_sequence, tensors
from tests.models.attention.varlen import ANY, Operators, on_cpu
from tests.reference import ENCODERS, LANGUAGES, make_batch, model_config

A100 = (8, 0)


@pytest.fixture
def calls():
    with on_cpu(ANY) as calls:
        yield calls


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("kind", [*KINDS, "any"])
@settings(max_examples=examples(25))
@given(data=st.data())
def test_a_whole_sequence_equals_a_dense_mask(kind, padding, key_heads, data):
    with on_cpu(ANY) as calls:
        context = check_whole_sequence(kind, padding, key_heads, data)
    assert calls or not context.is_diagonal


@pytest.mark.parametrize("policy", ["causal", "balanced"])
@settings(max_examples=examples(50))
@given(data=st.data())
def test_rows_of_ranks_equal_a_dense_mask(policy, data):
    """Keys before the first row of a rank, in one or two calls; measured in double precision: 5e-15."""
    bits = causal(*data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=8)))
    cp = data.draw(st.integers(2, 3)) if len(bits) > 2 else 2
    for positions in split_tokens(bits, cp, policy, data.draw(st.integers(1, 4))):
        rows = np.append(positions, np.full(data.draw(st.integers(0, 2)), -1))
        inputs = tensors(len(rows), len(bits))
        groups = data.draw(st.integers(1, 2))
        with on_cpu(ANY) as calls:
            context = attention_context(bits, rows=rows, gather=Given(head_groups=groups))
            ours = with_gradients(attend(context), inputs)
        if policy == "causal":  # forward and backward of two runs of rows
            assert 0 < len(calls) <= 2 * 2 * groups
        for a, b in zip(ours, with_gradients(lambda q, k, v, r=rows: dense(q, k, v, bits, r), inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_what_reaches_the_operator(calls):
    bits, inputs = causal(5, 1, 3), tensors(11, 11)
    context = attention_context(bits, rows=np.append(np.arange(9), [-1, -1]))
    out, *_ = with_gradients(attend(context), inputs)
    assert not out[0, 9:].any(), "padding"
    forward, backward = calls
    assert forward == (False, [5, 1, 3], [5, 1, 3], (5, 5), True, (4, 2), SCALE)
    assert backward == forward._replace(backward=True)
    calls.clear()
    with_gradients(attend(attention_context(segment_bits([4, 7]))), inputs)
    assert calls[0] == (False, [4, 7], [4, 7], (7, 7), False, (4, 2), SCALE)
    calls.clear()
    # Rows 3 to 9 of documents of 5, 2 and 4: the first one's earlier keys are needed, the last one's later ones not.
    gathered = attention_context(causal(5, 2, 4), rows=np.arange(3, 9), gather=Given())
    with_gradients(attend(gathered), tensors(6, 11))
    assert calls[0] == (False, [2, 2, 2], [5, 2, 2], (2, 5), True, (4, 2), SCALE)
    calls.clear()
    # The rank's rows have a document between them, whose keys are left out.
    rows = np.array([0, 1, 4, 5])
    with_gradients(attend(attention_context(causal(2, 2, 3), rows=rows, gather=Given())), tensors(4, 7))
    assert calls[0] == (False, [2, 2], [2, 2], (2, 2), True, (4, 2), SCALE)


@pytest.mark.parametrize("rows", [[], [-1, -1]])
def test_a_rank_without_rows_calls_nothing(calls, rows):
    context = attention_context(causal(4), rows=np.array(rows, dtype=np.int64), gather=Given())
    out, *grads = with_gradients(attend(context), tensors(len(rows), 4))
    assert out.shape == (1, len(rows), 4, 8)
    assert not out.any() and not any(grad.any() for grad in grads)
    assert calls == []


@pytest.mark.parametrize(
    "bits",
    [causal, lambda *lengths: segment_bits(lengths)],
    ids=["documents", "images"],
)
def test_a_thousand_segments_are_as_many_operators_as_one(calls, bits):
    found = []
    for lengths in ([4000], [3, 5] * 500):
        context, inputs = attention_context(bits(*lengths)), tensors(4000, 4000, columns=2)
        with_gradients(attend(context), inputs)  # indices go to the device once
        calls.clear()
        with Operators() as operators:
            with_gradients(attend(context), inputs)
        assert [len(call.row_lengths) for call in calls] == [len(lengths)] * 2
        found.append(operators.count)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("encoder", "language"),
    [
        *((encoder, "qwen2") for encoder in ENCODERS),
        *(("siglip_vision_model", language) for language in LANGUAGES if language != "qwen2"),
    ],
)
def test_loss_and_gradients_of_every_family_are_those_of_pieces(encoder, language):
    """To the bit: the kernels of the operator compute a segment as one piece is computed, and nothing else differs."""
    model = model_config(encoder, language)
    spec = model_spec(model)
    batch, meta = make_batch(model, [[2, 0, 1], [0, 0], [3]], seed=1)

    def run():
        reference = ReferenceModel(model, spec, seed=5)
        loss = reference.loss_sum(batch, meta)
        loss.backward()
        return loss, {name: p.grad for name, p in reference.weights().items() if p.grad is not None}

    loss, gradients = run()
    with on_cpu(ANY) as calls:
        again, others = run()
    blocks = sum(
        sum(layer.is_block for layer in spec.module(name).layers) * count
        for name, count in (("vision", 2), ("language", 3))
    )
    assert len(calls) == 2 * blocks, "one call of forward and backward for each block and microbatch"
    assert loss.item() == again.item() != 0
    assert gradients.keys() == others.keys()
    assert [name for name, grad in gradients.items() if not torch.equal(grad, others[name])] == []


def test_named_backends():
    inputs = tensors(9, 9)
    for backend, expected in (("auto", 2), ("varlen", 2), ("sdpa", 0)):
        with on_cpu(ANY) as calls:
            context = attention_context(causal(4, 5), choices=AttentionChoices(backend))
            with_gradients(attend(context), inputs)
        assert len(calls) == expected, backend


@pytest.mark.parametrize(("mode", "forwards"), [("selective", 1), ("full", 2)])
def test_selective_recomputation_keeps_its_output(mode, forwards):
    model = model_config(None)
    spec = model_spec(model)
    batch, meta = make_batch(model, [[0, 0, 0]], seed=1)
    found = []
    for section in (ActivationCheckpointConfig(), ActivationCheckpointConfig(mode=mode)):
        reference = ReferenceModel(model, spec, seed=5)
        ActivationMemory(reference.chunks["language"].blocks(), section)
        with on_cpu(ANY) as calls:
            reference.loss_sum(batch, meta).backward()
        found.append({name: p.grad for name, p in reference.weights().items()})
    assert sum(not call.backward for call in calls) == forwards * sum(call.backward for call in calls) > 0
    assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())


def test_torch_without_an_argument_for_fewer_key_heads():
    """The signature of torch 2.11, whose kernels divide heads all the same."""

    def of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux, scale, window_size): ...

    assert varlen.key_head_options(of_2_11) == {}


SIX_COLUMNS = (
    "--model.language.config={model_type='llama', hidden_size=24, num_hidden_layers=2, num_attention_heads=4, "
    "vocab_size=448}"
)
HEADS = "varlen takes heads of a multiple of 8 columns up to 192, not"
NO_FLOAT32 = "varlen takes bfloat16 and float16, not float32"
OLD = "varlen needs compute capability 8.0, the device has 7.5"


@pytest.mark.parametrize(
    ("backend", "operands", "expected"),
    [
        ("auto", ("cuda", A100, torch.bfloat16, 128), "varlen, other masks flex"),
        ("varlen", ("cuda", (9, 0), torch.float16, 72), "varlen, other masks flex"),
        ("auto", ("cuda", A100, torch.bfloat16, 8), "varlen, other masks sdpa"),
        ("auto", ("cuda", A100, torch.float32, 64), f"sdpa, other masks flex ({NO_FLOAT32})"),
        ("auto", ("cuda", (7, 5), torch.float16, 64), f"sdpa, other masks flex ({OLD})"),
        ("auto", ("cuda", A100, torch.bfloat16, 6), f"sdpa ({HEADS} 6)"),
        ("auto", ("cuda", A100, torch.bfloat16, 256), f"sdpa, other masks flex ({HEADS} 256)"),
        ("auto", ("cpu", (0, 0), torch.float32, 64), "sdpa (varlen has no kernel on cpu)"),
        ("sdpa", ("cuda", A100, torch.bfloat16, 128), 'sdpa (training.attention_backend = "sdpa")'),
        ("flex", ("cuda", A100, torch.bfloat16, 128), 'flex (training.attention_backend = "flex")'),
    ],
)
def test_the_choice_and_its_reason(backend, operands, expected):
    assert str(choose_kernels(backend, Operands(*operands))) == expected


def test_the_log_names_the_kernels_of_each_module():
    job = config.load("debug_vlm.toml")
    assert attention_line(job, "cpu", (0, 0)) == "attention: vision, language: sdpa (varlen has no kernel on cpu)"
    job = config.load("debug_vlm.toml", ["--training.mixed_precision_param=bfloat16"])
    assert attention_line(job, "cuda", (9, 0)) == "attention: vision, language: varlen, other masks flex"
    job = config.load("debug_vlm.toml", [SIX_COLUMNS, "--training.mixed_precision_param=bfloat16"])
    expected = f"attention: vision: varlen, other masks flex; language: sdpa ({HEADS} 6)"
    assert attention_line(job, "cuda", (9, 0)) == expected
    job = config.load("debug_t2v.toml")
    assert attention_line(job, "cpu", (0, 0)).startswith("attention: language: sdpa (")


@pytest.mark.parametrize(
    ("backend", "sentence"),
    [
        (
            "varlen",
            r'training\.attention_backend = "varlen", but vision has float32 heads of \d+ columns on cpu, and varlen '
            r'has no kernel on cpu; set "auto"',
        ),
        ("flex", r'training\.attention_backend = "flex" trains on CUDA alone, but the device is cpu; set "auto"'),
    ],
)
def test_a_named_backend_that_cannot_compute_is_refused(backend, sentence):
    job = config.load("debug_vlm.toml", [f"--training.attention_backend={backend}"])
    with pytest.raises(ConfigError, match=sentence):
        check_backend(job, torch.device("cpu"))
    for other in ("auto", "sdpa"):
        check_backend(config.load("debug_vlm.toml", [f"--training.attention_backend={other}"]), torch.device("cpu"))


def test_kernels_of_cuda_take_the_heads_of_published_models():
    for columns in (64, 72, 80, 96, 128):
        assert why_no_varlen(Operands("cuda", A100, torch.bfloat16, columns)) == ""
    assert set(LIMITS) == {"cuda"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("columns", [64, 72, 80, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ["documents", "images", "rows of a rank", "rows of a rank, many documents"])
def test_the_kernels_of_a_gpu_give_what_a_dense_mask_gives(case, dtype, columns):
    """Forward and backward, with padding, key heads for four query heads each, and segments of one row."""
    lengths = [1, 300, 17, 128, 1, 64, 513] if case != "rows of a rank, many documents" else [7, 12] * 50
    bits = segment_bits(lengths) if case == "images" else causal(*lengths)
    cp = case.startswith("rows")
    rows = split_tokens(bits, 2, "causal", 1)[0] if cp else np.arange(len(bits))
    rows = np.append(rows, [-1, -1])
    torch.manual_seed(0)
    shapes = (8, len(rows)), (2, len(bits) if cp else len(rows)), (2, len(bits) if cp else len(rows))
    inputs = [torch.randn(1, n, heads, columns, device="cuda", dtype=dtype).transpose(1, 2) for heads, n in shapes]
    context = attention_context(bits, rows=rows, gather=Given() if cp else None, choices=AttentionChoices("varlen"))
    assert context.kernels(inputs[0]).plain == "varlen" and context.varlen_calls(inputs[0].device)
    ours = with_gradients(attend(context), inputs)
    theirs = with_gradients(lambda q, k, v: dense(q, k, v, bits, rows), [x.double() for x in inputs])
    for a, b in zip(ours, theirs, strict=True):
        assert ((a - b).abs().max() / b.abs().max()) < 3e-2
