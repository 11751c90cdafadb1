"""Each check is part of an examination."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import outbox_doctor
from outbox_doctor.check import Check
from outbox_doctor.examination import FIRST, LIVE, PRECONDITIONS, PROBE


def test_every_check_is_in_one_list() -> None:
    defined = {
        id(value): f"{module.name}.{name}"
        for module in iter_modules(outbox_doctor.__path__, "outbox_doctor.")
        for name, value in vars(import_module(module.name)).items()
        if isinstance(value, Check)
    }
    listed = [id(each) for each in (*FIRST, *PRECONDITIONS, *LIVE, *PROBE)]
    assert defined
    assert [name for key, name in defined.items() if listed.count(key) != 1] == []
