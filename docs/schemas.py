"""Write the JSON schemas that ``partita schema`` prints into the package: python -m docs.schemas"""

import json
from pathlib import Path

from partita.config.json_schema import json_schema
from partita.config.schema import Config
from partita.train.job import Job

FOLDER = Path(__file__).parents[1] / "src" / "partita" / "cli" / "schemas"
MODELS = {"config.json": Config, "job.json": Job}


def text(name: str) -> str:
    return json.dumps(json_schema(MODELS[name]), indent=2) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in MODELS:
        (FOLDER / name).write_text(text(name), encoding="utf-8")
