"""Which ids and names a row can carry: the same rule whatever the database."""

from __future__ import annotations

#: The longest task id: what an index of either database holds with room to spare.
ID_LENGTH = 255


def flaw_of_id(task_id: object) -> str | None:
    """Why no row can have this task id; None where one can."""
    flaw = "is empty" if task_id == "" else flaw_of_text(task_id)
    if flaw is None and len(str(task_id)) > ID_LENGTH:
        return f"has {len(str(task_id))} characters, more than {ID_LENGTH}"
    return flaw


def flaw_of_text(value: object) -> str | None:
    """Why no row can hold this text; None where one can."""
    if not isinstance(value, str):
        return f"is no text but a {type(value).__name__}"
    if "\x00" in value:
        return "has a NUL character in it"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "has half a surrogate pair in it, which is no character"
    return None


def flaw_of_message(task_id: object, task_name: object) -> str | None:
    """Why no row can be made of a message with this id and this name, in words; None where one can."""
    for what, value, flaw in (
        ("task id", task_id, flaw_of_id(task_id)),
        ("task name", task_name, flaw_of_text(task_name)),
    ):
        if flaw is not None:
            return f"the {what} {shortened(value)} {flaw}"
    return None


def shortened(value: object) -> str:
    """A value for a message, in printable characters."""
    return f"{value!a:.60}"
