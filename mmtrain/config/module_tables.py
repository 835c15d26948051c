"""[model.modules.NAME]: the table of a module by what it reads, as the section of its kind."""

from collections.abc import Mapping
from typing import Any

from mmtrain.config.model import MODULES
from mmtrain.config.toml_sections import shown
from mmtrain.errors import ConfigError

_KINDS = {"images": "vision", "audio": "audio", "text": "language", "latents": "dit", "frames": "vae"}
"""`kind` of a module, which is what it reads -> its usual name."""
_FEEDS = {"vision": "language", "language": "dit", "vae": "dit"}
"""Name of a module -> the one that its output enters, if the model has it."""


def short_form(model: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The table [model] with each [model.modules.NAME] as the section of its kind, such as [model.encoder].

    Args: where: the file, for errors.
    Raises: ConfigError: `kind`, NAME or `feeds` say what the model is not, or a module has both forms.
    """
    modules, rest = model.get("modules", {}), {key: value for key, value in model.items() if key != "modules"}
    encoders: dict[str, Any] = {}
    if not isinstance(modules, Mapping):
        raise ConfigError(f"{where}: model.modules = {shown(modules)}; write one section [model.modules.NAME] a module")
    for name, table in modules.items():
        path = f"{where}: model.modules.{name}"
        if not isinstance(table, Mapping):
            raise ConfigError(f"{path} = {shown(table)}; it is a section, written [model.modules.{name}]")
        kind = table.get("kind")
        if not isinstance(kind, str) or kind not in _KINDS:
            raise ConfigError(f"{path}.kind = {shown(kind)}; choose one of {', '.join(map(repr, _KINDS))}")
        if kind in ("images", "audio") and name not in MODULES:
            if table.get("feeds", "language") != "language":
                raise ConfigError(f'{path}.feeds = {shown(table["feeds"])}; an encoder feeds "language"')
            encoders[name] = {key: value for key, value in table.items() if key != "feeds"}
            continue
        if _KINDS[kind] != name:
            raise ConfigError(
                f'{path}: a model has one module of kind "{kind}", which is called {_KINDS[kind]}; write '
                f"[model.modules.{_KINDS[kind]}]"
            )
        target = _FEEDS.get(name, "")
        expected = target if target in modules or MODULES.get(target) in rest else ""
        if table.get("feeds", expected) != expected:
            right = f'it must be "{expected}"' if expected else "its output enters no other module; leave it out"
            raise ConfigError(f"{path}.feeds = {shown(table['feeds'])}; {right}")
        if MODULES[name] in model:
            raise ConfigError(
                f"{path} and model.{MODULES[name]} are the same module; write all its keys in one of them"
            )
        rest[MODULES[name]] = {key: value for key, value in table.items() if key not in ("kind", "feeds")}
    return rest | ({"modules": encoders} if encoders else {})
