"""Write a software bill of materials (CycloneDX 1.6, JSON) of a wheel with all its extras.

    python tools/sbom.py dist/theory_lab-0.1.0-py3-none-any.whl
    python tools/sbom.py WHEEL --environment path/to/bin/python --out docs/sbom.cdx.json

The wheel is installed with `[all]` under constraints.txt into a bare virtual environment (or found in the one that is
named), and cyclonedx-bom reads what is there: versions, licences, who needs whom. Its times and random numbers are left
out, so that the same environment gives the same file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: What a virtual environment brings along by itself.
_NOT_OURS = ("pip",)

#: What packages say of their licence in free text, which cyclonedx-bom leaves out.
_LICENCES = """
import importlib.metadata as m, json
first = lambda text: text.strip().splitlines()[0][:80] if text and text.strip() else ""
print(json.dumps({d.metadata["Name"]: first(d.metadata.get("License")) for d in m.distributions()}))
"""


def environment(wheel: Path, folder: Path) -> Path:
    """Interpreter of a bare environment with the wheel and all extras."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    call = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*call, f"{wheel.resolve()}[all]"], check=True)
    return python


def describe(python: Path) -> dict[str, Any]:
    """The bill of an environment, without paths of this machine."""
    call = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--spec-version", "1.6"]
    call += ["--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "library", "--output-format", "JSON"]
    done = subprocess.run([*call, str(python)], check=True, capture_output=True, text=True)
    bill: dict[str, Any] = json.loads(done.stdout)
    name = bill["metadata"]["component"]["name"]
    # The wheel itself is the subject, not one of its parts.
    bill["components"] = [each for each in bill["components"] if each["name"] not in (*_NOT_OURS, name)]
    free_text = json.loads(subprocess.run([str(python), "-c", _LICENCES], check=True, capture_output=True).stdout)
    for each in bill["components"]:
        if not each.get("licenses") and free_text.get(each["name"]):
            each["licenses"] = [{"license": {"name": free_text[each["name"]], "acknowledgement": "declared"}}]
        # Where a package was fetched from is this build's business; its purl says where it lives.
        each.pop("externalReferences", None)
    for each in bill["metadata"].get("tools", {}).get("components", []):
        each.pop("externalReferences", None)
    known = {bill["metadata"]["component"]["bom-ref"], *(each["bom-ref"] for each in bill["components"])}
    bill["dependencies"] = [each for each in bill["dependencies"] if each["ref"] in known]
    for each in bill["dependencies"]:
        if "dependsOn" in each:
            each["dependsOn"] = [ref for ref in each["dependsOn"] if ref in known]
    return bill


def main() -> int:
    """Parse and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("wheel", type=Path, help="the wheel to describe")
    parser.add_argument("--environment", type=Path, metavar="PYTHON", help="where it is installed with [all] already")
    parser.add_argument("--out", type=Path, help="where to write (default: beside the wheel)")
    given = parser.parse_args()
    if not given.wheel.is_file():
        parser.error(f"{given.wheel}: no such file")
    with tempfile.TemporaryDirectory() as name:
        bill = describe(given.environment or environment(given.wheel, Path(name)))
    out = given.out or given.wheel.with_name("-".join(given.wheel.name.split("-")[:2]) + ".cdx.json")
    out.write_text(json.dumps(bill, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{out}: {len(bill['components'])} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
