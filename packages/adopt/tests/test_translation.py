"""What becomes of the endpoints of other senders."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.errors import UsageError
from outbox_adopt.peers.document import SOURCES, read_records
from outbox_adopt.peers.record import Record
from outbox_adopt.peers.translation import ImportOptions, NotImported
from tests.support.peers import (
    CONVOY_ENDPOINT,
    CONVOY_SUBSCRIPTION,
    OUTPOST_DESTINATION,
    SVIX_APPLICATION,
    SVIX_ENDPOINT,
    SVIX_KEY,
)

if TYPE_CHECKING:
    from pathlib import Path

    from outbox_adopt.peers.translation import Translation

OPTIONS = ImportOptions()
NAMES = st.sampled_from(
    sorted(
        {
            *("application", "endpoint", "secret", "headers", "transformation", "subscriptions"),
            *("signature", "destination", "tenant_id", "key", "sensitive", "enabled", "versions"),
            *("hash", "encoding", "api_key", "basic_auth", "username", "password", "url", "name"),
            *("filter_config", "event_types", "filter", "body", "custom_headers", "value"),
            *(
                name
                for each in (SVIX_ENDPOINT, CONVOY_ENDPOINT, OUTPOST_DESTINATION)
                for name in each
            ),
        }
    )
)
EVERY_SOURCE = {"format": "raw", "retry": "standard-webhooks"}


def translate(source: str, options: ImportOptions = OPTIONS, **members: Any) -> Translation:
    return SOURCES[source].translate(Record(members, "endpoints[0]"), options)


def complete(**changes: Any) -> dict[str, Any]:
    """A record of Svix with all that its API says."""
    parts: dict[str, Any] = {
        "application": SVIX_APPLICATION,
        "endpoint": SVIX_ENDPOINT,
        "secret": {"key": SVIX_KEY},
        "headers": {"headers": {}, "sensitive": []},
        "transformation": {"code": None, "enabled": False},
    }
    return parts | changes


def svix(options: ImportOptions = OPTIONS, **changes: Any) -> Translation:
    names = ("application", "headers", "secret", "transformation")
    members = {name: changes.pop(name) for name in names if name in changes}
    return translate("svix", options, **complete(endpoint={**SVIX_ENDPOINT, **changes}, **members))


def convoy(options: ImportOptions = OPTIONS, **changes: Any) -> Translation:
    members: dict[str, Any] = {"subscriptions": [CONVOY_SUBSCRIPTION]}
    for name in ("subscriptions", "signature"):
        if name in changes:
            members[name] = changes.pop(name)
    return translate("convoy", options, endpoint={**CONVOY_ENDPOINT, **changes}, **members)


def outpost(options: ImportOptions = OPTIONS, **changes: Any) -> Translation:
    return translate("outpost", options, destination={**OUTPOST_DESTINATION, **changes})


# ------------------------------------------------------------------------ Svix


def test_an_endpoint_of_svix_keeps_its_secret_and_both_signatures() -> None:
    made = svix(filterTypes=["invoice.paid", "user.created"], throttleRate=20)
    assert made.values == {
        **EVERY_SOURCE,
        "name": "acme.billing",
        "url": "https://acme.example/hooks",
        "tenant": "acme",
        "types": ["invoice.paid", "user.created"],
        "rate": 20,
        "secret": SVIX_KEY,
        "secret_encoding": "base64",
        "compat": {"preset": "svix", "secret": SVIX_KEY},
    }
    assert made.notes == []


def test_an_endpoint_without_types_gets_every_type() -> None:
    assert svix(filterTypes=None).values["types"] == ["**"]


def test_a_type_that_cannot_be_published_here_is_left_out_with_a_note() -> None:
    made = svix(filterTypes=["invoice.paid", "invoice..paid"])
    assert made.values["types"] == ["invoice.paid"]
    assert made.notes == ["no event here can have the type invoice..paid; it is left out"]
    # Without any, it would get every type.
    with pytest.raises(NotImported, match="no event here can have one of its types"):
        svix(filterTypes=["..."])


def test_headers_that_svix_does_not_show_disable_the_endpoint() -> None:
    made = svix(headers={"headers": {"X-Env": "prod"}, "sensitive": ["Authorization"]})
    assert made.values["headers"] == {"X-Env": "prod"}
    assert made.hidden_headers == ["Authorization"]
    assert made.begins_disabled == [
        "Svix does not show the values of its headers Authorization; set them with outbox "
        "endpoint update --headers-file"
    ]


def test_channels_are_a_filter_on_the_payload_or_refused() -> None:
    """Without the filter, the endpoint would get what it did not get before."""
    with pytest.raises(NotImported, match="--channels"):
        svix(channels=["eu", 'a"b'])
    made = svix(ImportOptions(channels="in"), channels=["eu", 'a"b'])
    assert made.values["filter"] == '@."in" == "eu" || @."in" == "a\\"b"'


def test_payloads_that_were_transformed_are_refused() -> None:
    with pytest.raises(NotImported, match="transformation"):
        svix(transformation={"enabled": True, "code": "…"})
    assert svix(transformation={"enabled": False}).notes == []


def test_an_ed25519_key_has_no_second_signature() -> None:
    made = svix(secret={"key": "whsk_" + "A" * 86 + "=="})
    assert "compat" not in made.values
    assert made.values["secret"].startswith("whsk_")
    assert len(made.begins_disabled) == 1


def test_a_disabled_endpoint_begins_disabled() -> None:
    assert svix(disabled=True).begins_disabled == ["it was disabled"]


@pytest.mark.parametrize("part", ["application", "secret", "headers", "transformation"])
def test_a_part_that_was_not_collected_is_refused(part: str) -> None:
    """A script that met an error would lose a header or a transformation unseen."""
    with pytest.raises(UsageError, match=rf"{part}: is missing; was all of it collected\?"):
        svix(**{part: None})


# ---------------------------------------------------------------------- Convoy


def test_an_endpoint_of_convoy_has_its_subscriptions_and_its_login() -> None:
    key = {"header_name": "X-Api-Key", "header_value": "4711"}
    made = convoy(
        subscriptions=[
            {"filter_config": {"event_types": ["invoice.paid"]}, "filters": []},
            {"filter_config": {"event_types": ["user.created", "invoice.paid"]}, "filters": []},
        ],
        authentication={"type": "api_key", "api_key": key},
        rate_limit=600,
        rate_limit_duration=60,
    )
    assert made.values == {
        **EVERY_SOURCE,
        "name": "acme.01H3FRSZYKNYWGPVV46RN98PM5",
        "url": "https://acme.example/convoy",
        "tenant": "acme",
        "types": ["invoice.paid", "user.created"],
        "rate": 10,
        "timeout": 10,
        "contact": "ops@acme.example",
        "headers": {"X-Api-Key": "4711"},
        "compat": {"preset": "convoy", "secret": "convoy-secret", "secret_encoding": "raw"},
    }
    assert made.notes == []


def test_lengths_of_earlier_versions_of_convoy_are_texts() -> None:
    made = convoy(http_timeout="30s", rate_limit=60, rate_limit_duration="1m")
    assert (made.values["timeout"], made.values["rate"]) == (30, 1)


def test_an_advanced_signature_of_convoy_signs_the_time_as_well() -> None:
    made = convoy(advanced_signatures=True)
    assert made.values["compat"]["content"] == "{timestamp},{body}"
    assert made.values["compat"]["value"] == "t={timestamp},{signatures}"


def test_a_project_may_sign_with_another_header_and_encoding() -> None:
    versions = [{"hash": "SHA256", "encoding": "hex"}, {"hash": "SHA256", "encoding": "base64"}]
    made = convoy(signature={"header": "X-Shop-Signature", "versions": versions})
    assert made.values["compat"]["header"] == "X-Shop-Signature"
    assert made.values["compat"]["encoding"] == "base64"
    with pytest.raises(NotImported, match="SHA512"):
        convoy(signature={"versions": [{"hash": "SHA512", "encoding": "hex"}]})


def test_filters_functions_and_missing_subscriptions_of_convoy_are_refused() -> None:
    condition = {"total": {"$gte": 5}}
    empty = {"uid": "1", "event_type": "*", "body": {}, "headers": {}, "query": {}, "path": {}}
    assert convoy(subscriptions=[{"filters": [empty]}]).values["types"] == ["**"]
    for each, reason in (
        ({"filter_config": {"filter": {"body": condition}}, "filters": []}, "a filter"),
        ({"filter_config": {"filter": {"query": condition}}, "filters": []}, "a filter"),
        ({"filters": [empty, {**empty, "path": condition}]}, "a filter"),
        ({"function": "function transform(p) {}", "filters": []}, "a function"),
    ):
        with pytest.raises(NotImported, match=reason):
            convoy(subscriptions=[each])
    with pytest.raises(NotImported, match="no subscription"):
        convoy(subscriptions=[])
    with pytest.raises(UsageError, match=r"subscriptions\[0\]\.filters: is missing"):
        convoy(subscriptions=[{}])


def test_an_endpoint_without_an_owner_is_refused() -> None:
    """It would get what all others without an owner get."""
    with pytest.raises(NotImported, match="no owner_id"):
        convoy(owner_id=None)


def test_a_pattern_of_another_sender_is_refused() -> None:
    subscription = {"filter_config": {"event_types": ["invoice.*"]}, "filters": []}
    with pytest.raises(NotImported, match=r"invoice\.\* is a pattern"):
        convoy(subscriptions=[subscription])
    with pytest.raises(NotImported, match=r"invoice\.\* is a pattern"):
        outpost(topics=["invoice.*"])


def test_operational_events_are_no_types_of_customers() -> None:
    assert svix(filterTypes=["outbox.endpoint.failing", "a"]).values["types"] == ["a"]


def test_a_basic_login_is_a_header_and_oauth2_disables() -> None:
    basic = {"type": "basic_auth", "basic_auth": {"username": "a", "password": "b"}}
    assert convoy(authentication=basic).values["headers"] == {"Authorization": "Basic YTpi"}
    made = convoy(authentication={"type": "oauth2", "oauth2": {}})
    assert made.begins_disabled == ["it logs in with oauth2, which outbox cannot"]


def test_the_secret_that_stays_signs_for_convoy() -> None:
    secrets = [{"value": "old", "expires_at": "2026-12-24T00:00:00Z"}, {"value": "new"}]
    made = convoy(secrets=secrets)
    assert made.values["compat"]["secret"] == "new"
    assert made.notes == ["older secrets do not sign any more"]
    made = convoy(secrets=[])
    assert made.begins_disabled
    assert "compat" not in made.values


# --------------------------------------------------------------------- Outpost


def test_a_destination_of_outpost_signs_with_the_bytes_of_its_text() -> None:
    made = outpost()
    assert made.values == {
        **EVERY_SOURCE,
        "name": "acme.des_1",
        "url": "https://acme.example/outpost",
        "tenant": "acme",
        "types": ["user.created"],
        "headers": {"X-Env": "prod"},
        "compat": {
            "preset": "outpost",
            "secret": OUTPOST_DESTINATION["credentials"]["secret"],
            "secret_encoding": "raw",
        },
    }
    assert made.notes == []


def test_all_topics_are_every_type() -> None:
    assert outpost(topics=["*"]).values["types"] == ["**"]


def test_what_only_an_api_key_may_see_disables_the_destination() -> None:
    made = outpost(credentials={"secret": "whse****************"})
    assert made.begins_disabled
    assert "compat" not in made.values


def test_brokers_and_filters_of_outpost_are_refused() -> None:
    with pytest.raises(NotImported, match="its type is aws_sqs"):
        outpost(type="aws_sqs")
    with pytest.raises(NotImported, match="--filter"):
        outpost(filter={"data": {"total": {"$gte": 5}}})


# ------------------------------------------------------------- all of them


def test_the_other_signature_ends_or_is_left_out() -> None:
    until = svix(ImportOptions(compat_until="2027-01-31"))
    assert until.values["compat"]["until"] == "2027-01-31"
    assert "compat" not in outpost(ImportOptions(compat=False)).values


def test_a_row_of_a_table_has_settings_headers_and_a_signature() -> None:
    made = translate(
        "csv",
        name="acme.orders", url="https://acme.example/", types="order.* refund.done", lanes="2",
        rate="0.5", all_tenants="", probes="no", compat="github",
        **{"compat_secret": "hunter2", "header:X-Api-Key": "4711"},
    )  # fmt: skip
    assert made.values == {
        **EVERY_SOURCE,
        "name": "acme.orders",
        "url": "https://acme.example/",
        "types": ["order.*", "refund.done"],
        "lanes": 2,
        "rate": 0.5,
        "probes": False,
        "headers": {"X-Api-Key": "4711"},
        "compat": {"preset": "github", "secret": "hunter2"},
    }


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("a.json", '{"version": 2, "endpoints": []}', "version: must be 1, not 2"),
        ("a.json", "[]", "the file: must be an object"),
        (
            "a.json",
            '{"version": 1, "endpoints": [{"source": "hook0"}]}',
            r"endpoints\[0\].source: must be one of svix, convoy, outpost, csv",
        ),
        (
            "a.json",
            '{"version": 1, "endpoints": [{"source": "svix", "endpoints": {}}]}',
            r'endpoints\[0\]: has no member "endpoints"; there are application, endpoint',
        ),
        ("a.json", '{"version": 1, "endpoints": []}', "endpoints: has none; was all of it"),
        ("a.csv", "name,url\n", "the table has no endpoint"),
        ("a.csv", "name;url\na;b\n", "the first line: has no column name; columns are"),
        ("a.csv", "name,url,types,types\n", "the first line: has the column types twice"),
        ("a.csv", "name,url\na\n", "line 2: has another number of cells than the first line"),
        ("a.csv", 'name,url\na,"b\n', "line 2: unexpected end of data"),
    ],
)
def test_a_file_that_is_none_is_refused_in_one_line(
    tmp_path: Path, name: str, text: str, error: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=f"^{error}"):
        read_records(str(tmp_path / name))


@pytest.mark.parametrize(
    ("members", "error"),
    [
        ({"endpoint": []}, r"endpoints\[0\]\.endpoint: must be an object"),
        ({"endpoint": {"id": "ep_1"}}, r"endpoints\[0\]\.endpoint\.url: is missing"),
        (
            {"endpoint": {"id": "ep_1", "url": 5}},
            r"endpoints\[0\]\.endpoint\.url: must be a text$",
        ),
        (
            {"endpoint": {"id": "ep_1", "url": "https://a.test/", "filterTypes": [1]}},
            r"endpoints\[0\]\.endpoint\.filterTypes\[0\]: must be a text$",
        ),
        (
            {"endpoint": {"id": "ep_1", "url": "https://a.test/", "rateLimit": "9"}},
            r"endpoints\[0\]\.endpoint\.rateLimit: must be a number$",
        ),
        (
            {"endpoint": {"id": "ep_1", "url": "https://a.test/", "disabled": "no"}},
            r"endpoints\[0\]\.endpoint\.disabled: must be true or false$",
        ),
    ],
)
def test_a_record_that_is_none_is_refused_with_its_place(
    members: dict[str, Any], error: str
) -> None:
    with pytest.raises(UsageError, match=f"^{error}") as raised:
        translate("svix", **complete(**members))
    assert not isinstance(raised.value, NotImported)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=6,
)


@given(source=st.sampled_from(sorted(SOURCES)), members=st.dictionaries(NAMES, VALUES))
def test_any_response_of_an_api_is_translated_or_refused(
    source: str, members: dict[str, Any]
) -> None:
    with suppress(UsageError):
        assert translate(source, **members).name


@given(
    record=st.sampled_from([SVIX_ENDPOINT, CONVOY_ENDPOINT, OUTPOST_DESTINATION]),
    name=NAMES,
    value=VALUES,
)
def test_one_member_of_another_kind_is_translated_or_refused(
    record: dict[str, Any], name: str, value: Any
) -> None:
    source, member = {
        "filterTypes": ("svix", "endpoint"),
        "secrets": ("convoy", "endpoint"),
        "topics": ("outpost", "destination"),
    }[next(each for each in ("filterTypes", "secrets", "topics") if each in record)]
    with suppress(UsageError):
        rest = {"subscriptions": [CONVOY_SUBSCRIPTION]} if source == "convoy" else {}
        assert translate(source, **{member: {**record, name: value}}, **rest).name


def test_a_column_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match='there is no column "urls"; did you mean "url"'):
        translate("csv", name="a", urls="https://a.test/")
    with pytest.raises(UsageError, match='there is no column "headers"'):
        translate("csv", name="a", headers="x: y")
    with pytest.raises(UsageError, match="compat_secret needs the column compat as well"):
        translate("csv", name="a", compat_secret="hunter2")  # noqa: S106  no secret


def test_a_file_of_records_is_read_with_their_places(tmp_path: Path) -> None:
    document = {"version": 1, "endpoints": [{"source": "svix"}, {"source": "csv", "name": "a"}]}
    (tmp_path / "a.json").write_bytes(orjson.dumps(document))
    records = read_records(str(tmp_path / "a.json"))
    assert [each.record.place for each in records] == ["endpoints[0]", "endpoints[1]"]
    # Some spreadsheets begin a file with a mark.
    (tmp_path / "a.csv").write_text("\ufeffname,url\na,https://a.test/\n")
    ((source, row),) = read_records(str(tmp_path / "a.csv"))
    assert (source, row.place) == (SOURCES["csv"], "line 2")
    assert row.values == {"name": "a", "url": "https://a.test/"}
