"""Keys of exported folders that transformers 4.57 reads; what transformers 5 reads from them does not change."""

import json

import pytest
import transformers

from mmtrain.export.older_readers import add_older_keys

TEXT = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 96}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SECTIONS = {"rope_type": "default", "mrope_section": [2, 3, 3]}


def without_theta(values):
    return {key: value for key, value in values.items() if key != "rope_theta"}


@pytest.mark.parametrize(
    ("config_class", "rope", "scaling"),
    [
        ("LlamaConfig", {"rope_type": "default", "rope_theta": 777.0}, None),
        ("LlamaConfig", LLAMA3, without_theta(LLAMA3)),
        ("Qwen2VLConfig", SECTIONS | {"rope_theta": 777.0}, SECTIONS),
        ("Qwen2_5_VLConfig", SECTIONS | {"rope_theta": 777.0}, SECTIONS),
        (
            "LlavaConfig",
            {"rope_type": "linear", "rope_theta": 777.0, "factor": 2.0},
            {"rope_type": "linear", "factor": 2.0},
        ),
    ],
)
def test_rotary_positions_have_the_keys_of_both_releases(tmp_path, config_class, rope, scaling):
    text, whole = TEXT | {"rope_parameters": rope}, config_class != "LlamaConfig"
    if config_class == "LlavaConfig":
        text |= {"model_type": "llama"}
    config = getattr(transformers, config_class)(**({"text_config": text} if whole else text))
    config.architectures = ["SomeClass"]
    config.save_pretrained(tmp_path)
    before = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    add_older_keys(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    table = stored["text_config"] if whole else stored
    assert (table["rope_theta"], table.get("rope_scaling")) == (rope["rope_theta"], scaling)
    assert table.get("architectures") == (
        None if "Llava" in config_class else ["SomeClass"]
    )  # which 4.57 asks the text
    after = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    if "Qwen" in config_class:
        after["text_config"]["architectures"] = before["text_config"]["architectures"]
    assert after == before


def test_a_tokenizer_has_a_class_and_keys_of_both_releases(tmp_path):
    from mmtrain.data.tokenizer import SHIPPED

    tokenizer = transformers.AutoTokenizer.from_pretrained(SHIPPED)
    tokenizer.save_pretrained(tmp_path)
    before = json.loads((tmp_path / "tokenizer_config.json").read_text())
    add_older_keys(tmp_path)
    stored = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert stored["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert stored["additional_special_tokens"] == before["extra_special_tokens"] != []
    assert "extra_special_tokens" not in stored
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert type(again) is type(tokenizer) and again.get_vocab() == tokenizer.get_vocab()
    assert again.extra_special_tokens == tokenizer.extra_special_tokens
    assert again.special_tokens_map == tokenizer.special_tokens_map


def test_a_nested_processor_has_a_file_of_its_own(tmp_path):
    processor = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16}}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": processor}))
    add_older_keys(tmp_path)
    assert json.loads((tmp_path / "preprocessor_config.json").read_text()) == processor
    assert not (tmp_path / "video_preprocessor_config.json").exists()
