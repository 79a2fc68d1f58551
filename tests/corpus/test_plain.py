"""Plain text from markup, and what counts as a repetition."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from theory_lab.corpus.deduplication import SHINGLE, Deduplicator, rolling
from theory_lab.corpus.documents import decode, plain_text
from theory_lab.corpus.plain import clean, from_man, from_pod

PAGE = """<!DOCTYPE html><html><head><title>T</title><style>p {}</style></head><body>
<div class="related"><a>next</a></div><div role="main"><h1>Head<a class="headerlink">¶</a></h1>
<p>One <b>bold</b>
word&nbsp;here.</p><script>x()</script><ul><li>first</li><li>second</li></ul><pre>  code

    more</pre><table><tr><td>a</td><td>b</td></tr></table></div><footer>end</footer></body></html>"""


def test_html_keeps_the_words_of_the_page_and_its_examples():
    pytest.importorskip("lxml")
    assert plain_text("a.html", PAGE.encode()) == (
        "Head\n\nOne bold word here.\n\nfirst\n\nsecond\n\n  code\n\n    more\n\na b"
    )
    assert plain_text("a.html", b"<!-- nothing -->") == ""
    deep = b"<body>" + b"<div>" * 1500 + b"word" + b"</div>" * 1500
    assert "word" in plain_text("a.html", deep)
    latin = '<html><head><meta charset="latin-1"></head><body><p>caf\xe9</p></body></html>'
    assert plain_text("a.html", latin.encode("latin-1"), documentation=True) == "café"


def test_manual_pages_become_paragraphs():
    page = r""".\" a comment
.TH NAME 1
.SH NAME
tool \- does \fIthings\fP
.SH DESCRIPTION
The
.B tool
reads
.IR file s
and more.
.de XX
hidden
..
.PP
.nf
a  \(aqb\(aq \e
  c
.fi
.TP
.B \-x
option
"""
    assert from_man(page) == (
        "NAME\n\ntool - does things\n\nDESCRIPTION\n\nThe tool reads files and more.\n\na  'b' \\\n  c\n\n-x option"
    )
    packed = gzip.compress(page.encode())
    assert plain_text("tool.1.gz", packed) == from_man(page)


def test_pod_loses_its_codes():
    pod = "code\n\n=head1 TITLE\n\nC<< $a < 3 >>, B<b I<c>> and E<lt>tag E<gt>; L<name|perlop/x>X<i>\n\n  kept C<x>\n\n"
    pod += "=begin html\n\nhidden\n\n=end html\n\n=item *\n\nEnd\n\n=cut\n\ncode\n"
    assert from_pod(pod) == "TITLE\n\n$a < 3, b c and <tag >; name\n\n  kept C<x>\n\nEnd"


def test_numbers_that_are_no_characters_are_left_out():
    assert from_man(".TH A 1\n.PP\na\\[u0062]c\\[uFFFFFF]d\\[uD800]e\n") == "abcde"
    assert from_pod("=pod\n\naE<98>cE<1114112>dE<55296>e\n") == "abcde"


def test_text_is_told_from_what_is_none():
    assert decode("\ufeffä".encode()) == "ä"
    assert decode("ä".encode("utf-16")) == "ä"
    assert decode(b"a\0b") is None
    assert decode(b"\xff\xfa") is None
    assert plain_text("x.gz", b"no gzip") is None
    assert clean("a \r\n\n\n\n\x07b\n") == "a\n\nb"


def words(start: int, count: int) -> str:
    return " ".join(f"word{start + index}" for index in range(count))


def test_repetitions_go_and_the_rest_stays():
    keep = Deduplicator().keep
    first = f"{words(0, 40)}\n\nA heading\n\n{words(100, 40)}"
    assert keep(first) == first
    assert keep(first.upper()) is None, "case and white space do not count"
    again = f"{words(200, 40)}\n\nA heading\n\n{words(100, 40)}"
    assert keep(again) == f"{words(200, 40)}\n\nA heading", "short paragraphs may repeat"
    assert keep("A heading\n\nand nothing else") is not None, "a short text is none that repeats"


def test_a_copy_with_small_changes_is_found():
    """400 words with one changed: 8 of 393 shingles are new, whichever of them are remembered."""
    counter = Deduplicator()
    assert counter.keep(words(0, 400))
    assert counter.keep(words(0, 400).replace("word200 ", "other ")) is None
    assert counter.found.paragraphs_near == 1
    assert counter.keep(words(1000, 400))


def test_shingles_depend_on_their_words_alone():
    ids = np.arange(1, 60)
    hashes = rolling(ids)
    assert len(hashes) == 59 - SHINGLE + 1
    np.testing.assert_array_equal(rolling(ids[10:30]), hashes[10 : 10 + 20 - SHINGLE + 1])
    assert len(set(hashes.tolist())) == len(hashes)
    assert (rolling(ids[::-1].copy()) != hashes).all()
