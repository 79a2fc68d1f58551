"""The targets that read bytes under atheris, which keeps inputs that reach code no other reached.

``python tests/fuzz/fuzz_coverage.py TARGET INPUTS SEED REPORT``, as ``python tools/fuzz.py --coverage`` calls it: libFuzzer
ends its process itself, so each target has one.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parents[1] / "kernels")]
sys.dont_write_bytecode = True

#: Targets whose input is the content of one file.
BYTES = (
    "scores-npy", "scores-csv", "scores-parquet", "experiment-toml", "plan-toml", "preset-toml", "header-safetensors", "header-gguf",
    "thresholds", "explorer-bytes",
)  # fmt: skip


def main(name: str, inputs: int, seed: int, report: Path) -> None:
    """Fuzz one target; what is counted is written to ``report`` as it goes."""
    import warnings

    import atheris

    with atheris.instrument_imports(include=["theory_lab", "gguf"]):
        import fuzz_harness as harness
        from fuzz_targets import TARGETS

        target = next(one for one in TARGETS if one.name == name)
        harness.warm(target.heavy)
        for module in (
            "noise.empirical",
            "reproduce.spec",
            "campaigns",
            "training.presets",
            "models.headers",
            "explore.server",
        ):
            try:
                __import__(f"theory_lab.{module}")
            except ImportError:
                continue
    warnings.simplefilter("ignore")
    tally = harness.Tally(name)
    stack = harness.workshop()
    place = stack.__enter__()

    def keep() -> None:
        about = {
            "inputs": tally.inputs, "taken": tally.taken, "refused": tally.refused, "messages": tally.messages,
            "findings": [{"kind": f.kind, "words": f.words, "where": f.where, "input": harness.encoded(f.input)} for f in tally.findings[:50]],
        }  # fmt: skip
        report.write_text(json.dumps(about), encoding="utf-8")

    def one(data: bytes) -> None:
        harness.run_one(target, data, place, tally, tally.inputs)
        if tally.inputs % 500 == 0 or tally.inputs >= inputs:
            keep()

    with tempfile.TemporaryDirectory() as seeds:
        for index in range(200):
            Path(seeds, str(index)).write_bytes(target.make(harness.seeded(name, seed, index))[:8192])
        flags = [
            f"-runs={inputs}",
            f"-seed={seed + 1}",
            "-max_len=8192",
            "-timeout=300",
            "-rss_limit_mb=6000",
            "-verbosity=0",
        ]
        atheris.Setup(["fuzz", *flags, seeds], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]).absolute())
