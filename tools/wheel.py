"""A wheel with the compiled engine in it, where a C compiler is there; else a pure one, as with
SLUICE_PURE=1.

Hatchling calls this for `pip wheel`, `pip install .` and `make dist`, not for an editable install:
that never needs a compiler, and `make native` builds in place.
"""

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WheelHook(BuildHookInterface):  # type: ignore[type-arg, misc]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or os.environ.get("SLUICE_PURE") == "1":
            return
        native = _native(Path(self.root))
        self._built = tempfile.TemporaryDirectory(prefix="sluicemq-engine-")
        try:
            made = native.build(Path(self._built.name))
        except Exception as error:  # noqa: BLE001 -- of the compiler, of many kinds
            self.app.display_warning(f"without the compiled engine, which is slower: {error}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for module in made:
            build_data["force_include"][str(module)] = f"sluicemq/engine/{module.name}"


def _native(root: Path) -> Any:
    spec = importlib.util.spec_from_file_location("native", root / "tools" / "native.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
