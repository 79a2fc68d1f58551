"""Put trained models into the package: bfloat16 weights, tokenizer and a model card, under theory_lab/models/zoo.

    python tools/zoo.py runs/tda-pico tra-pico=runs/tra --corpus CORPUS

Each folder is one that ``theory-lab train`` finished. The name is that of the mechanism and the size unless one is
given. What is installed is loaded again and run once before it replaces an older one.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import click

from theory_lab.errors import InputError, TheoryLabError
from theory_lab.models.catalog import ZOO
from theory_lab.models.conversion import hushed

#: Of one model's weights: what fits into a package.
MOST_BYTES = 5_000_000
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(
            "run", str(path.parent), f"a finished training run is allowed; {path.name} is not there"
        ) from None


def install(run: Path, name: str | None, corpus: Path | None, into: Path = ZOO) -> Path:
    """Install one run.

    Parameters
    ----------
    run : Path
        Folder of a finished training run.
    name : str, optional
        What people type; ``<attention>-<size>`` by default.
    corpus : Path, optional
        The corpus's folder, for its sources and licenses.
    into : Path
        Where models lie.

    Returns
    -------
    Path
        The model's folder.

    Raises
    ------
    InputError
        If it is no finished run, its corpus is another one, or it is too large.
    """
    record = _read(run / "train.json")
    manifest = None if corpus is None else _read(corpus / "manifest.json")
    if manifest is not None and manifest["splits"]["train"]["sha256"] != record["source"].get("sha256"):
        raise InputError("corpus", str(corpus), f"the corpus that {run} was trained on is allowed")
    settings = record["settings"]
    name = name or f"{settings['attention']}-{settings['size']}"
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into, prefix=".new-") as made:
        folder = Path(made)
        with hushed():
            numbers = _weights(run, folder)
        for file in _TOKENIZER:
            if (run / file).exists():
                shutil.copyfile(run / file, folder / file)
        if not (folder / "tokenizer.json").exists():
            raise InputError("run", str(run), "a model with its tokenizer.json is allowed")
        (folder / "README.md").write_text(card(name, record, manifest, numbers), encoding="utf-8")
        target = into / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for part in folder.iterdir():
            shutil.copyfile(part, target / part.name)  # with the permissions of any new file
    return target


def _weights(run: Path, folder: Path) -> dict[str, Any]:
    """Write bfloat16 weights; their number, size, and how far they move the logits of the run's own."""
    import torch
    from transformers import AutoModelForCausalLM

    import theory_lab.models.lab  # noqa: F401  # makes the architecture known to transformers

    model = AutoModelForCausalLM.from_pretrained(run, dtype=torch.float32, use_safetensors=True).eval()
    ids = torch.randint(3, model.config.vocab_size, (2, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = model(ids).logits.log_softmax(-1)
    own = {id(p) for n, p in model.named_parameters() if ".mechanism." in n}
    for parameter in model.parameters():
        if id(parameter) not in own:
            parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    size = (folder / "model.safetensors").stat().st_size
    if size > MOST_BYTES:
        raise InputError("run", str(run), f"weights of at most {MOST_BYTES:,} bytes are allowed, these are {size:,}")
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True).eval()
    with torch.no_grad():
        rounded = again(ids).logits.log_softmax(-1)
    if not bool(torch.isfinite(rounded).all()):
        raise InputError("run", str(run), "a model with finite logits is allowed")
    divergence = (exact.exp() * (exact - rounded)).sum(-1).mean()
    return {
        "parameters": sum(p.numel() for p in again.parameters()),
        "bytes": size,
        "divergence": float(divergence),
        "learned": _learned(again),
        "options": dict(again.config.attention_parameters),
    }


def _learned(model: Any) -> list[tuple[int, str, list[float]]]:
    """Per layer, the learned numbers of its mechanism, one a head."""
    found = []
    for index, layer in enumerate(model.model.layers):
        mechanism = layer.attention.mechanism
        for field in mechanism.__dict__.get("_transforms", {}):
            if field + "_" in dict(mechanism.named_parameters()):
                value = getattr(mechanism, field).detach().reshape(-1)
                found.append((index, field, [round(float(v), 3) for v in value]))
    return found


def card(name: str, record: dict[str, Any], manifest: dict[str, Any] | None, numbers: dict[str, Any]) -> str:
    """The model card, in Markdown with the Hub's front matter."""
    settings = record["settings"]
    options = ", ".join(f"{key} {value}" for key, value in numbers["options"].items())
    options = f" ({options}; where these are learned, their start)" if options else ""
    lines = [
        "---", "license: apache-2.0", "language: en", "library_name: transformers", "pipeline_tag: text-generation",
        "tags: [theory-lab, attention]", "---", "", f"# {name}", "",
        f"A language model of {numbers['parameters'] / 1e6:.2f} million parameters whose attention is "
        f"`{settings['attention']}`, trained to be measured: its maps, sinks, zeros and thresholds are small enough to "
        "look at on a laptop. It is no good at writing.", "",
        "```sh", f"theory-lab probe {name}", f"theory-lab explore {name}", "```", "",
        "## Training", "",
        "| | |", "|---|---|",
        f"| mechanism | `{settings['attention']}`{options} |",
        f"| steps, tokens | {record['steps']:,} steps, {record['tokens']:,} tokens |",
        f"| batch, length | {settings['batch']} sequences of {settings['length']} tokens, the first one `<bos>` |",
        f"| optimizer | AdamW, learning rate {settings['lr']:g} to {settings['lr_min']:g} (cosine), "
        f"weight decay {settings['weight_decay']:g} on matrices |",
        f"| seed | {settings['seed']} |",
        f"| held-out loss | {record['val_loss']:.4f} ± {record['val_loss_se']:.4f} nats a token (one standard error, "
        f"{record['held_out_tokens']:,} tokens, float32 weights) |",
        f"| device, time | {_device(record)}, {record['seconds']:,.0f} s |",
        f"| date | {record['date']} |",
        f"| weights here | bfloat16, {numbers['bytes'] / 1e6:.2f} MB; the mechanism's own parameters float32. Rounding "
        f"moves the next-token distribution by {numbers['divergence']:.1e} nats (Kullback-Leibler, random tokens) |",
        "",
    ]  # fmt: skip
    if numbers["learned"]:
        lines += [
            "Learned parameters of the mechanism, by head:",
            "",
            "| layer | parameter | values |",
            "|---|---|---|",
        ]
        lines += [
            f"| {layer} | {field} | {', '.join(map(str, values))} |" for layer, field, values in numbers["learned"]
        ]
        lines.append("")
    lines += ["## Data", ""]
    source = record["source"]
    lines.append(f"Corpus `{source.get('corpus', source.get('task', 'unknown'))}`, SHA-256 of its tokens "
                 f"`{source.get('sha256', 'unknown')}`.")  # fmt: skip
    if manifest is not None:
        lines += ["", "| source | version | license of the text | tokens |", "|---|---|---|---|"]
        for one in manifest["sources"]:
            lines.append(
                f"| {one['name']} | {one.get('version', '')} | {one.get('license', 'unknown')} | {one['tokens']:,} |"
            )
    lines += [
        "", "## License", "",
        "The weights are under the Apache License 2.0, as Theory Lab is. The texts that they were fitted to keep the "
        "licenses named above and are not part of this folder.", "",
        "## Limits", "",
        f"One seed, a few minutes of training, texts of {settings['length']} tokens, one kind of text: how far "
        "another seed would differ is not known, so a difference between two such models says little of their "
        "mechanisms. What it writes may be wrong, and may repeat passages of its texts.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _device(record: dict[str, Any]) -> str:
    device = record.get("device")
    if isinstance(device, dict):
        return str(device.get("name") or device.get("type") or "unknown device")
    return str(device)


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="[NAME=]DIR...")
@click.option(
    "--corpus", type=click.Path(path_type=Path), help="Folder of the corpus, for the card's table of sources."
)
@click.option("--into", type=click.Path(path_type=Path), default=ZOO, help="Where models lie.")
def main(runs: tuple[str, ...], corpus: Path | None, into: Path) -> None:
    """Install trained models, with their cards."""
    try:
        for text in runs:
            name, equals, folder = text.rpartition("=")
            click.echo(install(Path(folder), name if equals else None, corpus, into))
    except TheoryLabError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
