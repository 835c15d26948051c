from dataclasses import replace

import pytest

from mmtrain.errors import DataError
from mmtrain.spec.layer import Division, Flops, LayerSpec, Replaced, WholeBytes
from mmtrain.spec.spec import ModelSpec, ModuleSpec, documents_work, images_work
from mmtrain.spec.work_size import Rates, WorkSize


def layer(name="x", *, trainable=True, params=10, inside=False, shared=0, width=4, rows="rows") -> LayerSpec:
    return LayerSpec(
        name=name,
        num_params=params,
        trainable=trainable,
        matmul_flops=Rates(row=2.0),
        attention_flops=Rates(pair=3.0),
        activation_bytes=Rates(row=5.0),
        output_width=width,
        output_rows=rows,
        weight_before_products=inside,
        num_shared_params=shared,
    )


SIZE = WorkSize(rows=10, pairs=7, outputs=3)


def test_a_frozen_layer_has_no_weight_gradient_and_passes_gradients_through_only_if_asked():
    passing = layer(trainable=False).flops(SIZE, input_grad=True)
    assert (passing.forward, passing.backward_input, passing.backward_weight) == (20 + 21, 20 + 42, 0)
    stopped = layer(trainable=False).flops(SIZE, input_grad=False)
    assert (stopped.forward, stopped.backward_input, stopped.backward_weight) == (41, 0, 0)


def test_the_first_trainable_layer_computes_dx_only_behind_its_own_parameters():
    bare = layer(inside=False).flops(SIZE, input_grad=False)
    normed = layer(inside=True).flops(SIZE, input_grad=False)
    assert bare.backward_input == 42
    assert normed.backward_input == 62
    assert bare.backward_weight == normed.backward_weight == 20


def test_flops_of_a_module_know_what_comes_before_it():
    vision = ModuleSpec(name="vision", layers=(layer(trainable=False), layer()))
    language = ModuleSpec(name="language", layers=(layer(trainable=False),), after=("vision",))
    spec = ModelSpec(modules=(vision, language))
    assert spec.flops("language", SIZE).backward_input == 62
    assert spec.flops("vision", SIZE, layers=[0]).total == 41
    assert not spec.has_backward("vision", 0)
    assert spec.has_backward("vision", 1)
    assert spec.activation_bytes("vision", SIZE) == 50, "the frozen prefix keeps nothing"
    assert spec.activation_bytes("vision", SIZE, layers=[0]) == 0


def test_a_tied_matrix_counts_once_in_the_model_and_twice_in_the_chunks():
    language = ModuleSpec(name="language", layers=(layer(params=96), layer(params=100, shared=96)))
    assert language.num_params == 196
    assert ModelSpec(modules=(language,), tied_embeddings=True).num_params == 100


def test_output_shape_follows_the_work():
    module = ModuleSpec(name="vision", layers=(layer(), layer(width=6, rows="outputs"), layer(width=0)))
    assert [module.output_shape(i, SIZE) for i in range(3)] == [(10, 4), (3, 6), ()]


@pytest.mark.parametrize(
    ("extra_rows", "rows", "pairs"), [(0, 16 + 48, 16**2 + 2 * 24**2), (1, 17 + 50, 17**2 + 2 * 25**2)]
)
def test_work_of_images(extra_rows, rows, pairs):
    module = ModuleSpec(name="vision", layers=(), merge=2, extra_rows=extra_rows)
    work = images_work(module, [(1, 4, 4), (2, 4, 6)])
    assert work == WorkSize(rows=rows, pairs=pairs, outputs=4 + 12)


def test_work_inside_of_windows():
    """Windows of 2 x 2 tokens of 2 x 2 patches: 4 x 6 patches have one of 4 x 4 and one of 4 x 2."""
    module = ModuleSpec(name="vision", layers=(), merge=2, window=2)
    work = images_work(module, [(1, 4, 4), (2, 4, 6)])
    assert work == WorkSize(rows=64, pairs=16**2 + 2 * 24**2, outputs=16, window_pairs=16**2 + 2 * (16**2 + 8**2))
    assert work + work == images_work(module, [(1, 4, 4), (2, 4, 6)] * 2)
    rates = Rates(pair=1.0) + Rates(window_pair=2.0, row=1.0)
    assert rates(work) == work.rows + work.pairs + 2 * work.window_pairs


def test_sound_is_merged_along_time():
    module = ModuleSpec(name="vision", layers=(), merge=4, one_row=True)
    assert images_work(module, [(1, 1, 12)]) == WorkSize(rows=12, pairs=144, outputs=3)
    assert images_work(module, [(1, 1, 15)]) == WorkSize(rows=15, pairs=225, outputs=3)
    with pytest.raises(DataError, match="a sound of 3 rows makes no token, which takes 4; leave out what is shorter"):
        images_work(module, [(1, 1, 3)])


def test_rows_of_sounds_are_cut_where_a_feature_begins():
    """The rows behind the last feature of a sound go with it."""
    module, grids = ModuleSpec(name="audio", layers=(), one_row=True, pool=2), [(1, 1, 5), (1, 1, 4), (1, 1, 3)]
    assert images_work(module, grids) == WorkSize(rows=12, pairs=25 + 16 + 9, outputs=2 + 2 + 1)
    assert module.feature_rows(grids).tolist() == [0, 2, 5, 7, 9, 12]
    assert (module.row_order(grids).tolist(), module.feature_order(grids).tolist()) == (list(range(12)), list(range(5)))
    images = ModuleSpec(name="vision", layers=(), merge=2)
    assert images.feature_rows([(1, 2, 4), (1, 2, 2)]).tolist() == [0, 4, 8, 12]


def test_products_behind_products_have_an_input_gradient():
    embed = LayerSpec(
        name="embed",
        num_params=30,
        num_fixed_params=10,
        trainable=True,
        matmul_flops=Rates(row=5.0),
        inner_flops=Rates(row=3.0),
    )
    assert embed.flops(SIZE, input_grad=False) == Flops(forward=50, backward_input=30, backward_weight=50)
    assert embed.flops(SIZE, input_grad=True) == Flops(forward=50, backward_input=50, backward_weight=50)
    frozen = replace(embed, trainable=False)
    assert frozen.flops(SIZE, input_grad=False) == Flops(forward=50)
    assert (embed.num_trainable_params, frozen.num_trainable_params) == (20, 0)


def test_an_image_that_cannot_be_merged_is_refused():
    with pytest.raises(DataError, match="4 x 5 patches cannot be merged 2 x 2"):
        images_work(ModuleSpec(name="vision", layers=(), merge=2), [(1, 4, 5)])


def test_work_of_documents_counts_causal_pairs():
    assert documents_work([3, 1], num_targets=2) == WorkSize(rows=4, pairs=7, outputs=2)


def test_work_of_documents_counts_pairs_that_a_mask_adds_or_takes_away():
    assert documents_work([6], num_targets=1, extra_pairs=3).pairs == 21 + 3
    assert documents_work([6], num_targets=1, extra_pairs=-2).pairs == 21 - 2


def test_ranks_hold_an_even_share_but_for_what_each_has_whole() -> None:
    block = LayerSpec(
        name="blocks.0",
        num_params=10,
        trainable=True,
        matmul_flops=Rates(row=3),
        activation_bytes=Rates(row=12, text=4),
        attention_bytes=Rates(row=8),
        output_bytes=Rates(row=2),
    )
    assert block.of_rank(Division()) is block
    even = block.of_rank(Division(tp=4))
    assert (even.activation_bytes, even.attention_bytes, even.output_bytes) == (
        Rates(row=3, text=1),
        Rates(row=2),
        Rates(row=0.5),
    )
    whole = WholeBytes(activation=Rates(row=4), output=Rates(row=2))
    mine = replace(block, whole_bytes=whole).of_rank(Division(tp=4))
    assert mine.activation_bytes == Rates(row=4 + 8 / 4, text=1)
    assert mine.output_bytes == Rates(row=2)
    assert (mine.matmul_flops, mine.num_params) == (block.matmul_flops, block.num_params)
    apart = replace(block, whole_bytes=whole).of_rank(Division(tp=4, groups=3))
    assert apart.activation_bytes == Rates(row=4 / 3 + 8 / 12, text=4 / 12)
    seen = replace(block, gathered_keys=Replaced(old=Rates(row=6), new=Rates(row=5)))
    assert seen.of_rank(Division(tp=2, groups=3)).activation_bytes == Rates(row=2, text=4 / 6)
    for groups in (3, 6):  # rows of three groups are seen together
        divided = seen.of_rank(Division(tp=6 // groups, groups=groups, key_groups=3))
        assert divided.activation_bytes == Rates(row=6 / 6 + 5 / 2, text=4 / 6)
    words = replace(block, divided_columns=Replaced(old=Rates(row=6), new=Rates(row=4)), unread_bytes=Rates(row=3))
    assert words.of_rank(Division(groups=2)).activation_bytes == Rates(row=6, text=2)
    mine = words.of_rank(Division(tp=2, groups=2))
    assert (mine.activation_bytes, mine.unread_bytes) == (Rates(row=10 / 4, text=1), Rates(row=3 / 2))


def test_ranks_with_all_rows_hold_more_of_a_layer():
    block = LayerSpec(
        name="blocks.0",
        num_params=10,
        trainable=True,
        matmul_flops=Rates(row=3),
        activation_bytes=Rates(row=12),
        linear_bytes=Rates(row=9),
        output_bytes=Rates(row=2),
        whole_bytes=WholeBytes(activation=Rates(row=4), linear=Rates(row=1)),
        row_bytes=WholeBytes(activation=Rates(row=2), linear=Rates(row=4)),
        gathered_rows=Rates(row=5),
    )
    for groups in (1, 3):
        divided, whole = (block.of_rank(Division(tp=2, groups=groups, whole_rows=rows)) for rows in (False, True))
        found = [
            (x.activation_bytes * groups, x.linear_bytes * groups, x.output_bytes * groups) for x in (divided, whole)
        ]
        assert [[rates.row for rates in of] for of in found] == [
            [pytest.approx(4 + 8 / 2 + 5), pytest.approx(1 + 8 / 2), pytest.approx(2 / 2)],
            [pytest.approx(6 + 6 / 2), pytest.approx(5 + 4 / 2), pytest.approx(2)],
        ]
