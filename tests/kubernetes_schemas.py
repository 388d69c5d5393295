"""Checks Kubernetes manifests as strictly as a cluster that refuses unknown fields.

Core objects are checked by `kubernetes-validate`; a JobSet and a TrainJob by their published schemas, from
the folder that DTRAIN_TEST_SCHEMAS names. It renders no manifest.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

_CUSTOM = {"JobSet": "jobset.x-k8s.io_jobsets.yaml", "TrainJob": "trainer.kubeflow.org_trainjobs.yaml"}
_VERSION = "1.32"


def check_core(document: dict[str, Any]) -> None:
    """Fail if an object of the core API, or of batch or networking, does not fit its schema."""
    validate = pytest.importorskip("kubernetes_validate")
    validate.validate(document, _VERSION, strict=True)


def check_custom(document: dict[str, Any]) -> None:
    """Fail if a JobSet or a TrainJob does not fit the published definition; skip where there is none."""
    jsonschema = pytest.importorskip("jsonschema")
    # `jsonschema.validate` would also check the schema itself each time, which takes a second.
    jsonschema.Draft202012Validator(_definition(document["kind"])).validate(document)


@functools.cache
def _definition(kind: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    folder = os.environ.get("DTRAIN_TEST_SCHEMAS", "")
    if not folder or not (path := Path(folder) / _CUSTOM[kind]).exists():
        pytest.skip(f"DTRAIN_TEST_SCHEMAS names no folder with {_CUSTOM[kind]}")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    (version,) = yaml.load(path.read_text(encoding="utf-8"), loader)["spec"]["versions"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object"}  # Kubernetes defines its fields, not the schema
    schema["properties"]["apiVersion"]["const"] = f"{_group(kind)}/{version['name']}"
    _refuse_unknown_fields(schema)
    return schema


def _group(kind: str) -> str:
    return _CUSTOM[kind].partition("_")[0]


def _refuse_unknown_fields(schema: Any) -> None:
    if isinstance(schema, list):
        for item in schema:
            _refuse_unknown_fields(item)
    if not isinstance(schema, dict):
        return
    if "properties" in schema and isinstance(schema["properties"], dict) and schema.get("type") == "object":
        schema.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        schema.setdefault("anyOf", [{"type": "integer"}, {"type": "string"}])
    for value in schema.values():
        _refuse_unknown_fields(value)
