"""The certificate: what was tested, how much, with what outcome, of which code, and where."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from typing import Any

from theory_lab import __version__
from theory_lab.selftest.base import LEVEL, Finding, Setup, holm, said
from theory_lab.streams import STREAM_VERSION

_PACKAGES = ("numpy", "scipy", "pandas")


@dataclass(frozen=True)
class Group:
    """The findings of a group of checks, and the seconds of processor time they took."""

    name: str
    findings: tuple[Finding, ...]
    seconds: float


@dataclass(frozen=True)
class Certificate:
    """Everything a self-test found.

    Attributes
    ----------
    size, seed : str, int
        Of the run.
    complete : bool
        Whether every group was run.
    groups : tuple of Group
        In the order of the run.
    environment : dict of str to str
        Versions, interpreter and platform.
    code : str
        SHA-256 over the installed Python files of theory_lab and the constants: which code this is about.
    when : str
        UTC time of its end.
    """

    size: str
    seed: int
    complete: bool
    groups: tuple[Group, ...]
    environment: dict[str, str]
    code: str
    when: str

    def __post_init__(self) -> None:
        names = [(group.name, finding.name) for group in self.groups for finding in group.findings]
        if len(set(names)) < len(names):  # one would hide the other
            raise ValueError(f"two findings of one name: {max(names, key=names.count)}")

    @classmethod
    def of(cls, setup: Setup, groups: tuple[Group, ...], complete: bool) -> Certificate:
        """The certificate of findings made here and now."""
        when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return cls(setup.size, setup.seed, complete, groups, environment(), code_hash(), when)

    @cached_property
    def corrected(self) -> dict[tuple[str, str], float]:
        """p-values of the random findings, by group and name, corrected for their number (Holm)."""
        random = [(g.name, f.name, f.p) for g in self.groups for f in g.findings if f.p is not None]
        return {(g, name): p for (g, name, _), p in zip(random, holm([p for *_, p in random]), strict=True)}

    def good(self, group: Group, finding: Finding) -> bool:
        """Whether a finding is as it must be."""
        return bool(finding.passed) if finding.p is None else self.corrected[group.name, finding.name] >= LEVEL

    @property
    def failures(self) -> list[tuple[str, Finding]]:
        """Group and finding of everything that is not as it must be."""
        return [(g.name, f) for g in self.groups for f in g.findings if not self.good(g, f)]

    @property
    def passed(self) -> bool:
        """Whether all is as it must be; a run without any finding has not passed."""
        return any(g.findings for g in self.groups) and not self.failures

    @property
    def hash(self) -> str:
        """SHA-256 of everything but times: names this outcome, and tells whether a copy was altered by accident."""
        plain = {key: value for key, value in self.to_dict(hashed=False).items() if key != "when"}
        plain["groups"] = [{k: v for k, v in group.items() if k != "seconds"} for group in plain["groups"]]
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()

    def to_dict(self, hashed: bool = True) -> dict[str, Any]:
        """Plain data; p-values to six digits."""

        def plain(group: Group, f: Finding) -> dict[str, Any]:
            row: dict[str, Any] = {"check": f.name, "amount": f.amount, "unit": f.unit, "measured": f.measured}
            if f.p is not None:
                corrected = self.corrected[group.name, f.name]
                row |= {"p": float(f"{f.p:.6g}"), "p_corrected": float(f"{corrected:.6g}")}
            return row | {"passed": self.good(group, f)}

        found: dict[str, Any] = {
            "certificate": "theory-lab selftest 1",
            "verdict": "PASS" if self.passed else "FAIL",
            "size": self.size,
            "seed": self.seed,
            "complete": self.complete,
            "level": LEVEL,
            "environment": self.environment,
            "code": self.code,
            "when": self.when,
            "groups": [
                {"name": g.name, "seconds": round(g.seconds, 2), "findings": [plain(g, f) for f in g.findings]}
                for g in self.groups
            ],
        }
        return found | {"hash": self.hash} if hashed else found

    def to_json(self) -> str:
        """Everything, as JSON."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def to_text(self, full: bool = False) -> str:
        """The certificate for people; `full` prints every finding."""
        lines = [
            "THEORY LAB SELF-TEST CERTIFICATE",
            "",
            f"theory-lab {self.environment['theory-lab']}, {self.size}, seed {self.seed}, {self.when}",
            f"Python {self.environment['python']}, "
            + ", ".join(f"{name} {self.environment[name]}" for name in _PACKAGES)
            + f"; {self.environment['platform']}",
            "" if self.complete else f"ONLY: {', '.join(g.name for g in self.groups)}",
            f"{'group':<16}{'exact':>7}{'random':>8}{'smallest p':>13}{'corrected':>12}{'CPU s':>10}  ",
        ]
        for group in self.groups:
            exact = sum(f.p is None for f in group.findings)
            smallest = min((f.p for f in group.findings if f.p is not None), default=None)
            corrected = min(
                (self.corrected[group.name, f.name] for f in group.findings if f.p is not None), default=None
            )
            shown = ["-" if p is None else said(p) for p in (smallest, corrected)]
            verdict = "ok" if all(self.good(group, f) for f in group.findings) else "FAILED"
            lines.append(
                f"{group.name:<16}{exact:>7}{len(group.findings) - exact:>8}{shown[0]:>13}{shown[1]:>12}"
                f"{group.seconds:>10.1f}  {verdict}"
            )
            if full:
                lines += [f"  {self._line(group, f)}" for f in group.findings]
        exact = sum(f.p is None for g in self.groups for f in g.findings)
        random = sum(f.p is not None for g in self.groups for f in g.findings)
        lines += [
            "",
            f"{exact} exact comparisons; {random} random ones, corrected for their number (Holm): one below {LEVEL:g} "
            "fails.",
            f"A sound installation fails with probability {LEVEL:g} at most.",
        ]
        if self.failures:
            lines += ["", "What failed:"]
            names = {g.name: g for g in self.groups}
            lines += [f"  {name}: {self._line(names[name], f)}" for name, f in self.failures]
        lines += ["", f"VERDICT: {'PASS' if self.passed else 'FAIL'}", f"code {self.code}", f"hash {self.hash}"]
        return "\n".join(lines)

    def _line(self, group: Group, f: Finding) -> str:
        ending = "" if f.p is None else f", p {said(f.p)}, corrected {said(self.corrected[group.name, f.name])}"
        mark = "" if self.good(group, f) else " FAILED"
        return f"{f.name} ({f.amount:,} {f.unit}): {f.measured}{ending}{mark}"


def environment() -> dict[str, str]:
    """Versions and platform."""
    found = {"theory-lab": __version__, "python": platform.python_version(), "implementation": sys.implementation.name}
    found |= {name: metadata.version(name) for name in _PACKAGES}
    return found | {"platform": f"{platform.system()} {platform.machine()}", "streams": str(STREAM_VERSION)}


def code_hash() -> str:
    """SHA-256 over the installed Python files of theory_lab and the constants, by name and content."""
    digest = hashlib.sha256()

    def walk(folder: Traversable, prefix: str) -> None:
        for item in sorted(folder.iterdir(), key=lambda each: each.name):
            if item.is_dir() and item.name != "__pycache__":
                walk(item, f"{prefix}{item.name}/")
            elif item.name.endswith(".py") or item.name == "known_answers.json":
                content = item.read_bytes()
                digest.update(f"{prefix}{item.name} {len(content)}\n".encode() + content)

    walk(resources.files("theory_lab"), "")
    return digest.hexdigest()
