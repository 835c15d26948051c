import json

import pytest

from mmtrain.config import config
from mmtrain.config.model import ContrastConfig, ProjectorConfig
from mmtrain.errors import ConfigError
from mmtrain.families.catalogue import COMPOSITES
from mmtrain.spec.vision_shapes import vision_shape
from tests.llava import save_llava
from tests.whole_models import named

REST = '[data]\nsource = "x"\n[training]\nsteps = 1\nseq_len = 8\nglobal_batch_size = 1\n'


def load(tmp_path, text, *overrides):
    path = tmp_path / "job.toml"
    path.write_text(text + REST)
    return config.load(path, overrides)


def test_one_source_names_all_parts_and_the_tokenizer(tmp_path):
    job = load(tmp_path, '[model]\npretrained = "a/b"\n')
    assert job.model.pretrained == job.model.encoder.pretrained == job.model.language.pretrained == "a/b"
    assert (job.model.projector.kind, job.tokenizer.path) == ("native", "a/b")
    written = tmp_path / "written.toml"
    written.write_text(config.dump(job))
    assert config.load(written) == job


def test_it_equals_the_same_sections_written_out(tmp_path):
    short = load(tmp_path, "", "model.pretrained=a/b", "model.language.trainable=false", "model.encoder.num_segments=2")
    long = load(
        tmp_path,
        '[model.encoder]\npretrained = "a/b"\nnum_segments = 2\n[model.language]\npretrained = "a/b"\n'
        'trainable = false\n[model.projector]\nkind = "native"\n[tokenizer]\npath = "a/b"\n',
        "model.pretrained=a/b",
    )
    assert short == long


def test_other_sections_replace_their_part(tmp_path):
    own = '[model]\npretrained = "a/b"\n[model.modules.vision]\nkind = "images"\npretrained = "c"\n'
    job = load(tmp_path, own + '[tokenizer]\npath = "d"\n')
    assert (job.model.encoder.pretrained, job.model.language.pretrained, job.tokenizer.path) == ("c", "a/b", "d")
    assert job.model.projector.kind == "mlp"
    job = load(tmp_path, '[model]\npretrained = "a/b"\n[model.language]\nconfig = {model_type = "qwen2"}\n')
    assert (job.model.encoder.pretrained, job.model.language.pretrained) == ("a/b", "")
    assert job.model.projector.kind == "native"
    job = load(
        tmp_path, '[model]\npretrained = "a/b"\n[model.projector]\nkind = "mlp"\n[model.language]\nconfig = {}\n'
    )
    assert (job.model.projector.kind, job.model.language.pretrained) == ("mlp", "a/b")


def test_a_source_that_no_part_takes_is_refused(tmp_path):
    parts = '[model.encoder]\npretrained = "c"\n[model.language]\npretrained = "d"\n'
    with pytest.raises(ConfigError, match=r'job.toml: model.pretrained = "a/b" has no effect: .* name other models;'):
        load(tmp_path, parts, "model.pretrained=a/b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\npretrained = 5\n", "model.pretrained = 5 is an integer; it must be a string"),
        ('[model]\npretrained = "a"\nencoder = 5\n', "model.encoder = 5; it is a section"),
        ('[model]\npretrained = "a"\nprojector = 5\n', "model.projector = 5; it is a section"),
        ('tokenizer = 5\n[model]\npretrained = "a"\n', "tokenizer = 5; it is a section"),
        ('model = "a"\n', 'model = "a"; it is a section'),
    ],
)
def test_values_of_another_type_are_refused_as_elsewhere(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_the_projector_of_a_llava_comes_with_it(tmp_path):
    job = load(tmp_path, '[model]\npretrained = "a/b"\n[model.projector]\nkind = "llava"\n')
    assert (job.model.projector.kind, job.model.projector.pretrained) == ("llava", "a/b")
    job = load(tmp_path, '[model]\npretrained = "a/b"\n[model.projector]\nkind = "llava"\npretrained = ""\n')
    assert job.model.projector.pretrained == "", "a new one"


@pytest.mark.parametrize("cached", [False, True], ids=["folder", "cached id"])
def test_a_config_json_tells_the_projector_and_the_encoder(tmp_path, monkeypatch, cached):
    """Of a folder, or of an id on the hub in the local cache; the kinds are those of the whole models."""
    source, folder = str(tmp_path / "whole"), tmp_path / "whole"
    if cached:
        source, folder = "owner/name", tmp_path / "models--owner--name/snapshots/1"
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        (tmp_path / "models--owner--name/refs").mkdir(parents=True)
        (tmp_path / "models--owner--name/refs/main").write_text("1")
    folder.mkdir(parents=True)
    for kind, whole in COMPOSITES.items():
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        model = load(tmp_path, f'[model]\npretrained = "{source}"\n').model
        if whole.loss:
            assert model.contrast == ContrastConfig(loss=whole.loss, pretrained=source), kind
            continue
        assert [model.projector_of(name).kind for name in model.encoders] == [whole.projector], kind
        projector = model.projector_of(next(iter(model.encoders)))
        assert projector.pretrained == ("" if projector.kind == "native" else source)
    (folder / "config.json").write_text(json.dumps({"model_type": "llava"}))
    other = load(tmp_path, f'[model]\npretrained = "{source}"\n[model.projector]\nkind = "mlp"\n').model.projector
    assert (other.kind, other.pretrained) == ("mlp", "")


def test_another_projector_of_a_llava_is_refused_with_the_right_one(tmp_path):
    save_llava("clip, llama", tmp_path)
    model = named(tmp_path)
    assert model.projector == ProjectorConfig(kind="llava", pretrained=str(tmp_path))
    vision_shape(model)
    for projector, message in (
        ({"kind": "native"}, 'projector.kind = "native", but .* is of a LLaVA model, .*; set kind = "llava"'),
        ({"kind": "native", "pretrained": ""}, 'set kind = "llava"'),
    ):
        with pytest.raises(ConfigError, match=message):
            vision_shape(named(tmp_path, projector=projector))


EAR = '[model.modules.audio]\nkind = "audio"\n'


def test_a_whole_model_that_hears_has_no_encoder_of_images(tmp_path):
    """By a section without a source, or by the config.json of a folder; written out it is the same job."""
    job = load(tmp_path, f'[model]\npretrained = "a/b"\n{EAR}trainable = false\n')
    ear = job.model.modules["audio"]
    assert (job.model.encoder, ear.pretrained, ear.token, ear.trainable) == (None, "a/b", "<|AUDIO|>", False)
    assert (ear.projector.kind, ear.projector.pretrained) == ("linear", "a/b")
    assert (job.model.language.pretrained, job.tokenizer.path) == ("a/b", "a/b")
    written = tmp_path / "written.toml"
    written.write_text(config.dump(job))
    assert config.load(written) == job
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_audio"}')
    folder = load(tmp_path, f'[model]\npretrained = "{tmp_path}"\n').model
    assert (folder.encoder, folder.modules["audio"].pretrained) == (None, str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl"}')
    assert load(tmp_path, f'[model]\npretrained = "{tmp_path}"\n').model.modules == {}


def test_other_sections_replace_the_parts_of_a_model_that_hears(tmp_path):
    own = '[model.language]\nconfig = {model_type = "qwen2"}\n[model.modules.audio.projector]\nkind = "mlp"\n'
    model = load(tmp_path, f'[model]\npretrained = "a/b"\n{EAR}token = "<s>"\n{own}').model
    ear = model.modules["audio"]
    assert (ear.pretrained, ear.token, model.language.pretrained) == ("a/b", "<s>", "")
    assert (ear.projector.kind, ear.projector.pretrained) == ("mlp", "")
    seeing = load(tmp_path, f'[model]\npretrained = "a/b"\n{EAR}pretrained = "whisper"\n').model
    assert (seeing.encoder.pretrained, seeing.modules["audio"].pretrained) == ("a/b", "whisper")
    alone = f'[model]\npretrained = "a/b"\n{EAR}pretrained = "a/b"\n[model.language]\npretrained = "d"\n'
    assert load(tmp_path, alone).model.language.pretrained == "d"
