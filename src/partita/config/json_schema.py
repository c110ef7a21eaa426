"""The JSON schema of configurations and job files, generated from the fields that validate them.

Editors use it to complete and check keys.
"""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema


class _Generate(GenerateJsonSchema):
    """A schema generator without titles: keys are their own titles."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schema (draft 2020-12) of a file with these sections: each key with its description, default and
    values.

    Unlike the loader, it does not accept numbers in quotes. It checks single keys; combinations of keys, and of keys
    with the number of ranks, are checked at the start of a run.
    """
    schema = model.model_json_schema(schema_generator=_Generate)
    schema["$schema"] = GenerateJsonSchema.schema_dialect
    for section in schema["$defs"].values():
        section["type"] = ["object", "null"]  # an empty section has all defaults
    return schema
