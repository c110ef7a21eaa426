"""The JSON schema of configurations and job files, from the same fields that check them: editors complete and check
keys by it.
"""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema


class _Generate(GenerateJsonSchema):
    """Keys are their own titles."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The schema (draft 2020-12) of a file with these sections: each key with its description, default and values.

    Numbers in quotes, which the loader takes, are not in it. It looks at keys one by one: what goes together with what,
    and with the ranks, is checked at the start of a run.
    """
    schema = model.model_json_schema(schema_generator=_Generate)
    schema["$schema"] = GenerateJsonSchema.schema_dialect
    for section in schema["$defs"].values():
        section["type"] = ["object", "null"]  # an empty section is one of defaults
    return schema
