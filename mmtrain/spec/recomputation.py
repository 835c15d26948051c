"""What a block keeps, computes again or brings back under each memory strategy. Pure.

The blocks of the modules are recomputed; first and last layers (embeddings, norms, projector, head) keep all.
"""

from dataclasses import dataclass

from mmtrain.config.sections import ActivationCheckpointConfig
from mmtrain.spec.memory_strategies import BlockMemory
from mmtrain.spec.spec import LayerSpec, WorkSize

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

STATIC = {
    "none": BlockMemory.KEEP,
    "selective": BlockMemory.SELECTIVE,
    "full": BlockMemory.RECOMPUTE,
    "ops": BlockMemory.SELECTIVE,
    "offload": BlockMemory.OFFLOAD,
}
"""activation_checkpoint.mode -> what all blocks do."""


ELEMENTWISE_SHARE = 0.5
"""Of a block's forward, what is neither a product nor attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """Which results of a block survive until its backward."""

    enable: bool = False
    """Whether blocks are recomputed at all."""
    save_ops: tuple[str, ...] = ()
    """Operations whose results are kept."""
    offload: bool = False
    """Blocks keep everything, in host memory."""

    @classmethod
    def of(cls, section: ActivationCheckpointConfig) -> "Recomputation":
        """What a config section asks of all blocks."""
        return cls.by(STATIC[section.mode], section)

    @classmethod
    def by(cls, how: BlockMemory, section: ActivationCheckpointConfig) -> "Recomputation":
        """What one strategy means. Args: section: says what `selective` saves."""
        if how is BlockMemory.OFFLOAD:
            return cls(offload=True)
        saved = tuple(section.save_ops) or (*PRODUCTS, *ATTENTION)
        return cls(
            enable=how in (BlockMemory.SELECTIVE, BlockMemory.RECOMPUTE),
            save_ops=saved if how is BlockMemory.SELECTIVE else (),
        )

    @property
    def name(self) -> str:
        """`selective` and `recompute` as presets have them; empty: something else, or nothing."""
        if not self.enable or self.save_ops not in ((), (*PRODUCTS, *ATTENTION)):
            return ""
        return (BlockMemory.SELECTIVE if self.save_ops else BlockMemory.RECOMPUTE).value

    def kept_bytes(self, layer: LayerSpec, size: WorkSize) -> float:
        """Bytes that a layer keeps from forward to backward of a work.

        A recomputed block keeps its input and the results of saved operations, those that its own backward does
        not need included. Saved operations that are neither products nor attention count as much as a block
        without recomputation keeps: more than they take, as long as they are elementwise.
        """
        if self.offloads(layer):
            return 0.0
        if not self.recomputes(layer):
            return layer.activation_bytes(size)
        kept = layer.output_bytes(size)  # a block's input has the shape of its output
        if self.saves(PRODUCTS):
            # An adapter has a product as wide as the one it stands beside, and one as narrow as its rank: not counted.
            # On tensor-parallel ranks that is more than there is: some adapters give this rank's rows alone.
            kept += layer.product_bytes(size) * (1 if layer.adapters is None else 2)
        if self.saves(ATTENTION):
            kept += layer.attention_bytes(size)
        known = (*PRODUCTS, *ATTENTION)
        if not all(_is_one_of(name, known) for name in self.save_ops):
            kept += layer.activation_bytes(size)
        return kept

    def peak_bytes(self, layer: LayerSpec, size: WorkSize) -> float:
        """Bytes that a layer's backward needs on top of `kept_bytes`, for as long as it runs.

        While an offloaded block has its backward, the one before it comes back, and perhaps the last one of the
        backward that this rank runs next.
        """
        if self.offloads(layer):
            return 3 * layer.activation_bytes(size)
        if not self.recomputes(layer):
            return 0.0
        unread = layer.unread_bytes(size) if self.saves(PRODUCTS) else 0.0  # kept, but no part of the activations
        return max(0.0, layer.activation_bytes(size) + unread - self.kept_bytes(layer, size))

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

    def repeated_share(self, layer: LayerSpec, size: WorkSize) -> float:
        """The part of a layer's forward that its backward does again, in seconds, where nobody has measured it.

        A block spends about half of its forward in what has no FLOPs (norms, activations, rotary positions, sums), all
        of which is repeated: 0.55 to 0.65 of the simulated blocks of DIP's models on an H800, with eager kernels.
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
        """Whether what a layer keeps waits in host memory."""
        return self.offload and layer.is_block

    def offloaded_bytes(self, layer: LayerSpec, size: WorkSize) -> float:
        """Bytes of a layer that go to host memory, and come back."""
        return layer.activation_bytes(size) if self.offloads(layer) else 0.0

    def saves(self, ops: tuple[str, ...]) -> bool:
        """Whether the results of some of these operations are kept."""
        return any(_is_one_of(name, ops) for name in self.save_ops)


def _is_one_of(name: str, ops: tuple[str, ...]) -> bool:
    """Whether an operation, or one overload of it as in "aten.mm.default", is in a list."""
    return ".".join(name.split(".")[:2]) in ops
