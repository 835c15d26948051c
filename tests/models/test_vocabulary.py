"""Parts of a vocabulary in one process, against torch on the whole one."""

import pytest
import torch
from torch import Tensor, nn

from mmtrain.config.model import LanguageConfig, ModelConfig
from mmtrain.models.build import build_chunk
from mmtrain.models.initialise import init_weights
from mmtrain.models.loss import LOSSES, CrossEntropy
from mmtrain.models.scores import alone, scores
from mmtrain.models.vocabulary import EMBEDDING, HEAD, LossChunk, VocabularyPart
from mmtrain.spec.builders import model_spec
from mmtrain.spec.vocabulary import HEAD_COLUMNS, divided_vocabulary
from tests.memory import Largest
from tests.reference import LANGUAGES

WIDTH = 48


def parts_of(
    tokens: int, parts: int, *, tied: bool = False, dtype: torch.dtype = torch.float32, padding: int | None = None
) -> tuple[list[VocabularyPart], list[VocabularyPart], LossChunk]:
    """The parts of the embedding and of the head, which are the same if they are tied, and the loss."""
    config = {"vocab_size": tokens, "tie_word_embeddings": tied, "pad_token_id": padding}
    model = ModelConfig(language=LanguageConfig(config=LANGUAGES["llama"] | config))
    spec = divided_vocabulary(model_spec(model), parts)
    made: dict[str, list[VocabularyPart]] = {}
    for kind in ("embed",) if tied else ("embed", "head"):
        made[kind] = [
            build_chunk(model, spec, f"{kind}.{part}", (0, 1), device="cpu", dtype=dtype) for part in range(parts)
        ]
        for chunk in made[kind]:
            init_weights(chunk, 3)
    return made["embed"], made.get("head", made["embed"]), LossChunk(model, spec)


def whole(chunks: list[VocabularyPart], name: str) -> Tensor:
    """The matrix of all parts' rows, a leaf."""
    weights = [dict(chunk.named_parameters(remove_duplicate=False))[name] for chunk in chunks]
    return torch.cat([weight.detach() for weight in weights])


def gradient(chunks: list[VocabularyPart], name: str) -> Tensor:
    """That of all parts' rows."""
    weights = [dict(chunk.named_parameters(remove_duplicate=False))[name] for chunk in chunks]
    return torch.cat([weight.grad for weight in weights if weight.grad is not None])


# ----------------------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize("shift", [0.0, 300.0, -300.0])
@pytest.mark.parametrize("count", [0, 1, 9])
def test_scores_are_the_parts_of_a_cross_entropy(count, shift):
    generator = torch.Generator().manual_seed(count)
    logits = (4 * torch.randn(count, 13, generator=generator) + shift).requires_grad_()
    targets = torch.randint(0, 13, (count,), generator=generator)
    found = scores(logits, targets, 0, alone)
    exact = logits.detach().double().requires_grad_()
    expected = nn.functional.cross_entropy(exact, targets, reduction="none")
    torch.testing.assert_close(found.log_sum - found.target, expected.float(), rtol=1e-6, atol=1e-6)
    assert torch.equal(found.largest, logits.detach().amax(dim=-1)) and not found.largest.requires_grad
    upstream = torch.rand(count, generator=generator)
    ((found.log_sum - found.target) * upstream).sum().backward()
    (expected * upstream).sum().backward()
    torch.testing.assert_close(logits.grad, exact.grad.float(), rtol=1e-5, atol=1e-7)


def test_scores_have_a_gradient_each():
    """Of the logarithm alone, and of the target alone; a target of another part has none."""
    logits = torch.randn(5, 7, dtype=torch.float32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    targets = torch.tensor([10, 16, 9, 17, 12])  # of tokens 10 .. 16
    found = scores(logits, targets, 10, alone)
    (of_sum,) = torch.autograd.grad(found.log_sum.sum(), logits, retain_graph=True)
    torch.testing.assert_close(of_sum, logits.detach().softmax(dim=-1))
    (of_target,) = torch.autograd.grad(found.target.sum(), logits)
    expected = torch.zeros(5, 7)
    expected[0, 0] = expected[1, 6] = expected[4, 2] = 1
    assert torch.equal(of_target, expected)
    assert found.target.detach()[[2, 3]].tolist() == [0, 0]


# ------------------------------------------------------------------------------------------------- head and loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [0, 1, 33])
@pytest.mark.parametrize(("tokens", "parts"), [(96, 2), (97, 3), (101, 4), (5, 5)])
def test_the_join_of_all_parts_is_the_cross_entropy(tokens, parts, count, dtype):
    _, heads, join = parts_of(tokens, parts, dtype=dtype)
    generator = torch.Generator().manual_seed(tokens)
    with torch.no_grad():
        for head in heads:
            head.language.lm_head.weight.mul_(20)
    x = torch.randn(count, WIDTH, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, tokens, (count,), generator=generator)
    results = [head(x, targets=targets, want_predictions=True) for head in heads]
    assert all(result.shape == (count, HEAD_COLUMNS) and result.dtype == torch.float32 for result in results)
    out = join(*results, targets=targets, want_predictions=True, want_losses=True)
    (2.5 * out.loss_sum).backward()

    other, weight = x.detach().clone().requires_grad_(), whole(heads, HEAD).requires_grad_()
    logits = nn.functional.linear(other, weight)
    expected = nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    (2.5 * expected.sum()).backward()
    # Measured: losses of up to 18 differ by 2e-6, their sum by 1e-7 of it, gradients by 6e-7 of the largest one; in
    # bfloat16 that of the rows by 7e-3, since each part rounds its own, and those of the weights by nothing.
    rough = dtype == torch.bfloat16
    torch.testing.assert_close(out.losses, expected.detach(), rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(out.loss_sum.detach(), expected.detach().sum(), rtol=2e-6, atol=1e-6)
    assert out.predictions.tolist() == logits.argmax(dim=-1).tolist()
    for ours, theirs in ((x.grad, other.grad), (gradient(heads, HEAD), weight.grad)):
        assert ours.dtype == dtype
        scale = float(theirs.abs().max()) if theirs.numel() else 0.0
        torch.testing.assert_close(ours, theirs, rtol=0, atol=(1.5e-2 if rough else 5e-6) * scale)


def test_of_equal_logits_the_first_token_is_predicted_and_of_none_that_is_a_number_token_0():
    _, heads, join = parts_of(12, 3)
    weight = torch.zeros(12, WIDTH)
    weight[:, :5] = torch.tensor([
        [0, 0, 0, -1, 3], [0, 0, 2, 0, 0], [0, 0, 0, 0, 3], [0, 0, 0, 0, 0],
        [0, 0, 0, -1, 0], [0, 2, 0, 0, 0], [0, 0, 0, -1, 0], [0, 2, 0, 0, 3],
        [0, 0, 0, -1, 0], [0, 0, 0, 0, 0], [0, 0, 2, 0, 0], [0, 0, 0, -1, 3],
    ])  # fmt: skip
    with torch.no_grad():
        for head in heads:
            head.language.lm_head.weight.copy_(weight[slice(*head.rows[:2])])
    x = torch.eye(6, WIDTH)
    x[5] = torch.nan
    targets = torch.zeros(6, dtype=torch.int64)
    results = [head(x, targets=targets, want_predictions=True) for head in heads]
    out = join(*results, targets=targets, want_predictions=True)
    assert out.predictions.tolist() == [0, 5, 1, 1, 0, 0]
    assert out.predictions[:5].tolist() == (x @ weight.T)[:5].argmax(dim=-1).tolist()
    assert out.loss_sum.isnan()  # nothing hides it


def test_columns_of_predictions_are_zero_unless_these_are_wanted():
    _, heads, join = parts_of(96, 2)
    x, targets = torch.randn(3, WIDTH), torch.tensor([1, 2, 95])
    results = [head(x, targets=targets) for head in heads]
    assert not any(result[:, 2:].any() for result in results)
    assert results[0][:2, 1].all() and not results[0][2, 1] and results[1][2, 1] and not results[1][:2, 1].any()
    out = join(*results, targets=targets)
    assert out.predictions is None and out.losses is None


class Halved(CrossEntropy):
    """A loss that mmtrain does not have."""

    def __call__(self, logits_LV, targets_L, **division):
        return 0.5 * super().__call__(logits_LV, targets_L, **division)


def test_the_join_has_the_loss_of_the_config(monkeypatch):
    _, heads, join = parts_of(96, 2)
    x, targets = torch.randn(3, WIDTH), torch.tensor([1, 2, 95])
    results = [head(x, targets=targets) for head in heads]
    expected = join(*results, targets=targets, want_losses=True)
    monkeypatch.setitem(LOSSES, "halved", Halved)
    model = ModelConfig(language=LanguageConfig(config=LANGUAGES["llama"], loss="halved"))
    halved = LossChunk(model, divided_vocabulary(model_spec(model), 2))(*results, targets=targets, want_losses=True)
    assert torch.equal(halved.losses, 0.5 * expected.losses) and halved.losses.all()
    torch.testing.assert_close(halved.loss_sum, 0.5 * expected.loss_sum)


# ------------------------------------------------------------------------------------------------------- embedding


@pytest.mark.parametrize("padding", [None, 0, 40, 96])
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_embeddings_of_all_parts_add_up_to_the_whole_one(parts, padding):
    embeds, _, _ = parts_of(97, parts, padding=padding)
    ids = torch.tensor([0, 96, 40, 41, 41, 96, 0, 13])
    upstream = torch.randn(len(ids), WIDTH, generator=torch.Generator().manual_seed(1))
    found = torch.stack([embed(ids) for embed in embeds])
    assert ((found != 0).any(dim=-1).sum(dim=0) <= 1).all()  # one part has a token, and the others give zeros
    found = found.sum(dim=0)
    weight = whole(embeds, EMBEDDING).requires_grad_()
    expected = nn.functional.embedding(ids, weight, padding)
    assert torch.equal(found, expected)
    (found * upstream).sum().backward()
    (expected * upstream).sum().backward()
    torch.testing.assert_close(gradient(embeds, EMBEDDING), weight.grad)
    assert padding is None or not gradient(embeds, EMBEDDING)[padding].any()
    assert embeds[0](ids[:0]).shape == (0, WIDTH)


def test_tied_rows_are_one_parameter_of_which_both_uses_have_a_part():
    embeds, heads, join = parts_of(97, 3, tied=True)
    assert all(len(list(chunk.parameters())) == 1 for chunk in embeds)
    ids, targets = torch.tensor([5, 90, 33]), torch.tensor([90, 60, 5])
    x = sum(embed(ids) for embed in embeds)
    join(*(head(x, targets=targets) for head in heads), targets=targets).loss_sum.backward()
    weight = whole(embeds, EMBEDDING).requires_grad_()
    logits = nn.functional.linear(nn.functional.embedding(ids, weight), weight)
    nn.functional.cross_entropy(logits, targets, reduction="sum").backward()
    torch.testing.assert_close(gradient(embeds, HEAD), weight.grad, rtol=1e-4, atol=1e-7)


# ---------------------------------------------------------------------------------------------------------- memory


def test_a_part_makes_no_tensor_of_the_whole_vocabulary():
    """The largest memory is the float32 copy of its own logits, forward and backward."""
    tokens, parts, count = 4096, 4, 200
    _, heads, _ = parts_of(tokens, parts, dtype=torch.bfloat16)
    x = torch.randn(count, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, tokens, (count,))
    with Largest() as largest:
        heads[1](x, targets=targets, want_predictions=True).sum().backward()
    assert largest.num_bytes == 4 * count * tokens // parts
