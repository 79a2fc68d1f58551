"""Build the source distribution and the wheel of a commit, so that the same commit gives the same bytes.

    python tools/build.py              # dist/, from HEAD
    python tools/build.py --twice      # built again elsewhere, later and under another umask, and compared byte by byte

The commit is exported (nothing that git does not know can get in), its time is every file's time (SOURCE_DATE_EPOCH),
and the wheel is built from the source distribution. setuptools writes the time of the build and the builder's name
into a source distribution, so that one is packed anew: files in order, one owner, one time. Bytes also depend on
the version of setuptools, which constraints.txt fixes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def git(*words: str) -> bytes:
    """Output of a git command."""
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True).stdout


def build(commit: str, out: Path) -> list[Path]:
    """Build both into `out`; returns their paths."""
    epoch = git("log", "-1", "--format=%ct", commit).decode().strip()
    env = {**os.environ, "SOURCE_DATE_EPOCH": epoch, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    out.mkdir(parents=True, exist_ok=True)
    before = os.umask(0o022)  # permissions get into a wheel, and must not be the builder's
    try:
        with tempfile.TemporaryDirectory() as name:
            source, made = Path(name) / "source", Path(name) / "made"
            with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as exported:
                exported.extractall(source, filter="data")
            call = [sys.executable, "-m", "build", "--outdir", str(made)]
            _run([*call, "--sdist", str(source)], env)
            (sdist,) = made.glob("*.tar.gz")
            repack(sdist, int(epoch))
            with tarfile.open(sdist) as unpacked:
                unpacked.extractall(Path(name) / "sdist", filter="data")
            (inner,) = (Path(name) / "sdist").iterdir()
            _run([*call, "--wheel", str(inner)], env)
            (wheel,) = made.glob("*.whl")
            return [path.rename(out / path.name) for path in (sdist, wheel)]
    finally:
        os.umask(before)


def _run(words: list[str], env: dict[str, str]) -> None:
    """Run quietly; what it said is shown if it fails."""
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        raise SystemExit(1)


def repack(sdist: Path, epoch: int) -> None:
    """Write a source distribution anew: names in order, one time, one owner, plain permissions."""
    packed = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            plain = tarfile.TarInfo(member.name)
            plain.size, plain.mtime, plain.type = member.size, epoch, member.type
            plain.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(plain, old.extractfile(member) if member.isfile() else None)
    with sdist.open("wb") as file, gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=epoch) as zipped:
        zipped.write(packed.getvalue())


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def members(path: Path) -> list[tuple[str, int]]:
    """Names and sizes inside an archive, the largest first."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            found = [(each.filename, each.file_size) for each in wheel.infolist()]
    else:
        with tarfile.open(path) as sdist:
            found = [(each.name.partition("/")[2], each.size) for each in sdist.getmembers() if each.isfile()]
    return sorted(found, key=lambda each: (-each[1], each[0]))


def by_part(path: Path) -> dict[str, tuple[int, int]]:
    """Files and bytes by part of the archive, such as ``theory_lab/models/zoo``."""
    parts: dict[str, tuple[int, int]] = {}
    for name, size in members(path):
        words = name.split("/")
        deep = 3 if words[:2] == ["theory_lab", "models"] and "zoo" in words else 2
        part = "/".join(words[:deep]) if len(words) > deep else "/".join(words[:-1]) or "(top)"
        files, total = parts.get(part, (0, 0))
        parts[part] = files + 1, total + size
    return dict(sorted(parts.items(), key=lambda each: -each[1][1]))


def main() -> int:
    """Parse and build."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--commit", default="HEAD", help="what to build (default: HEAD)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for both files (default: dist)")
    parser.add_argument("--twice", action="store_true", help="build twice, and fail if any byte differs")
    given = parser.parse_args()
    commit = git("rev-parse", given.commit).decode().strip()  # HEAD may move meanwhile
    made = build(commit, given.out.resolve())
    for path in made:
        print(f"{digest(path)}  {path.name}  {path.stat().st_size:,} bytes")
    if given.twice:
        with tempfile.TemporaryDirectory() as name:
            os.umask(0o077)
            again = build(commit, Path(name))
            differ = [a.name for a, b in zip(made, again, strict=True) if digest(a) != digest(b)]
        print(f"built twice: {', '.join(differ)} differ" if differ else "built twice: the same bytes")
        if differ:
            return 1
    for path in made:
        print(f"\n{path.name}: files and bytes, unpacked")
        for part, (files, total) in by_part(path).items():
            print(f"  {files:4} {total:12,}  {part}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
