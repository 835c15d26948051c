"""Weights of a vocabulary that ranks divide: rows of the whole matrices, which no rank ever holds."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmtrain.config.model import LanguageConfig, ModelConfig
from mmtrain.errors import ConfigError
from mmtrain.models.adapters import decoder
from mmtrain.models.build import build_chunk
from mmtrain.models.initialise import _BLOCK_ROWS, _init_rows, init_weights
from mmtrain.models.pretrained import load_pretrained
from mmtrain.models.vocabulary import EMBEDDING, HEAD
from mmtrain.spec.builders import model_spec
from mmtrain.spec.spec import VocabularyRows
from mmtrain.spec.vocabulary import divided_vocabulary, vocabulary_rows
from tests.llava import job_model, save_llava
from tests.memory import Grown, Largest
from tests.models.test_pretrained import hugging_face
from tests.ranks import run_alone


def matrices(model: ModelConfig, parts: int, *, tp: int = 1, seed: int = 0) -> tuple[dict[str, Tensor], int]:
    """(name -> matrix of all parts' rows, number of tensors set from files)."""
    spec = divided_vocabulary(model_spec(model), parts, tp)
    found: dict[str, list[Tensor]] = {}
    count = 0
    for kind in ("embed", "head"):
        for part in range(parts):
            chunk = build_chunk(model, spec, f"{kind}.{part}", (0, 1), device="cpu")
            init_weights(chunk, seed)
            count += load_pretrained(chunk, model)
            for name, parameter in chunk.named_parameters(remove_duplicate=False):
                rows = chunk.stored_rows[name]
                assert len(parameter) == rows.last - rows.first
                if kind == ("head" if name == HEAD else "embed"):
                    found.setdefault(name, []).append(parameter.detach())
    return {name: torch.cat(own) for name, own in found.items()}, count


def whole(model: ModelConfig, *, seed: int = 0) -> dict[str, Tensor]:
    """Name -> matrix of the undivided model."""
    spec = model_spec(model)
    chunk = build_chunk(model, spec, "language", (0, len(spec.text.layers)), device="cpu")
    init_weights(chunk, seed)
    load_pretrained(chunk, model)
    parameters = dict(chunk.named_parameters(remove_duplicate=False))
    return {name: parameters[name].detach() for name in (EMBEDDING, HEAD)}


# ---------------------------------------------------------------------------------------------------- initial ones


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("tokens", "padding"), [(96, 5), (96, -1), (600, 599), (770, 256)])
@pytest.mark.parametrize("language", ["qwen2", "llama", "qwen3_vl_text"])
def test_rows_start_as_those_of_the_whole_matrix(tiny, language, tokens, padding, tied):
    values = {"vocab_size": tokens, "pad_token_id": padding, "tie_word_embeddings": tied}
    model = tiny.model(language=language, language_config=values)
    one = whole(model)
    assert not one[EMBEDDING][padding].any() and one[EMBEDDING][padding - 1].any()
    assert torch.equal(one[EMBEDDING], one[HEAD]) == tied
    for parts, tp in ((2, 1), (3, 1), (7, 2)):
        found, _ = matrices(model, parts, tp=tp)
        assert found.keys() == one.keys()
        assert all(torch.equal(found[name], one[name]) for name in one), (parts, tp)
    assert not torch.equal(matrices(model, 2, seed=1)[0][EMBEDDING], one[EMBEDDING])


@pytest.mark.parametrize("kind", [nn.Embedding, nn.Linear])
@pytest.mark.parametrize("width", [1, 7, 17, 24])
@pytest.mark.parametrize("tokens", [_BLOCK_ROWS - 1, _BLOCK_ROWS, 2 * _BLOCK_ROWS - 1, 2 * _BLOCK_ROWS + 3, 1001])
def test_blocks_are_those_of_one_draw(tiny, kind, tokens, width):
    """So that a CPU has the values that it had when matrices were drawn at once, also if a matrix is not of whole
    groups of 16 numbers."""
    rule = build_chunk(tiny.model(), model_spec(tiny.model()), "language", (0, 1)).language._init_weights
    padding = tokens // 2 if kind is nn.Embedding else None
    drawn = nn.Embedding(tokens, width, padding) if kind is nn.Embedding else nn.Linear(width, tokens, bias=False)
    torch.manual_seed(3)
    with torch.no_grad():
        rule(drawn)
    for rows in (None, *vocabulary_rows(tokens, 3)):
        first, last, _ = rows or VocabularyRows(0, tokens, tokens)
        own = nn.Linear(width, last - first, bias=False)
        torch.manual_seed(3)
        with torch.no_grad():
            _init_rows(rule, kind, padding, rows, own)
        assert torch.equal(own.weight, drawn.weight[first:last])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_no_rank_draws_a_whole_matrix(tiny, tied):
    model = tiny.model(language_config={"vocab_size": 4096, "tie_word_embeddings": tied})
    spec = divided_vocabulary(model_spec(model), 8)
    for module in ("embed.3", "head.3"):
        chunk = build_chunk(model, spec, module, (0, 1), device="cpu")
        with Largest() as largest:
            init_weights(chunk, 0)
        assert largest.num_bytes == 512 * 24 * 4  # its own rows; a block has 256


# ----------------------------------------------------------------------------------------------------- stored ones


@pytest.mark.parametrize("shard", ["20KB", "5GB"], ids=["many files", "one file"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_parts_hold_the_rows_that_hugging_face_saved(tiny, tmp_path, tied, shard):
    values = {**tiny.languages["llama"], "tie_word_embeddings": tied}
    theirs = hugging_face(decoder("llama"), values)
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    model = ModelConfig(language=LanguageConfig(pretrained=str(tmp_path)))
    for parts in (2, 5):
        found, count = matrices(model, parts)
        assert count == parts * 2 * (1 + tied)  # a tied matrix counts under both of its names
        assert torch.equal(found[EMBEDDING], theirs.model.embed_tokens.weight)
        assert torch.equal(found[HEAD], theirs.lm_head.weight)


def test_rows_of_the_language_model_of_a_whole_llava(tmp_path):
    save_llava("clip, llama", tmp_path)
    model = job_model(tmp_path)
    found, count = matrices(model, 3)
    one = whole(model)
    assert count == 6
    assert all(torch.equal(found[name], one[name]) for name in one)


@pytest.mark.parametrize("tokens", [100, 48], ids=["another size", "as many as a part has"])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_vocabulary_of_another_size_is_refused_as_the_undivided_one_is(tiny, tmp_path, name, tokens):
    hugging_face(decoder("qwen2"), tiny.languages["qwen2"]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name] = torch.ones(tokens, 24)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = ModelConfig(language=LanguageConfig(pretrained=str(tmp_path)))
    with pytest.raises(ConfigError) as undivided:
        whole(model)
    with pytest.raises(ConfigError) as divided:
        matrices(model, 2)
    assert f"{name} has shape ({tokens}, 24) in the checkpoint, but the config makes (96, 24)" in str(divided.value)
    assert str(divided.value) == str(undivided.value)


def peak(folder: Path, module: str) -> int:
    """The bytes by which this process grew at most while it loaded a part of a model."""
    model = ModelConfig(language=LanguageConfig(pretrained=str(folder)))
    chunk = build_chunk(model, divided_vocabulary(model_spec(model), 8), module, (0, 1), device="cpu")
    with Grown() as grown:
        assert load_pretrained(chunk, model) == 1
    return grown.num_bytes


@pytest.mark.ranks
def test_no_rank_reads_a_whole_matrix(tiny, tmp_path):
    values = {**tiny.languages["qwen2"], "vocab_size": 1 << 20, "tie_word_embeddings": False}
    hugging_face(decoder("qwen2"), values).save_pretrained(tmp_path)
    matrix = (1 << 20) * 24 * 4
    for module in ("embed.3", "head.5"):
        grown = run_alone(peak, tmp_path, module)
        # An eighth in the file's pages and one in memory. Measured: 0.28 to 0.31 of the matrix.
        assert 0.24 * matrix < grown < 0.4 * matrix, (module, grown / matrix)
