"""Writes docs/coming_from.md: python docs/make_coming_from_page.py > docs/coming_from.md"""

from mmtrain.config.foreign_keys import AUTOMODEL, FOREIGN, HUGGING_FACE, LLAMA_FACTORY, SWIFT, TITAN, OurKeys

_HEAD = """# Coming from another trainer

*Made by `python docs/make_coming_from_page.py > docs/coming_from.md` from `mmtrain/config/foreign_keys.py`; do not edit
it by hand.*

What keys of other trainers are here. Who writes one of them gets this answer as an error; keys with equal names in
equal sections (torchtitan's `parallelism.tensor_parallel_degree`, say) are not listed. Names are of late 2026. Every
key of ours is explained in [configuration](config.md).
"""


def table(trainer: str) -> str:
    """The keys of one trainer."""
    rows = [f"| `{name}` | {_ours(known)} |" for name, known in FOREIGN.items() if trainer in known.of]
    return "\n".join([f"## {trainer}", "", "| there | here |", "|---|---|", *rows])


def _ours(known: OurKeys) -> str:
    parts = [*(f"`{key}`" for key in known.keys), *([known.how] if known.how else [])]
    return "; ".join(parts) if known.keys else f"- {known.how}"


def page() -> str:
    """The whole page."""
    return "\n\n".join([_HEAD.rstrip(), *map(table, (LLAMA_FACTORY, SWIFT, AUTOMODEL, HUGGING_FACE, TITAN))]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
