import pytest

from mmtrain.errors import ConfigError
from mmtrain.planner.partition.pipeline_layout import chunk_bounds, show_layout
from mmtrain.spec.layer import LayerSpec
from mmtrain.spec.spec import ModuleSpec
from mmtrain.spec.work_size import Rates


def module(*names: str) -> ModuleSpec:
    layers = tuple(LayerSpec(name=name, num_params=1, trainable=True, matmul_flops=Rates()) for name in names)
    return ModuleSpec(name="m", layers=layers)


LANGUAGE = module("embed", *(f"layers.{i}" for i in range(6)), "head")
VISION = module("embed", *(f"blocks.{i}" for i in range(2)), "norm", "projector")


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("Et*6L", [(0, 8)]),
        ("Et*3|t*3,L", [(0, 4), (4, 8)]),
        ("E t | (tt|)*2 t L", [(0, 2), (2, 4), (4, 6), (6, 8)]),
        ("E(|t)*6|L", [(0, 1), *((i, i + 1) for i in range(1, 7)), (7, 8)]),
        ("E((t|)t)*3L", [(0, 2), (2, 4), (4, 6), (6, 8)]),
        ("(E)t*2|(t)*4L", [(0, 3), (3, 8)]),
    ],
)
def test_layouts_name_the_layers_of_each_chunk(text: str, bounds: list[tuple[int, int]]) -> None:
    assert chunk_bounds(text, LANGUAGE, "key") == bounds
    assert chunk_bounds(show_layout(LANGUAGE, bounds), LANGUAGE, "key") == bounds


def test_an_encoder_has_its_own_symbols() -> None:
    assert show_layout(VISION, [(0, 2), (2, 4), (4, 5)]) == "Et|tN|P"
    assert chunk_bounds("Et|tN|P", VISION, "key") == [(0, 2), (2, 4), (4, 5)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("E||t*6L", r"chunk 1 has no layer; give every chunk at least one"),
        ("Et*6L|", r"chunk 1 has no layer"),
        ("", r"chunk 0 has no layer"),
        ("Et*5L", r"has the layers Et\*5L, but the module has Et\*6L; name each layer once, in this order"),
        ("t*6EL", r"has the layers t\*6EL, but"),
        ("Et*3|mt*3L", r"'m' is unknown or out of place; write for example"),
        ("E(t*3|t*3L", r"'\(' is unknown or out of place"),
        ("Et*6L)", r"'\)' is unknown or out of place"),
        ("Et*L", r"'\*' is unknown or out of place"),
        ("E(t*2)*3*2L", r"'.' is unknown or out of place"),
        ("Et*999999999L", r"more than 100000 layers"),
        ("Et*" + "9" * 5000 + "L", r"is unknown or out of place"),
        ("E((((t*99999)*99999)*99999)*9999)L", r"more than 100000 layers"),
    ],
)
def test_what_is_no_layout_of_the_module_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^key = '.*{message}"):
        chunk_bounds(text, LANGUAGE, "key")
