"""Tiny models that Hugging Face saved, loaded chunk by chunk."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmtrain.config.model import EncoderConfig, LanguageConfig, ModelConfig
from mmtrain.errors import ConfigError
from mmtrain.families.catalogue import ENCODERS, LANGUAGES
from mmtrain.models import pretrained
from mmtrain.models.adapters import decoder, vision_adapter
from mmtrain.models.build import build_chunk
from mmtrain.models.fused_qkv import from_head_major, is_fused
from mmtrain.models.initialise import init_weights
from mmtrain.models.pretrained import load_pretrained
from mmtrain.spec.builders import model_spec


def hugging_face(adapter, values):
    """The complete module with random weights, its heads and poolers included."""
    torch.manual_seed(5)
    config_class, make = adapter.classes
    config = config_class(**{k: v for k, v in values.items() if k != "model_type"})
    if config_class.__name__ == "ViTConfig":
        from transformers import ViTModel

        return ViTModel(config)
    if config_class.__name__ in ("SiglipVisionConfig", "Siglip2VisionConfig"):
        import transformers

        return getattr(transformers, config_class.__name__.replace("Config", "Model"))(config)
    return make(config)


def load_in_two(model, module, cut=2):
    """(name -> parameter, number of tensors set) of a module in two chunks."""
    spec = model_spec(model)
    end = len(spec.module(module).layers)
    found, count = {}, 0
    for layers in ((0, cut), (cut, end)):
        chunk = build_chunk(model, spec, module, layers, device="cpu")
        init_weights(chunk, 0)
        count += load_pretrained(chunk, model)
        found |= {n: p.detach() for n, p in chunk.named_parameters()}
    return found, count


def model_of(tiny, path, module, **more) -> ModelConfig:
    base = tiny.model("siglip")
    if module == "vision":
        return ModelConfig(language=base.language, encoder=EncoderConfig(pretrained=str(path), **more))
    return ModelConfig(language=LanguageConfig(pretrained=str(path), **more))


@pytest.mark.parametrize("shard", ["20KB", "5GB"], ids=["many files", "one file"])
@pytest.mark.parametrize(
    "name",
    [
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "siglip", "siglip2", "clip", "vit", "whisper"),
        *("qwen2", "llama", "qwen3", "mistral", "qwen2_vl_text", "qwen3_vl_text"),
    ],
)
def test_two_chunks_hold_what_hugging_face_saved(tiny, tmp_path, name, shard):
    module = "language" if name in tiny.languages else "vision"
    values = {**tiny.encoders, **tiny.languages}[name]
    adapters = {**{n: vision_adapter(n) for n in ENCODERS}, **{n: decoder(n) for n in LANGUAGES}}
    full = {f.removesuffix("_vision").removesuffix("_vision_model").removesuffix("_encoder"): f for f in adapters}
    adapter = adapters[full[name]]
    theirs = hugging_face(adapter, values)
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "20KB")
    found, count = load_in_two(model_of(tiny, tmp_path, module), module)
    loaded = {n: p for n, p in found.items() if not n.startswith("projector")}
    assert count == len(loaded)
    for key, value in loaded.items():
        value = from_head_major(value, 2) if is_fused(key, adapter.fused_qkv) else value
        assert torch.equal(value, theirs.get_parameter(key.removeprefix(f"{module}."))), key


@pytest.mark.parametrize("prefix", ["visual.", "model.visual."])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_the_tower_of_a_whole_qwen_vl(tiny, tmp_path, name, prefix):
    theirs = hugging_face(vision_adapter(f"{name}_vision"), tiny.encoders[name])
    tensors = {prefix + key: value for key, value in theirs.state_dict().items()}
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(2, 2)  # of its language model
    save_file(tensors, tmp_path / "model.safetensors")
    config = {
        "model_type": name,
        "vision_config": {**tiny.encoders[name], "model_type": name},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, _ = load_in_two(model_of(tiny, tmp_path, "vision"), "vision")
    for key, value in found.items():
        if key.startswith("vision."):
            value = from_head_major(value, 2) if is_fused(key, ("attn.qkv",)) else value
            assert torch.equal(value, theirs.get_parameter(key.removeprefix("vision."))), key


def test_the_encoder_of_a_whole_whisper(tiny, tmp_path):
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    values = {k: v for k, v in tiny.encoders["whisper"].items() if k != "model_type"}
    decoder = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 40, "vocab_size": 50}
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1)
    torch.manual_seed(5)
    theirs = WhisperForConditionalGeneration(WhisperConfig(**values, **decoder, **ids, begin_suppress_tokens=None))
    theirs.save_pretrained(tmp_path)
    found, count = load_in_two(model_of(tiny, tmp_path, "vision"), "vision")
    assert count == sum(key.startswith("vision.") for key in found)
    for key, value in found.items():
        if key.startswith("vision."):
            assert torch.equal(value, theirs.model.encoder.get_parameter(key.removeprefix("vision."))), key


@pytest.mark.parametrize(("name", "prefix"), [("siglip", "Siglip"), ("siglip2", "Siglip2"), ("clip", "CLIP")])
def test_a_whole_model_of_images_and_texts_gives_its_vision_part(tiny, tmp_path, name, prefix):
    import transformers

    text = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(5)
    config = getattr(transformers, f"{prefix}Config")
    config = config(vision_config=tiny.encoders[name], text_config={**text, "vocab_size": 50})
    theirs = getattr(transformers, f"{prefix}Model")(config)
    theirs.save_pretrained(tmp_path)
    found, count = load_in_two(model_of(tiny, tmp_path, "vision"), "vision")
    assert count == sum(key.startswith("vision.") for key in found)
    for key, value in found.items():
        if key.startswith("vision."):
            assert torch.equal(value, theirs.vision_model.get_parameter(key.removeprefix("vision."))), key


@pytest.mark.parametrize("cuts", [1, 2], ids=["one chunk", "two chunks"])
def test_a_tied_head_is_the_embedding(tiny, tmp_path, cuts):
    values = {**tiny.languages["qwen2"], "tie_word_embeddings": True}
    theirs = hugging_face(decoder("qwen2"), values)
    theirs.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = model_of(tiny, tmp_path, "language")
    if cuts == 2:
        found, _ = load_in_two(model, "language")
        head = found["language.lm_head.weight"]
    else:
        chunk = build_chunk(model, model_spec(model), "language", (0, 5), device="cpu")
        load_pretrained(chunk, model)
        head = chunk.language.lm_head.weight
        assert head is chunk.language.model.embed_tokens.weight
    assert torch.equal(head, theirs.model.embed_tokens.weight)


def opened(monkeypatch) -> set[str]:
    """Names of the weight files that are read from now on."""
    found: set[str] = set()
    original = pretrained.safe_open

    def safe_open(path, *args):
        found.add(Path(path).name)
        return original(path, *args)

    monkeypatch.setattr(pretrained, "safe_open", safe_open)
    return found


def test_a_chunk_opens_only_the_files_that_hold_its_tensors(tiny, tmp_path, monkeypatch):
    values = {**tiny.languages["qwen2"], "tie_word_embeddings": True}
    hugging_face(decoder("qwen2"), values).save_pretrained(tmp_path, max_shard_size="15KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) >= 4
    model = model_of(tiny, tmp_path, "language")
    spec, found = model_spec(model), opened(monkeypatch)
    parts = {
        (0, 1): ("model.embed_tokens.",),
        (1, 2): ("model.layers.0.",),
        (2, 4): ("model.layers.1.", "model.layers.2."),
        (4, 5): ("model.norm.", "model.embed_tokens."),  # the tied head is stored as the embedding
    }
    for layers, prefixes in parts.items():
        found.clear()
        load_pretrained(build_chunk(model, spec, "language", layers, device="cpu"), model)
        assert found == {file for name, file in index.items() if name.startswith(prefixes)}
        assert len(found) < len(set(index.values()))


def test_names_that_hugging_face_renamed_are_found_in_their_files(tiny, tmp_path, monkeypatch):
    theirs = hugging_face(vision_adapter("vit"), tiny.encoders["vit"])
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    old = "encoder.layer.1.attention.attention.query.weight"
    assert old in index, "the file has the name that the class had before"
    model = model_of(tiny, tmp_path, "vision")
    chunk = build_chunk(model, model_spec(model), "vision", (2, 3), device="cpu")
    found = opened(monkeypatch)
    load_pretrained(chunk, model)
    assert torch.equal(chunk.vision.layers["1"].attention.q_proj.weight, theirs.layers[1].attention.q_proj.weight)
    assert found == {file for name, file in index.items() if name.startswith("encoder.layer.1.")}


def test_random_weights_read_nothing(tiny, tmp_path):
    hugging_face(decoder("qwen2"), tiny.languages["qwen2"]).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    found, count = load_in_two(model_of(tiny, tmp_path, "language", weights="random"), "language")
    assert count == 0
    assert found["language.lm_head.weight"].any()
    with pytest.raises(ConfigError, match=r"there is no model.safetensors .* or set weights = \"random\""):
        load_in_two(model_of(tiny, tmp_path, "language"), "language")
    assert load_in_two(tiny.model(None), "language")[1] == 0


def drop(tensors):
    del tensors["model.layers.2.mlp.up_proj.weight"]


def add(tensors):
    tensors["model.layers.2.self_attn.q_norm.weight"] = torch.ones(6)


def reshape(tensors):
    tensors["model.norm.weight"] = torch.ones(7)


def old(tensors):
    tensors["model.layers.2.self_attn.rotary_emb.inv_freq"] = torch.ones(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, "misses model.layers.2.mlp.up_proj.weight;"),
        (add, "has unexpected model.layers.2.self_attn.q_norm.weight;"),
        (reshape, r"model.norm.weight has shape \(7,\) in the checkpoint, but the config makes \(24,\)"),
        (old, None),
    ],
)
def test_weights_that_do_not_belong_to_the_config(tiny, tmp_path, change, message):
    hugging_face(decoder("qwen2"), tiny.languages["qwen2"]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = model_of(tiny, tmp_path, "language")
    spec = model_spec(model)
    first, second = (build_chunk(model, spec, "language", layers, device="cpu") for layers in ((0, 2), (2, 5)))
    load_pretrained(first, model)  # holds none of the changed names
    if message is None:
        load_pretrained(second, model)
    else:
        with pytest.raises(ConfigError, match=message):
            load_pretrained(second, model)
