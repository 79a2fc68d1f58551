"""Text as tokens: a corpus is a folder that can be trained on.

``theory-lab corpus build`` makes one; :class:`Corpus` opens it.
"""

from __future__ import annotations

from theory_lab.corpus.reading import Corpus, CorpusSource

__all__ = ["Corpus", "CorpusSource"]
