"""YAML that a user wrote: read without running code, and refused in one clear sentence where it is none."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from inlay.errors import InlayError, first_line, misspelt


def read_yaml(path: Path) -> Any:
    """What a file says."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise InlayError(f"Cannot read {path}: {error.strerror}.{misspelt(path)}") from error
    except RecursionError as error:
        raise InlayError(f"{path} cannot be read: lists or mappings within one another too many times over.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InlayError(f"{path} is not YAML: {' '.join(str(error).split()) or first_line(error)}") from error


class Loader(yaml.SafeLoader):
    """YAML without code in it. A key that is given twice is an error, because one of the two would be lost; and 1e-3 is
    a number, for which YAML 1.1 wants 1.0e-3."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping whose keys are names, each once."""
        seen: set[Any] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"a key is a list or a mapping (line {key.start_mark.line + 1}); give a name")
            if key.value in seen:
                raise yaml.YAMLError(f"the key {key.value!r} is given twice (line {key.start_mark.line + 1})")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
