"""What a server and a stream must have, and the commands that change a stream."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from outbox.destinations.broker import BrokerFinding

if TYPE_CHECKING:
    from outbox_brokers.nats.stream_api import StreamInfo

NATS_VERSION_MIN = (2, 12)
REPLICAS_MIN = 3
MAX_AGE_MIN_S = 3 * 24 * 3600
"""The longest outage after which deliveries are still sent."""


def refusal_of_stream(info: StreamInfo, version: str) -> str | None:
    """Return why nothing may be stored: the stream would not compare, or not keep it."""
    errors = [each for each in check_stream(info, version, None) if each.is_error]
    return f"{errors[0].what}; {errors[0].what_to_do}" if errors else None


def check_stream(info: StreamInfo, version: str, subject: str | None) -> list[BrokerFinding]:
    """Return a finding for each setting that is not as exact lanes need it.

    Args:
        subject: first tokens of the lanes' subjects; None: subjects are not checked.
    """
    if _parse_version(version) < NATS_VERSION_MIN:
        # Older servers ignore the headers that they do not know: nothing would be compared.
        return [
            BrokerFinding(
                True,
                f"the server has version {version or 'unknown'}, which ignores the headers of "
                "atomic batches and of expected sequences",
                "upgrade all servers to NATS 2.12 or later",
            )
        ]
    config = info.config
    findings = _check_exactness(info.name, config)
    findings += _check_retention(info.name, config)
    if subject is not None:
        subjects = config.get("subjects") or []
        edited = ",".join([*subjects, f"{subject}.>"])
        findings += [
            BrokerFinding(
                True,
                f"stream {info.name} does not have the subject {needed}",
                _edit(info.name, f"--subjects '{edited}'"),
            )
            for needed in (f"{subject}.*.m", f"{subject}.*.f")
            if not any(_covers(each, needed) for each in subjects)
        ]
    return findings


def _check_exactness(name: str, config: dict[str, Any]) -> list[BrokerFinding]:
    findings = []
    if not config.get("allow_atomic"):
        findings.append(
            BrokerFinding(
                True,
                f"stream {name} does not allow atomic batches (allow_atomic)",
                _edit(name, "--allow-batch"),
            )
        )
    if config.get("retention", "limits") != "limits":
        findings.append(
            BrokerFinding(
                True,
                f"stream {name} has retention {config['retention']}, which removes the messages "
                "that show where a lane stands",
                "make a stream with retention limits: retention cannot be changed to limits "
                "(nats stream add --retention limits)",
            )
        )
    if config.get("no_ack"):
        findings.append(
            BrokerFinding(
                True,
                f"stream {name} does not acknowledge messages (no_ack)",
                _edit(name, "--ack"),
            )
        )
    if not config.get("allow_rollup_hdrs"):
        findings.append(
            BrokerFinding(
                True,
                f"stream {name} does not allow rollup (allow_rollup_hdrs), which fences need",
                _edit(name, "--allow-rollup"),
            )
        )
    return findings


def _check_retention(name: str, config: dict[str, Any]) -> list[BrokerFinding]:
    findings = []
    if config.get("discard", "old") != "new":
        findings.append(
            BrokerFinding(
                False,
                f"stream {name} discards old messages when it is full: readers lose them",
                _edit(name, "--discard new"),
            )
        )
    if config.get("max_msgs_per_subject", -1) > 0:
        findings.append(
            BrokerFinding(
                False,
                f"stream {name} keeps {config['max_msgs_per_subject']} messages of a subject, "
                "which is a lane: readers lose the others",
                _edit(name, "--max-msgs-per-subject=-1"),
            )
        )
    max_age_s = config.get("max_age", 0) / 1e9
    if 0 < max_age_s < MAX_AGE_MIN_S:
        findings.append(
            BrokerFinding(
                False,
                f"stream {name} removes messages after {max_age_s:g} s, before the end of a long "
                "outage",
                _edit(name, "--max-age 7d"),
            )
        )
    # deny_purge cannot be asked for: the server refuses it together with allow_rollup_hdrs.
    if not config.get("deny_delete"):
        findings.append(
            BrokerFinding(
                False,
                f"stream {name} allows messages to be deleted (deny_delete is not set)",
                _edit(name, "--deny-delete"),
            )
        )
    if (replicas := config.get("num_replicas", 1)) < REPLICAS_MIN:
        findings.append(
            BrokerFinding(
                False,
                f"stream {name} has {replicas} replica{'s' if replicas > 1 else ''}: what it "
                "acknowledged is lost with a disk",
                _edit(name, f"--replicas {REPLICAS_MIN}"),
            )
        )
    return findings


def _edit(name: str, option: str) -> str:
    return f"nats stream edit {name} {option}"


def _parse_version(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _covers(pattern: str, subject: str) -> bool:
    """Whether a subject of a stream has all subjects of another one with `*`."""
    parts, tokens = pattern.split("."), subject.split(".")
    for index, part in enumerate(parts):
        if part == ">":
            return len(tokens) > index
        if index >= len(tokens) or part not in ("*", tokens[index]):
            return False
    return len(parts) == len(tokens)
