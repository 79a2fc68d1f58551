"""The explorer in a notebook: the page's own modules in an anywidget, with the kernel in the place of the server."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError
from theory_lab.explore import static_files
from theory_lab.explore.session import Session, open_session

try:
    import anywidget
except ImportError:
    raise InputError("explore", "anywidget is not installed", "pip install 'theory-lab[notebooks]'") from None

if TYPE_CHECKING:
    from theory_lab.models import LoadedModel
    from theory_lab.probes.maps import Captured
    from theory_lab.probes.texts import Text
    from theory_lab.probes.whatif import Mechanism


class ExplorerWidget(anywidget.AnyWidget):
    """Shows a session.

    Attributes
    ----------
    session : Session
    """

    _esm = static_files.module()
    _css = static_files.style()

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.on_msg(self._asked)

    def _asked(self, widget: Any, message: Any, buffers: Any) -> None:
        if not isinstance(message, dict) or "id" not in message:
            return
        try:
            given = message.get("parameters")
            words = {str(name): str(word) for name, word in given.items()} if isinstance(given, dict) else {}
            header, numbers = self.session.answer(str(message.get("kind")), words)
        except InputError as error:
            self.send({"id": message["id"], "error": str(error)})
            return
        self.send({"id": message["id"], "header": header}, buffers=[numbers.astype("<f4").tobytes()])


def explore(
    model: str | Path | LoadedModel | Captured,
    text: str | Text | None = None,
    *,
    as_: str | Mechanism | Iterable[str | Mechanism] = (),
    compare: str | Path | LoadedModel | Captured | None = None,
    layer: int | None = None,
    head: int = 0,
    **loading: Any,
) -> ExplorerWidget:
    """Explore a model's attention on a text in a notebook; display what it returns.

    Parameters
    ----------
    model, text, as_, compare, layer, head, **loading
        As for :func:`theory_lab.explore.open_session`.

    Returns
    -------
    ExplorerWidget

    Raises
    ------
    InputError
        As for ``open_session``.
    """
    return ExplorerWidget(open_session(model, text, as_=as_, compare=compare, layer=layer, head=head, **loading))
