"""The JSON schema of configurations and job files, from the same fields that check them: editors complete and check
keys by it.
"""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from partita.config.messages import section_of
from partita.config.schema import AVAILABLE, Config


class _Generate(GenerateJsonSchema):
    """Keys are their own titles."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The schema (draft 2020-12) of a file with these sections: each key with its description, default and values.

    Values that this version does not have are not in it, nor are numbers in quotes, which the loader takes. It looks at
    keys one by one: what goes together with what, and with the ranks, is checked at the start of a run.
    """
    schema = model.model_json_schema(schema_generator=_Generate)
    schema["$schema"] = GenerateJsonSchema.schema_dialect
    sections = schema["$defs"]
    for section in sections.values():
        section["type"] = ["object", "null"]  # an empty section is one of defaults
    for key, values in AVAILABLE.items():
        name, _, setting = key.rpartition(".")
        owner = section_of(Config, name) if name else Config
        assert owner is not None
        properties = sections.get(owner.__name__, schema)["properties"]  # the model itself is the schema, not in it
        entry = properties[setting]
        properties[setting] = {
            "enum": list(values),
            "default": entry["default"],
            "description": f"{entry['description']} (this version has no other values)",
        }
    return schema
