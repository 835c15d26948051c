"""Ranges of layers as a user writes them."""

import pytest

from mmtrain.config.layer_ranges import check_ranges, layers_of
from mmtrain.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("", range(8)),
        ("5..", (5, 6, 7)),
        ("..2", (0, 1, 2)),
        ("-2..", (6, 7)),
        ("..-7", (0, 1)),
        ("3", (3,)),
        ("-1", (7,)),
        ("0..1, 4 , 6..7", (0, 1, 4, 6, 7)),
        ("2..2", (2,)),
        ("1..3,2..4", (1, 2, 3, 4)),
    ],
)
def test_what_ranges_name(text, layers):
    if text:
        check_ranges("key", text)
    assert layers_of("key", text, 8) == frozenset(layers)


@pytest.mark.parametrize("text", ["..", "a", "1...3", "1..2..3", "1-3", "3,", ",", "1.5", "--1", "1:3", " "])
def test_what_is_no_range_is_refused(text):
    with pytest.raises(ConfigError, match=r"key = .* is no range of layers; write a first"):
        check_ranges("key", text)


@pytest.mark.parametrize("text", ["8", "7..8", "-9..", "5..3", "3..-8", "0,8.."])
def test_layers_that_there_are_not_are_refused(text):
    check_ranges("key", text)
    with pytest.raises(ConfigError, match=r"key = .* names no layers of 0\.\.7, which are those of the module"):
        layers_of("key", text, 8)
