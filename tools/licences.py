"""Write docs/licences.md from a bill of materials: what is installed with Theory Lab, and under which licence.

python tools/sbom.py WHEEL --out docs/sbom.cdx.json
python tools/licences.py docs/sbom.cdx.json
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

#: Classifiers that are used where a package gives no SPDX expression.
_CLASSIFIERS = {
    "License :: OSI Approved :: BSD License": "BSD (classifier)",
    "License :: OSI Approved :: Apache Software License": "Apache-2.0 (classifier)",
    "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0 (classifier)",
}
NOT_SAID = "not said in its metadata"
#: Licences that ask something of whoever passes the package on, beyond keeping notices.
_COPYLEFT = re.compile(r"\b(A?GPL|LGPL|MPL|EPL|CDDL|EUPL)\b")


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def licence(component: dict[str, Any]) -> str:
    """What a package declares: an SPDX expression or identifier if it has one, else its classifier."""
    said = []
    for each in component.get("licenses", []):
        said.append(each.get("expression") or each["license"].get("id") or each["license"].get("name", ""))
    exact = [each for each in said if "::" not in each and len(each) < 120]
    if exact:
        return "; ".join(dict.fromkeys(" ".join(each.split()) for each in exact))
    return "; ".join(_CLASSIFIERS.get(each, each.rpartition(":: ")[2][:80]) for each in said) or NOT_SAID


def extras_of(project: dict[str, Any]) -> dict[str, list[str]]:
    """Packages that pyproject.toml names, and the extras that name them; the core is ``always``."""
    found: dict[str, list[str]] = {}
    groups = {"always": project["dependencies"], **project["optional-dependencies"]}
    for extra, requirements in groups.items():
        for each in requirements:
            name = normal(re.split(r"[\[<>=!~; ]", each)[0])
            if name != normal(project["name"]) and extra != "all":
                found.setdefault(name, []).append(extra)
    return found


def page(bill: dict[str, Any], project: dict[str, Any]) -> str:
    """The page."""
    asked = extras_of(project)
    names = {each["bom-ref"]: each["name"] for each in bill["components"]}
    users: dict[str, list[str]] = {}
    for each in bill["dependencies"]:
        for ref in each.get("dependsOn", []):
            if each["ref"] in names:
                users.setdefault(ref, []).append(names[each["ref"]])
    rows = []
    for each in sorted(bill["components"], key=lambda c: normal(c["name"])):
        direct = asked.get(normal(each["name"]))
        through = sorted(users.get(each["bom-ref"], []), key=normal)
        why = (
            ", ".join(direct)
            if direct
            else f"through {', '.join(through[:3])}{' and others' if len(through) > 3 else ''}"
        )
        rows.append((each["name"], each["version"], licence(each), why, bool(direct)))
    count = Counter(row[2] for row in rows)
    copyleft = [f"{name} ({text})" for name, _, text, *_ in rows if _COPYLEFT.search(text)]
    unsaid = [name for name, _, text, *_ in rows if text == NOT_SAID]
    version = bill["metadata"]["component"]["version"]
    lines = [
        "# Licences of what is installed with it",
        "",
        f"Theory Lab {version} is under {project['license']}. Its wheel holds no code of others;"
        " where the texts under `theory_lab/probes/data` come from is said in their README, and the weights under",
        "`theory_lab/models/zoo` were trained by the project.",
        "",
        f"This page lists what `pip install 'theory-lab[all]'` adds under `constraints.txt`: {len(rows)} packages, by",
        "their own metadata. `tools/licences.py` makes it from the [bill of materials](sbom.cdx.json) (CycloneDX 1.6),",
        "which `tools/sbom.py` writes.",
        "",
        "The library alone (`pip install theory-lab`) needs the packages marked *always*, and what they need.",
        "",
        f"- Licences that ask more than keeping notices: {', '.join(copyleft) or 'none'}. They cover those packages'",
        "  own files; nothing of them is copied into Theory Lab.",
        f"- Without a licence in their metadata (their files have one): {', '.join(unsaid) or 'none'}.",
        "",
        "| licence | packages |",
        "|---|---|",
        *(f"| {text} | {number} |" for text, number in sorted(count.items(), key=lambda c: (-c[1], c[0]))),
        "",
        "| package | version | licence | asked for by |",
        "|---|---|---|---|",
        *(
            f"| {'**' + name + '**' if direct else name} | {version} | {text} | {why} |"
            for name, version, text, why, direct in rows
        ),
        "",
        "Bold: named by `pyproject.toml`, with the extras that name it.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Parse and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("bill", type=Path, help="what tools/sbom.py has written")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "licences.md")
    given = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = page(json.loads(given.bill.read_text(encoding="utf-8")), project)
    given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
