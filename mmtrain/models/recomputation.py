"""What activation checkpointing keeps of a block and what it computes again. Pure.

The blocks of the modules are recomputed; first and last layers (embeddings, norms, projector, head) keep all.
"""

from dataclasses import dataclass

from mmtrain.config import ActivationCheckpointConfig
from mmtrain.models.spec import LayerSpec, WorkSize

PRODUCTS = ("aten.mm", "aten.addmm")
"""The operations that linear layers become."""

ATTENTION = (
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "higher_order.flex_attention",
    "higher_order.inductor_compiled_code",
)
"""The operations that attention becomes, by device and mask; the last stands for compiled FlexAttention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """Which results of a block survive until its backward."""

    enable: bool = False
    """Whether blocks are recomputed at all."""
    save_ops: tuple[str, ...] = ()
    """Operations whose results are kept."""

    @classmethod
    def of(cls, section: ActivationCheckpointConfig) -> "Recomputation":
        """What a config section asks for."""
        save = {"selective": (*PRODUCTS, *ATTENTION), "ops": tuple(section.save_ops)}
        return cls(enable=section.mode != "none", save_ops=save.get(section.mode, ()))

    def kept_bytes(self, layer: LayerSpec, size: WorkSize) -> float:
        """Bytes that a layer keeps from forward to backward of a work.

        A recomputed block keeps its input and the results of saved operations, those that its own backward does
        not need included. Saved operations that are neither products nor attention count as much as a block
        without recomputation keeps: more than they take, as long as they are elementwise.
        """
        if not self.recomputes(layer):
            return layer.activation_bytes(size)
        kept = layer.output_bytes(size)  # a block's input has the shape of its output
        if self.saves(PRODUCTS):
            # An adapter has a product as wide as the one it stands beside, and one as narrow as its rank: not counted.
            kept += layer.product_bytes(size) * (1 if layer.adapters is None else 2)
        if self.saves(ATTENTION):
            kept += layer.attention_bytes(size)
        known = (*PRODUCTS, *ATTENTION)
        if not all(_is_one_of(name, known) for name in self.save_ops):
            kept += layer.activation_bytes(size)
        return kept

    def peak_bytes(self, layer: LayerSpec, size: WorkSize) -> float:
        """Bytes that a layer's backward needs on top of `kept_bytes`, for as long as it runs."""
        if not self.recomputes(layer):
            return 0.0
        return max(0.0, layer.activation_bytes(size) - self.kept_bytes(layer, size))

    def repeated_flops(self, layer: LayerSpec, size: WorkSize) -> float:
        """FLOPs of the forward that a layer's backward does again.

        torch stops before a block's last product, whose result no backward needs; it is counted here.
        """
        if not self.recomputes(layer):
            return 0.0
        products = layer.matmul_flops(size)
        if layer.adapters is not None:
            products += layer.adapters.flops(size)
        attention = layer.attention_flops(size)
        return products * (not self.saves(PRODUCTS)) + attention * (not self.saves(ATTENTION))

    def recomputes(self, layer: LayerSpec) -> bool:
        """Whether a layer's backward repeats its forward."""
        return self.enable and layer.is_block

    def saves(self, ops: tuple[str, ...]) -> bool:
        """Whether the results of some of these operations are kept."""
        return any(_is_one_of(name, ops) for name in self.save_ops)


def _is_one_of(name: str, ops: tuple[str, ...]) -> bool:
    """Whether an operation, or one overload of it as in "aten.mm.default", is in a list."""
    return ".".join(name.split(".")[:2]) in ops


KEEP_ALL = Recomputation()
"""No recomputation."""
