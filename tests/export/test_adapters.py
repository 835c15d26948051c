"""Adapters in exported folders: beside the weights for peft, merged into them, alone, and as the next job's start."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from mmtrain.config import config
from mmtrain.errors import ConfigError
from mmtrain.export.adapter_folders import ExportForm
from mmtrain.export.folder import export
from mmtrain.inference.answering import Answerer, Sampling, asked
from mmtrain.models.build import build_chunk
from mmtrain.models.initialise import init_weights
from mmtrain.models.pretrained import load_pretrained
from mmtrain.models.reference import ReferenceModel
from mmtrain.models.trainable import is_adapter
from mmtrain.spec.builders import model_spec
from tests.export.test_folder import TOLERANCE, adapted, close, language, logits_of
from tests.export.test_whole_folder import reader, whole_folder
from tests.jobs import layout, metrics, train, write_config
from tests.lora import with_lora
from tests.ranks import run_ranks
from tests.reference import VOCAB, model_config
from tests.stored_runs import save_run


@pytest.mark.parametrize(("name", "tied"), [("qwen2", True), ("llama", False)])
def test_adapters_beside_the_weights_and_merged_into_them(tmp_path, name, tied):
    model = with_lora(model_config(None, name, tied=tied), ["language"])
    chunk = save_run(tmp_path / "run", model)["language"]
    ids = torch.randint(0, VOCAB, (19,), generator=torch.Generator().manual_seed(1))
    ours = logits_of(chunk, ids)
    made = export(tmp_path / "run", tmp_path / "out")
    assert made.folders == ("language", "language_adapter")
    close(ours, language(tmp_path / "out/language", tmp_path / "out/language_adapter")(ids[None]).logits[0].detach())
    base = language(tmp_path / "out/language")(ids[None]).logits[0].detach()
    assert (base - ours).abs().max() > 100 * TOLERANCE * ours.abs().max(), "the adapters matter"
    made = export(tmp_path / "run", tmp_path / "merged", form=ExportForm(merge_adapters=True))
    assert made.folders == ("language",)
    close(ours, language(tmp_path / "merged/language")(ids[None]).logits[0].detach())


DORA = {"use_dora": True, "use_rslora": True, "dropout": 0.1}


@pytest.mark.parametrize(
    ("name", "settings"),
    [("qwen2_5_vl", {}), ("qwen3_vl", {}), ("siglip, qwen2", {}), ("qwen2_5_vl", DORA), ("siglip, qwen2", DORA)],
)
def test_adapters_are_one_folder_for_peft_or_in_the_weights(tmp_path, images, name, settings):
    modules = ["encoder", "projector", "language"] if settings else ["encoder", "language"]
    model = with_lora(whole_folder(name, tmp_path / "whole"), modules, **settings)
    if settings:
        model = dataclasses.replace(model, language=dataclasses.replace(model.language, trainable_layers="-2.."))
    save_run(tmp_path / "run", model)
    export(tmp_path / "run", tmp_path / "out")
    export(tmp_path / "run", tmp_path / "merged", form=ExportForm(merge_adapters=True))
    base, merged = reader(tmp_path / "out"), reader(tmp_path / "merged")
    record, ours = asked("what?", images[:1]), Answerer.of(tmp_path / "merged")
    inputs = ours.inputs(record)
    with torch.no_grad():
        plain = base(**inputs).logits
        theirs = adapted(base, tmp_path / "out/adapter")(**inputs).logits
        expected = merged(**inputs).logits
    close(theirs, expected)
    assert float((plain - expected).abs().max()) > 0.1, "adapters that change nothing would pass"
    assert Answerer.of(tmp_path / "run").answer(record, Sampling()) == ours.answer(record, Sampling())


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize(
    ("name", "settings"),
    [("qwen2_5_vl", {}), ("siglip, qwen2", {}), ("qwen2_5_vl", DORA), ("siglip, qwen2", DORA)],
)
def test_exported_adapters_start_the_next_job(tmp_path, name, settings, parts):
    modules = ["encoder", "projector", "language"] if settings else ["encoder", "language"]
    model = with_lora(whole_folder(name, tmp_path / "whole"), modules, **settings)
    chunks = save_run(tmp_path / "run", model)
    export(tmp_path / "run", tmp_path / "out", parts=parts)
    folder = tmp_path / ("out" if parts else "out/adapter")
    again = dataclasses.replace(model, lora=dataclasses.replace(model.lora, pretrained=str(folder)))
    new = ReferenceModel(again, model_spec(again), seed=7).weights()
    stored = {key: value for chunk in chunks.values() for key, value in chunk.named_parameters() if ".lora_" in key}
    own = {"projector"} if settings and name == "siglip, qwen2" else set()
    assert {name.partition(".")[0] for name in stored} == {"vision", "language"} | own
    for key, value in stored.items():
        assert torch.equal(new[key], value), key


@pytest.mark.parametrize("parts", [False, True])
def test_adapters_alone_adapt_the_base_in_peft_and_in_the_next_job(tmp_path, images, parts):
    model = with_lora(whole_folder("qwen2_5_vl", tmp_path / "whole"), ["encoder", "projector", "language"], **DORA)
    chunks = save_run(tmp_path / "run", model)
    export(tmp_path / "run", tmp_path / "alone", form=ExportForm(adapters_only=True), parts=parts)
    files = {path.name for path in (tmp_path / "alone").rglob("*") if path.is_file()}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    again = dataclasses.replace(model, lora=dataclasses.replace(model.lora, pretrained=str(tmp_path / "alone")))
    new = ReferenceModel(again, model_spec(again), seed=7).weights()
    stored = {key: value for chunk in chunks.values() for key, value in chunk.named_parameters() if ".lora_" in key}
    assert stored and all(torch.equal(new[key], value) for key, value in stored.items())
    if not parts:
        export(tmp_path / "run", tmp_path / "merged", form=ExportForm(merge_adapters=True))
        export(tmp_path / "run", tmp_path / "out")
        inputs = Answerer.of(tmp_path / "merged").inputs(asked("what?", images[:1]))
        with torch.no_grad():
            expected = reader(tmp_path / "merged")(**inputs).logits
            close(adapted(reader(tmp_path / "out"), tmp_path / "alone")(**inputs).logits, expected)


def test_adapters_alone_are_refused_where_others_trained(tmp_path):
    save_run(tmp_path / "run", with_lora(whole_folder("qwen2_5_vl", tmp_path / "whole"), ["language"]))
    with pytest.raises(ConfigError, match=r"model.encoder was trained with trainable = true, so adapters alone would"):
        export(tmp_path / "run", tmp_path / "out", form=ExportForm(adapters_only=True))
    save_run(tmp_path / "other", whole_folder("qwen2_5_vl", tmp_path / "whole2"))
    with pytest.raises(ConfigError, match=r"nothing to write; leave --adapters-only out"):
        export(tmp_path / "other", tmp_path / "out", form=ExportForm(adapters_only=True))


def test_adapters_that_do_not_fit_are_refused(tmp_path):
    model = with_lora(whole_folder("qwen2_5_vl", tmp_path / "whole"), ["language"])
    save_run(tmp_path / "run", model)
    export(tmp_path / "run", tmp_path / "out")

    def started(**changes):
        lora = dataclasses.replace(model.lora, pretrained=str(tmp_path / "out/adapter"))
        job = dataclasses.replace(model, lora=dataclasses.replace(lora, **changes))
        return ReferenceModel(job, model_spec(job), seed=0)

    with pytest.raises(ConfigError, match=r"has r = \d+, but model.lora.rank = 5; set model.lora.rank = 3"):
        started(rank=5)
    with pytest.raises(ConfigError, match=r"model.lora.pretrained"):
        started(pretrained=str(tmp_path / "nothing"))
    both = with_lora(model, ["encoder", "language"])
    lora = dataclasses.replace(both.lora, pretrained=str(tmp_path / "out/adapter"))
    with pytest.raises(ConfigError, match=r"adapter_model.safetensors: base_model.model.model.visual.* is not there"):
        ReferenceModel(dataclasses.replace(both, lora=lora), model_spec(both), seed=0)


LORA = [
    'model.encoder.trainable="lora"',
    'model.language.trainable="lora"',
    "model.lora.rank=4",
    "training.steps=3",
    "checkpoint.enable=true",
]


@pytest.mark.ranks
def test_a_job_with_adapters_on_two_layouts(tmp_path, charts):
    """The loss does not depend on the layout, the base weights stay, the adapters move; the result is exported."""
    curves = {}
    for name, degrees in {"one": layout(), "four": layout(pp=2, shard=2)}.items():
        path = write_config(tmp_path / name, charts)
        run_ranks(train, 4 if name == "four" else 1, path, [*degrees, *LORA])
        curves[name] = metrics(path.parent)
    assert sorted(curves["one"]) == [1, 2, 3]
    for step, loss in curves["one"].items():
        assert curves["four"][step] == pytest.approx(loss, rel=1e-5)
    run, out = tmp_path / "four" / "run", tmp_path / "out"
    assert export(run, out).folders == ("language", "language_adapter", "projector", "vision", "vision_adapter")
    job = config.load(run / "config.toml")
    spec = model_spec(job.model)
    for module, prefix in (("language", "language."), ("vision", "vision.")):
        chunk = build_chunk(job.model, spec, module, (0, len(spec.module(module).layers)), device="cpu")
        init_weights(chunk, job.debug.seed)
        section = job.model.language if module == "language" else job.model.encoder
        again = dataclasses.replace(section, config={}, pretrained=str(out / module))
        where = "language" if module == "language" else "encoder"
        fresh = build_chunk(job.model, spec, module, (0, len(spec.module(module).layers)), device="cpu")
        load_pretrained(fresh, dataclasses.replace(job.model, **{where: again}))
        for key, value in chunk.named_parameters():
            if key.startswith(prefix) and not is_adapter(key):
                assert torch.equal(fresh.get_parameter(key), value), key
        moved = load_file(out / f"{module}_adapter" / "adapter_model.safetensors")
        assert moved
        assert all(tensor.any() for tensor in moved.values())
