"""
What a record looks like, field by field, so that a damaged one is named and not half believed.

    JSON of a file -> check_record -> the same, or ValueError saying which field is amiss
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, StringConstraints, ValidationError

TIME = StringConstraints(pattern=r"^\d{4}-[01]\d-[0-3]\d [0-2]\d:[0-5]\d:[0-5]\d$")
Setting = str | float | int | bool | None
Number = float | int | str  # "nan", "inf", "-inf": what JSON has no number for


class Shape(BaseModel, strict=True, extra="forbid"):
    """Nothing is converted, nothing unknown is let through."""


class Provenance(Shape):
    run_id: str
    seed: int
    inputs: dict[str, str]
    outputs: dict[str, str]
    commit: str
    dirty: bool


class Cost(Shape):
    wall_seconds: float
    devices: int
    device: str
    device_seconds: float
    own_device_seconds: float | None = None
    """Without what earlier calls added to the section."""


class File(Shape):
    bytes: int
    sha256: str


class Table(Shape):
    title: str | None = None
    columns: list[str]
    rows: list[list[Number | bool | None]]


class Estimate(Shape):
    value: Number
    n: int
    se: Number
    k: int | None = None
    item_se: Number | None = None
    repeat_se: Number | None = None


class Scores(Shape):
    of: str
    scores: str
    key: str | None = None
    """What decides these scores, where a section is filled task by task."""


class Weights(Shape):
    weights: dict[str, float]


class Record(Shape):
    """`records.write_record` says what each field is."""

    section: Annotated[str, StringConstraints(min_length=1)]
    timestamp: Annotated[str, TIME]
    key: str
    settings: dict[str, Setting | list[Setting]]
    values: dict[str, Estimate | Number | bool | None]
    items: dict[str, Scores | Weights]
    tables: list[Table]
    series: dict[str, list[list[Number]]]
    metrics: str | None
    files: dict[str, File]
    provenance: Provenance
    cost: Cost


def check_record(record: Any, path: Path) -> dict[str, Any]:
    """The record that `path` holds. Raises ValueError naming the file and the first wrong field."""
    try:
        Record.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise ValueError(
            f"{path} is no record: {where}: {first['msg']}; delete it and repeat that stage"
        ) from error
    return record
