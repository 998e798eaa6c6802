"""Verdicts of checks and of a run, and the waivers that accept a finding for a while."""

from __future__ import annotations

import datetime
import difflib
import fnmatch
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdgate.rules.finding import Finding, Severity

Verdict = Literal["pass", "fail", "invalid", "waived", "not-run"]
VERDICTS: tuple[Verdict, ...] = ("pass", "fail", "invalid", "waived", "not-run")


class WaiverError(Exception):
    """The waiver file cannot be used; the message names file, entry and key."""


class Waiver(BaseModel):
    """A finding somebody has accepted: which, why, who, and until when."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    check: str
    target: str = Field("*", description="engine, host or device; shell wildcards")
    reason: str = Field(min_length=1)
    approver: str = Field(min_length=1)
    expires: datetime.date

    def covers(self, check: str, target: str, today: datetime.date) -> bool:
        return self.check == check and fnmatch.fnmatchcase(target, self.target) and today <= self.expires


class CheckResult(BaseModel):
    """One check on one target, as it stands in verdict.json."""

    model_config = ConfigDict(extra="forbid")

    id: str
    title: str
    target: str
    verdict: Verdict
    severity: Severity
    reason: str = Field("", description="why it is invalid or not run")
    reference: str = ""
    waivable: bool = True
    findings: list[Finding] = Field(default_factory=list)
    waivers: list[Waiver] = Field(default_factory=list)
    nodeid: str = ""
    duration_s: float = 0.0


def load_waivers(path: Path) -> list[Waiver]:
    """Waivers of a YAML list; raises WaiverError. An expired waiver loads, and covers nothing."""
    try:
        entries = yaml.safe_load(path.read_text()) or []
    except OSError as error:
        raise WaiverError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise WaiverError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(entries, list):
        raise WaiverError(f"{path}: a list of waivers is expected, each with check, target, reason, approver, expires")
    waivers = []
    for number, entry in enumerate(entries, start=1):
        try:
            waivers.append(Waiver.model_validate(entry))
        except ValidationError as error:
            first = error.errors()[0]
            raise WaiverError(
                f"{path}: waiver {number}: key '{'.'.join(map(str, first['loc']))}': {first['msg'].lower()} (a waiver is check, target, reason, approver, expires: 2027-03-31)"
            ) from None
    return waivers


def judge(
    check: str, severity: Severity, findings: list[Finding], unknown: str | None, waivers: list[Waiver], waivable: bool
) -> tuple[Verdict, list[Waiver]]:
    """The verdict of one check. A failure outweighs an unknown; a note fails nothing; unknown is never a pass."""
    today = datetime.date.today()
    failing = [finding for finding in findings if (finding.severity or severity) != "note"]
    used: list[Waiver] = []
    for finding in failing:
        waiver = next((w for w in waivers if waivable and w.covers(check, finding.target, today)), None)
        if waiver is None:
            return "fail", []
        used.append(waiver)
    if unknown is not None:
        return "invalid", used
    return ("waived", list(dict.fromkeys(used))) if failing else ("pass", [])


def overall(results: list[CheckResult]) -> Verdict:
    """The run's verdict: fail before invalid before waived; a run that judged nothing is not-run, not a pass."""
    seen = {result.verdict for result in results}
    for verdict in ("fail", "invalid"):
        if verdict in seen:
            return verdict
    if "waived" in seen:
        return "waived"
    return "pass" if "pass" in seen else "not-run"


def waiver_states(waivers: list[Waiver], results: list[CheckResult]) -> list[str]:
    """A line for each waiver that covered nothing, with the reason: an accepted finding must not be lost in silence."""
    today = datetime.date.today()
    used = {waiver for result in results for waiver in result.waivers}
    lines = []
    for waiver in waivers:
        if waiver in used:
            continue
        of_check = [result for result in results if result.id == waiver.check]
        if not of_check:
            near = difflib.get_close_matches(waiver.check, {result.id for result in results}, n=1)
            state = "names no check of this run" + (f"; did you mean '{near[0]}'?" if near else "")
        elif waiver.expires < today:
            state = f"expired on {waiver.expires}"
        elif not of_check[0].waivable:
            state = "has no effect: this check cannot be waived"
        else:
            state = "covered nothing: no such finding on such a target"
        lines.append(f"{waiver.check} on {waiver.target}, approved by {waiver.approver}, {state}")
    return lines


def counts(results: list[CheckResult]) -> dict[str, int]:
    return {verdict: sum(result.verdict == verdict for result in results) for verdict in VERDICTS}


def finding_text(finding: Finding, indent: str = "  ") -> str:
    """A finding as the terminal shows it."""
    rows: list[tuple[str, Any]] = [
        ("expected", finding.expected), ("seen", finding.seen), ("why", finding.why), ("remedy", finding.remedy),
    ]  # fmt: skip
    if finding.reference:
        rows.append(("reference", finding.reference))
    return "\n".join([finding.target, *(f"{indent}{key + ':':<11}{value}" for key, value in rows)])
