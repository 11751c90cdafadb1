"""`outbox apply` and `outbox endpoint export`."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.support.tiers import sampled

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.commands import Command

pytestmark = pytest.mark.one_major

FILE = """
defaults:
  lanes: 2
endpoints:
  - name: billing
    url: https://example.com/hooks
    types: [order.*, refund.done]
  - name: audit
    url: https://audit.example.com/
    all_tenants: true
    lanes: 1
    retry: {preset: stepped, attempts: 8}
    retryable: [429, 5xx]
    headers: {Authorization: Bearer hunter2}
    filter: '@.total > 100'
    backlog_age: 2d
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "endpoints.yaml"
    path.write_text(FILE)
    return path


def test_apply_prints_each_change(here: Command, file: Path) -> None:
    dry = here("apply", "-f", file, "--dry-run")
    assert dry.out == "+ billing\n+ audit\n2 endpoints would change; nothing was changed\n"
    assert here("endpoint", "list", "--json").json == []
    first = here("apply", "-f", file)
    lines = first.out.splitlines()
    assert (lines[0], lines[2], lines[4:]) == ("+ billing", "+ audit", ["2 endpoints changed"])
    assert lines[1].startswith("    secret: whsec_")
    assert first.err == "Save the secrets now; they are not shown again.\n"
    again = here("apply", "-f", file)
    assert (again.code, again.out) == (0, "= billing\n= audit\nnothing to change\n")
    here("endpoint", "add", "other", "https://example.com/")
    file.write_text(FILE.replace("lanes: 2", "lanes: 4").replace("hunter2", "hunter3"))
    changed = here("apply", "-f", file)
    assert changed.out == (
        "~ billing\n    lanes: 2 -> 4\n"
        "~ audit\n    headers: Authorization -> Authorization (values not shown)\n"
        "not in the file, unchanged (--prune removes them): other\n"
        "2 endpoints changed\n"
    )
    assert here("apply", "-f", file, "--prune").out.startswith("- other\n= billing\n")


def test_apply_as_json(here: Command, file: Path) -> None:
    first = here("apply", "-f", file, "--json").json
    assert (first["dry_run"], first["changes"], first["not_in_the_file"]) == (False, 2, [])
    assert [each["action"] for each in first["endpoints"]] == ["add", "add"]
    assert all(each["secret"].startswith("whsec_") for each in first["endpoints"])
    file.write_text(FILE.replace("lanes: 2", "lanes: 4"))
    dry = here("apply", "-f", file, "--dry-run", "--json").json
    assert dry["endpoints"][0]["changed"] == {"lanes": ["2", "4"]}
    assert dry["endpoints"][0]["secret"] is None


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_apply_prints_no_secrets_on_request(here: Command, file: Path, words: list[str]) -> None:
    applied = here("apply", "-f", file, "--hide-secrets", *words)
    assert "billing" in applied.out
    assert "whsec_" not in applied.out + applied.err


LETTERS = "abcdefghi"
# Each names nine times what the one before is.
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{this}: &{this} [{', '.join([f'*{before}'] * 9)}]\n" for before, this in pairwise(LETTERS)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{this}: &{this} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n"
    for before, this in pairwise(LETTERS)
)


def test_applying_an_export_changes_nothing(here: Command, file: Path) -> None:
    here("apply", "-f", file)
    here("endpoint", "add", "yes", "https://example.com/", "--tenant", "ünïcode: #")
    export = here("endpoint", "export")
    assert "whsec_" not in export.out
    assert yaml.safe_load(export.out) == here("endpoint", "export", "--json").json
    file.write_text(export.out)
    assert here("apply", "-f", file, "--prune").out.splitlines()[-1] == "nothing to change"
    assert "hunter2" not in export.out
    # It holds everything but that: what is gone comes back the same, but for the ids.
    here("endpoint", "remove", "audit")
    here("endpoint", "remove", "yes")
    without_ids = "".join(
        line.replace("- id:", "- #") if "- id:" in line else line
        for line in export.out.splitlines(keepends=True)
    )
    file.write_text(without_ids)
    lost = here("apply", "-f", file)
    assert lost.code == 2
    assert "endpoints[0].headers.Authorization: has no value, and the endpoint has" in lost.error
    file.write_text(without_ids.replace("Authorization: null", "Authorization: Bearer hunter3"))
    assert here("apply", "-f", file).out.count("\n+ ") + 1 >= 2
    before = yaml.safe_load(export.out)["endpoints"]
    after = here("endpoint", "export", "--json").json["endpoints"]
    for each in (*before, *after):
        del each["id"]
    assert sorted(after, key=lambda e: e["name"]) == sorted(before, key=lambda e: e["name"])


def test_json_toml_and_stdin_are_equivalent(here: Command, tmp_path: Path) -> None:
    as_json = tmp_path / "e.json"
    as_json.write_text('{"endpoints": [{"name": "a", "url": "https://a.test/", "lanes": 2}]}')
    as_toml = tmp_path / "e.toml"
    as_toml.write_text('[[endpoints]]\nname = "a"\nurl = "https://a.test/"\nlanes = 2\n')
    assert here("apply", "-f", as_json).out.startswith("+ a\n")
    assert here("apply", "-f", as_toml).out == "= a\nnothing to change\n"
    stdin = b"endpoints: [{name: a, url: 'https://a.test/', lanes: 2}]"
    assert here("apply", "-f", "-", stdin=stdin).out == "= a\nnothing to change\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "says"),
    sampled(
        [
            ("e.yaml", "endpoints:\n  - name: a\n    name: b\n", 'line 3: duplicate key "name"'),
            ("e.yaml", "endpoints: [", "line 1: "),
            (
                "e.yaml",
                "endpoints: !!python/object:os.system {}",
                "could not determine a constructor",
            ),
            ("e.yaml", "", "endpoints: must be a list of endpoints"),
            ("e.yaml", "endpoints:\n- {name: no, url: x}", "endpoints[0].name: must be a text"),
            ("e.yaml", "? [a]\n: 1\n", "line 1: a key is a list or a mapping"),
            ("e.yaml", BOMB + "endpoints: [{name: *i, url: x}]", "more than 1000000 values"),
            ("e.yaml", BOMB + "? *i\n: x\n", "more than 1000000 values"),
            ("e.yaml", MERGES + "endpoints: [*i]", "more than 1000000 values"),
            ("e.yaml", "&a [*a]", "cannot be read: maximum recursion depth"),
            ("e.yaml", "[" * 5000, "cannot be read: maximum recursion depth"),
            ("e.yaml", "lanes: !!bool maybe", "a value does not match its tag"),
            ("e.yaml", "at: !!timestamp soon", "a value does not match its tag"),
            ("e.yaml", "endpoints: [{name: a, url: b, lanes: 0x" + "f" * 5000 + "}]", "too many"),
            ("e.json", '{"endpoints": [], "endpoints": []}', 'duplicate key "endpoints"'),
            ("e.json", "{", "cannot be read: "),
            ("e.toml", "a = ", "cannot be read: "),
            (
                "e.yaml",
                "endpoints:\n- {name: a, url: 'http://a.test/'}",
                "endpoints[0].url: the connection would not be encrypted",
            ),
            (
                "e.yaml",
                "endpoints:\n- {name: a, url: 'https://a.test/', retry: {base: soon}}",
                'endpoints[0].retry.base: "soon" is not a time',
            ),
        ],
        6,
    ),
)
def test_an_error_in_a_file_names_the_file_and_the_place(
    outbox: Command, tmp_path: Path, name: str, text: str, says: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    result = outbox("apply", "-f", path)
    assert result.code == 2
    assert result.error.startswith(f"{path}: ")
    assert says in result.error


def test_an_error_found_by_the_database_names_the_place(here: Command, tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text("endpoints: [{name: a, url: 'https://a.test/', filter: '@.a'}]")
    result = here("apply", "-f", path)
    assert result.code == 2
    assert result.error.startswith(
        f"{path}: endpoints[0].filter: invalid SQL/JSON path: syntax error"
    )


def test_a_missing_or_binary_file_is_reported(outbox: Command, tmp_path: Path) -> None:
    missing = outbox("apply", "-f", tmp_path / "none.yaml")
    assert (missing.code, missing.error) == (
        2,
        f"{tmp_path}/none.yaml: cannot be read: No such file or directory",
    )
    (tmp_path / "e.yaml").write_bytes(b"\xff\xfe\x00")
    assert outbox("apply", "-f", tmp_path / "e.yaml").code == 2
    assert outbox("apply").code == 2
    assert "requires --prune" in outbox("apply", "-f", tmp_path / "e.yaml", "--dead-letter").error
