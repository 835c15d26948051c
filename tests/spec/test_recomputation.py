"""What recomputed blocks keep and repeat, as planning counts it."""

import pytest

from mmtrain.config.sections import ActivationCheckpointConfig
from mmtrain.errors import ConfigError
from mmtrain.spec.layer import AdapterSpec, LayerSpec
from mmtrain.spec.recomputation import Recomputation
from mmtrain.spec.work_size import Rates, WorkSize

SIZE = WorkSize(rows=10, pairs=100, outputs=3)


def layer(name: str = "layers.0", adapters: AdapterSpec | None = None) -> LayerSpec:
    return LayerSpec(
        name=name, num_params=1, trainable=True, matmul_flops=Rates(row=7), attention_flops=Rates(pair=2),
        activation_bytes=Rates(row=50), product_bytes=Rates(row=20), attention_bytes=Rates(row=6),
        output_bytes=Rates(row=4), adapters=adapters,
    )  # fmt: skip


def kept_peak_repeated(mode: str, *save_ops: str, of: LayerSpec | None = None) -> tuple[float, float, float]:
    recomputation = Recomputation.of(ActivationCheckpointConfig(mode=mode, save_ops=list(save_ops)))  # type: ignore[arg-type]
    of = of or layer()
    return (
        recomputation.kept_bytes(of, SIZE),
        recomputation.peak_bytes(of, SIZE),
        recomputation.repeated_flops(of, SIZE),
    )


def test_each_mode_keeps_and_repeats_what_it_says() -> None:
    assert kept_peak_repeated("none") == (500, 0, 0)
    assert kept_peak_repeated("full") == (40, 460, 70 + 200)
    assert kept_peak_repeated("selective") == (40 + 200 + 60, 200, 0)
    assert kept_peak_repeated("ops", "aten.mm", "aten.addmm.default") == (240, 260, 200)
    assert kept_peak_repeated("ops", "aten._scaled_dot_product_flash_attention_for_cpu") == (100, 400, 70)


def test_an_operation_of_unknown_size_counts_as_all_that_a_block_keeps() -> None:
    assert kept_peak_repeated("ops", "aten.silu") == (540, 0, 270)


def test_first_and_last_layers_keep_all() -> None:
    assert kept_peak_repeated("full", of=layer("embed")) == (500, 0, 0)


def test_adapters_have_a_product_beside_each_other_one_and_repeat_theirs() -> None:
    adapters = AdapterSpec(num_params=1, flops=Rates(row=3), inside_flops=Rates())
    assert kept_peak_repeated("selective", of=layer(adapters=adapters)) == (40 + 400 + 60, 0, 0)
    assert kept_peak_repeated("full", of=layer(adapters=adapters)) == (40, 460, 70 + 30 + 200)


def test_the_default_is_no_recomputation() -> None:
    assert Recomputation.of(ActivationCheckpointConfig()) == Recomputation()


@pytest.mark.parametrize(("mode", "save_ops"), [("full", ["aten.mm"]), ("ops", [])])
def test_a_list_of_operations_belongs_to_mode_ops_alone(mode: str, save_ops: list[str]) -> None:
    with pytest.raises(ConfigError, match="takes a list of operations"):
        ActivationCheckpointConfig(mode=mode, save_ops=save_ops)  # type: ignore[arg-type]
