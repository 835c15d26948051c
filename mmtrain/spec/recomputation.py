"""The bytes that a block keeps and the FLOPs that it recomputes under each memory strategy. Pure.

Only the blocks of modules are recomputed; first and last layers (embeddings, norms, projector, head) keep all.
"""

from dataclasses import dataclass

from mmtrain.config.sections import ActivationCheckpointConfig
from mmtrain.spec.layer import LayerSpec
from mmtrain.spec.memory_strategies import BlockMemory
from mmtrain.spec.work_size import WorkSize

PRODUCTS = ("aten.mm", "aten.addmm")
"""The operations of linear layers."""

ATTENTION = (
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "torch_attn._varlen_attn",
    "higher_order.flex_attention",
    "higher_order.inductor_compiled_code",
)
"""The operations of attention, by device and mask; the last one is compiled FlexAttention."""

STATIC = {
    "none": BlockMemory.KEEP,
    "selective": BlockMemory.SELECTIVE,
    "full": BlockMemory.RECOMPUTE,
    "ops": BlockMemory.SELECTIVE,
    "offload": BlockMemory.OFFLOAD,
}
"""The strategy of all blocks for each `activation_checkpoint.mode`."""


ELEMENTWISE_SHARE = 0.5
"""Fraction of a block's forward time in operators other than products and attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """The results of a block that are kept until its backward."""

    enable: bool = False
    """Whether blocks are recomputed at all."""
    save_ops: tuple[str, ...] = ()
    """Operations whose results are kept."""
    offload: bool = False
    """Blocks keep all activations in host memory."""

    @classmethod
    def of(cls, section: ActivationCheckpointConfig) -> "Recomputation":
        """The recomputation that a config section sets for all blocks."""
        return cls.by(STATIC[section.mode], section)

    @classmethod
    def by(cls, how: BlockMemory, section: ActivationCheckpointConfig) -> "Recomputation":
        """The recomputation of one strategy. Args: section: has the operations that `selective` saves."""
        if how is BlockMemory.OFFLOAD:
            return cls(offload=True)
        saved = tuple(section.save_ops) or (*PRODUCTS, *ATTENTION)
        return cls(
            enable=how in (BlockMemory.SELECTIVE, BlockMemory.RECOMPUTE),
            save_ops=saved if how is BlockMemory.SELECTIVE else (),
        )

    @property
    def name(self) -> str:
        """`selective` or `recompute` if it equals that preset; empty otherwise."""
        if not self.enable or self.save_ops not in ((), (*PRODUCTS, *ATTENTION)):
            return ""
        return (BlockMemory.SELECTIVE if self.save_ops else BlockMemory.RECOMPUTE).value

    def kept_bytes(self, layer: LayerSpec, size: WorkSize) -> float:
        """Bytes that a layer keeps from forward to backward of a work.

        A recomputed block keeps its input and the results of all saved operations, even if its backward does not need
        them. Saved operations other than products and attention count as much as a block without recomputation keeps:
        an upper bound if they are elementwise.
        """
        if self.offloads(layer):
            return 0.0
        if not self.recomputes(layer):
            return layer.activation_bytes(size)
        num_bytes = layer.output_bytes(size)  # a block's input has the shape of its output
        if self.saves(PRODUCTS):
            # An adapter has a product as wide as that of its linear layer, and one as narrow as its rank (not counted).
            # On tensor-parallel ranks this is an upper bound: some adapters give only this rank's rows.
            num_bytes += layer.product_bytes(size) * (1 if layer.adapters is None else 2)
        if self.saves(ATTENTION):
            num_bytes += layer.attention_bytes(size)
        known_ops = (*PRODUCTS, *ATTENTION)
        if not all(_is_one_of(name, known_ops) for name in self.save_ops):
            num_bytes += layer.activation_bytes(size)
        return num_bytes

    def peak_bytes(self, layer: LayerSpec, size: WorkSize) -> float:
        """Bytes that a layer's backward needs in addition to `kept_bytes` while it runs.

        During the backward of an offloaded block, the block before it is copied back, and possibly the last block of
        the backward that this rank runs next.
        """
        if self.offloads(layer):
            return 3 * layer.activation_bytes(size)
        if not self.recomputes(layer):
            return 0.0
        unread = layer.unread_bytes(size) if self.saves(PRODUCTS) else 0.0  # kept, but not part of the activations
        return max(0.0, layer.activation_bytes(size) + unread - self.kept_bytes(layer, size))

    def repeated_flops(self, layer: LayerSpec, size: WorkSize) -> float:
        """FLOPs of the part of a layer's forward that its backward repeats.

        torch stops before a block's last product, whose result no backward needs; it is counted here.
        """
        if not self.recomputes(layer):
            return 0.0
        products = layer.matmul_flops(size)
        if layer.adapters is not None:
            products += layer.adapters.flops(size)
        attention = layer.attention_flops(size)
        return products * (not self.saves(PRODUCTS)) + attention * (not self.saves(ATTENTION))

    def repeated_share(self, layer: LayerSpec, size: WorkSize) -> float:
        """The estimated fraction of a layer's forward time that its backward repeats, without a measurement.

        A block spends about half of its forward in operators without FLOPs (norms, activations, rotary positions,
        sums), all of which are repeated: 0.42 to 0.67 for simulated blocks of DIP's models on an H800, with eager
        kernels.
        """
        if not self.recomputes(layer):
            return 0.0
        flops = layer.flops(size).forward
        counted = self.repeated_flops(layer, size) / flops if flops else 1.0
        return ELEMENTWISE_SHARE + (1 - ELEMENTWISE_SHARE) * counted

    def recomputes(self, layer: LayerSpec) -> bool:
        """Whether a layer's backward repeats its forward."""
        return self.enable and layer.is_block

    def offloads(self, layer: LayerSpec) -> bool:
        """Whether a layer keeps its activations in host memory."""
        return self.offload and layer.is_block

    def offloaded_bytes(self, layer: LayerSpec, size: WorkSize) -> float:
        """Bytes of a layer that are copied to host memory, and back."""
        return layer.activation_bytes(size) if self.offloads(layer) else 0.0

    def saves(self, ops: tuple[str, ...]) -> bool:
        """Whether the results of some of these operations are kept."""
        return any(_is_one_of(name, ops) for name in self.save_ops)


def _is_one_of(name: str, ops: tuple[str, ...]) -> bool:
    """Whether an operation, or one overload of it as in "aten.mm.default", is in a list."""
    return ".".join(name.split(".")[:2]) in ops
