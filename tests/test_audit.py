"""The audit: schema, and every kind of check in both directions."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from theory_lab import audit_measure
from theory_lab.audit import KINDS, audit, load
from theory_lab.audit_data import Quantity, agree, at_most, exact, less, parse_printed
from theory_lab.audit_measure import MEASUREMENTS, CannotMeasure
from theory_lab.errors import InputError

NO_ROWS = pd.DataFrame({"claim": [], "verdict": []})

TABLES = """
[paper]
title = "A paper"

[[table]]
id = "t"
title = "Table 1"
source = "a paper"
columns = [{ name = "loss", unit = "nats" }, { name = "score", unit = "%" }, { name = "word" }]
[table.rows]
"A" = ["1.50", "10", "yes"]
"B" = ["2.5", "20", "no"]
"C" = ["2.50", "30", "no"]
"D" = ["-", "~40", "-"]

[[table]]
id = "u"
title = "Table 2"
source = "a paper"
columns = [{ name = "loss" }, { name = "tokens" }]
[table.rows]
"A" = ["1.5", 64]
"B" = ["3.5", "65K"]
"""


def statement(check: str) -> str:
    return f'\n[[statement]]\nid = "s"\ntext = "So it is."\nsource = "page 1"\ncheck = {{ {check} }}\n'


def write(folder: Path, text: str, paper: str = "x") -> Path:
    (folder / paper).mkdir(parents=True, exist_ok=True)
    (folder / paper / "tables.toml").write_text(text, encoding="utf-8")
    return folder


def decide(folder: Path, check: str, rows: pd.DataFrame | None = NO_ROWS) -> pd.Series:
    frame = audit("x", rows, folder=write(folder, TABLES + statement(check)))
    return frame.loc["s"]


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_measure, "find_spec", lambda name: None)
    audit_measure._features.cache_clear()


# --- Printed numbers ---


def printed(text: str) -> Quantity:
    found = parse_printed(text)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("3.1190", 3.11895, 3.11905),
        ("3.119", 3.1185, 3.1195),
        ("-7", -7.5, -6.5),
        ("~38", 37, 39),
        ("~0.482", 0.481, 0.483),
        ("65K", 64_500, 67_072),
        ("1K", 500, 1536),
    ],
)
def test_printed_number_is_an_interval(text: str, low: float, high: float) -> None:
    found = printed(text)
    assert (float(found.low), float(found.high)) == (low, high)
    assert found.text == text


@pytest.mark.parametrize("text", ["", "yes", "1.", ".5", "1,000", "1e3", "5%", "> 99", "1 2"])
def test_what_is_no_printed_number(text: str) -> None:
    assert parse_printed(text) is None


@pytest.mark.parametrize(
    ("a", "b", "strict", "weak"),
    [
        ("1.5", "1.6", True, True),  # neighbors of the same precision touch, yet rounding keeps their order
        ("1.6", "1.5", False, False),
        ("1.5", "1.5", None, None),
        ("1.5", "1.50", None, None),
        ("1.4", "1.450", None, None),
        ("1.4", "1.46", True, True),
        ("~1.4", "1.5", None, None),
        ("1K", "2K", None, None),  # 1,500 and 1,400 print so if K means 1,000 and 1,024
        ("1K", "4K", True, True),
    ],
)
def test_comparisons_in_three_values(a: str, b: str, strict: bool | None, weak: bool | None) -> None:
    assert less(printed(a), printed(b)) is strict
    assert at_most(printed(a), printed(b)) is weak


def test_exact_numbers_are_compared_exactly() -> None:
    assert less(exact(1), exact(1)) is False
    assert at_most(exact(1), exact(1)) is True
    assert agree(exact(0.1), exact(0.1))
    assert not agree(exact(1), exact(2))
    assert agree(printed("1.5"), printed("1.46"))
    assert not agree(printed("1.5"), printed("1.6"))
    assert less(exact(99), printed("99")) is None


# --- Every kind, in every direction ---

ROW_A, ROW_B = '{ table = "t", row = "A", column = "loss" }', '{ table = "t", row = "B", column = "loss" }'
PRINTED = [
    ('kind = "extremum", table = "t", columns = "loss", which = "min", is = "A"', "AGREES"),
    ('kind = "extremum", table = "t", columns = "loss", which = "max", is = "A"', "CONTRADICTS"),
    ('kind = "extremum", table = "t", columns = "loss", which = "max", is = "B"', "UNDECIDED"),
    ('kind = "extremum", table = "t", columns = "loss", which = "max", is = "B", rows = ["A", "B"]', "AGREES"),
    ('kind = "extremum", table = "t", columns = "score", which = "max", rank = 2, is = "C"', "AGREES"),
    ('kind = "extremum", table = "t", columns = "score", which = "max", rank = 3, is = "C"', "CONTRADICTS"),
    ('kind = "extremum", table = "t", columns = "loss", which = "min", rank = 2, is = "C"', "UNDECIDED"),
    ('kind = "extremum", table = "t", columns = ["loss", "score"], which = "min", is = "A"', "AGREES"),
    ('kind = "extremum", table = "t", columns = ["loss", "score"], which = "max", is = "C"', "CONTRADICTS"),
    ('kind = "monotone", table = "t", column = "score", direction = "increasing"', "AGREES"),
    ('kind = "monotone", table = "t", column = "score", direction = "decreasing"', "CONTRADICTS"),
    ('kind = "monotone", table = "t", column = "loss", direction = "increasing"', "UNDECIDED"),
    ('kind = "monotone", table = "t", row = "A", columns = ["loss", "score"], direction = "increasing"', "AGREES"),
    (f'kind = "compare", left = {ROW_A}, op = "<", right = {ROW_B}', "AGREES"),
    (f'kind = "compare", left = {ROW_A}, op = ">", right = {ROW_B}', "CONTRADICTS"),
    (f'kind = "compare", left = {ROW_B}, op = ">=", right = 2.5', "UNDECIDED"),
    (f'kind = "compare", left = {ROW_A}, op = "==", right = "1.5"', "AGREES"),
    (f'kind = "compare", left = {ROW_A}, op = "!=", right = "1.5"', "CONTRADICTS"),
    (f'kind = "compare", left = {ROW_A}, op = "==", right = 1.51', "CONTRADICTS"),
    (f'kind = "compare", left = {{ sum = [{ROW_A}, {ROW_B}] }}, op = "==", right = "4.0"', "AGREES"),
    (f'kind = "compare", left = {{ difference = [{ROW_B}, {ROW_A}] }}, op = ">", right = 0.9', "AGREES"),
    (f'kind = "compare", left = {{ difference = [{ROW_B}, {ROW_A}] }}, op = ">", right = 1', "UNDECIDED"),
    (f'kind = "compare", left = {{ ratio = [{ROW_B}, {ROW_A}] }}, op = ">", right = 1.5', "AGREES"),
    (f'kind = "compare", left = {{ ratio = [{ROW_B}, {ROW_A}] }}, op = ">", right = 2', "CONTRADICTS"),
    (f'kind = "compare", left = {ROW_B}, op = ">=", right = {{ product = [1.5, {ROW_A}] }}', "AGREES"),
    ('kind = "compare", left = { mean = { table = "t", column = "score", rows = ["A", "B", "C"] } }, op = "==", '
     "right = 20", "AGREES"),
    ('kind = "compare", left = { max = { table = "t", column = "score" } }, op = ">", right = 38', "AGREES"),
    ('kind = "compare", left = { min = { table = "t", column = "score" } }, op = ">", right = 38', "CONTRADICTS"),
    ('kind = "compare", left = { ratio = [{ table = "u", row = "B", column = "tokens" }, '
     '{ table = "u", row = "A", column = "tokens" }] }, op = ">=", right = 1000', "AGREES"),
    ('kind = "compare", left = { ratio = [{ table = "u", row = "B", column = "tokens" }, '
     '{ table = "u", row = "A", column = "tokens" }] }, op = ">=", right = 1020', "UNDECIDED"),
    ('kind = "every", table = "t", column = "score", op = ">", value = 9', "AGREES"),
    ('kind = "every", table = "t", column = "score", op = ">", value = 10', "UNDECIDED"),
    ('kind = "every", table = "t", column = "score", op = ">", value = 11', "CONTRADICTS"),
    ('kind = "every", table = "t", column = "score", rows = ["B", "C"], op = ">", value = 11', "AGREES"),
    ('kind = "wins", table = "t", row = "C", over = "A", which = "max", op = "==", value = 2, '
     'columns = ["loss", "score"]', "AGREES"),
    ('kind = "wins", table = "t", row = "C", over = "A", which = "min", op = ">=", value = 1, '
     'columns = ["loss", "score"]', "CONTRADICTS"),
    ('kind = "wins", table = "t", row = "C", over = "B", which = "max", op = ">", value = 1, '
     'columns = ["loss", "score"]', "UNDECIDED"),
    ('kind = "same", table = "t", other = "u"', "CONTRADICTS"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "verdict"), PRINTED)
def test_printed_kinds(tmp_path: Path, check: str, verdict: str) -> None:
    row = decide(tmp_path, check)
    assert row.verdict == verdict
    assert row.printed
    assert row.computed
    assert row.check
    assert ("the printed digits cannot decide" in row.note) == (verdict == "UNDECIDED")


def test_same_agrees_once_the_figures_do(tmp_path: Path) -> None:
    text = (TABLES + statement('kind = "same", table = "t", other = "u"')).replace('"3.5"', '"2.53"')
    row = audit("x", folder=write(tmp_path, text)).loc["s"]
    assert row.verdict == "AGREES"  # 2.5 and 2.53 can be the same number


def test_what_is_not_printed_is_named(tmp_path: Path) -> None:
    row = decide(tmp_path, 'kind = "extremum", table = "t", columns = "loss", which = "min", is = "A"')
    assert row.note == "not printed, so left out: D"


def test_every_kind_is_tested() -> None:
    tested = {match for check, _ in PRINTED for match in re.findall(r'kind = "(\w+)"', check)}
    assert tested | {"measured"} == set(KINDS)


# --- measured: claims ---

CLAIM = 'kind = "measured", claim = "tda-4.3", expect = "{}"'


@pytest.mark.parametrize(
    ("verdicts", "expect", "verdict"),
    [
        (["HOLDS", "HOLDS"], "HOLDS", "AGREES"),
        (["HOLDS", "VIOLATED"], "HOLDS", "CONTRADICTS"),
        (["HOLDS", "INCONCLUSIVE"], "HOLDS", "UNDECIDED"),
        (["INCONCLUSIVE", "VIOLATED"], "HOLDS", "CONTRADICTS"),
        (["HOLDS", "VIOLATED"], "VIOLATED", "AGREES"),
        (["HOLDS", "HOLDS"], "VIOLATED", "CONTRADICTS"),
    ],
)
def test_rows_decide_a_claim(tmp_path: Path, verdicts: list[str], expect: str, verdict: str) -> None:
    rows = pd.DataFrame({"claim": "tda-4.3", "verdict": verdicts})
    assert decide(tmp_path, CLAIM.format(expect), rows).verdict == verdict


def test_rows_outside_the_assumptions_do_not_count(tmp_path: Path) -> None:
    rows = pd.DataFrame({"claim": "tda-4.3", "verdict": ["HOLDS", "VIOLATED"], "assumptions": ["met", "beta < sigma"]})
    assert decide(tmp_path, CLAIM.format("HOLDS"), rows).verdict == "AGREES"
    row = decide(tmp_path, CLAIM.format("HOLDS"), rows[1:])
    assert row.verdict == "NOT MEASURED"
    assert "assumptions" in row.note


def test_claim_without_rows(tmp_path: Path) -> None:
    row = decide(tmp_path, CLAIM.format("HOLDS"), NO_ROWS)
    assert row.verdict == "NOT MEASURED"
    assert "tda-4.3" in row.note
    row = decide(tmp_path, 'kind = "measured", claim = "no-such-claim", expect = "HOLDS"', None)
    assert row.verdict == "NOT MEASURED"
    assert "no-such-claim" in row.note


def test_the_audit_runs_a_claim_itself(tmp_path: Path) -> None:
    """Within the theorem's assumptions; what lies outside them says nothing about it."""
    settings = 'settings = { noise = "gaussian", length = [64], trials = 20000 }'
    row = decide(tmp_path, f"{CLAIM.format('HOLDS')}, {settings}", None)
    assert (row.verdict, row.computed) == ("AGREES", "of 1 settings: 1 HOLDS")
    worse = 'settings = { noise = "gaussian", length = [1000000], beta = 0.5, trials = 20000 }'
    row = decide(tmp_path, f"{CLAIM.format('HOLDS')}, {worse}", None)
    assert row.verdict == "NOT MEASURED"


def test_a_claim_that_lacks_a_package_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(claim: str, **settings: object) -> pd.DataFrame:
        raise InputError("claim", claim, "it needs torch: pip install 'theory-lab[torch]'")

    monkeypatch.setattr("theory_lab.experiments.check", check)
    row = decide(tmp_path, CLAIM.format("HOLDS"), None)
    assert (row.verdict, row.note) == ("NOT MEASURED", "needs torch: pip install 'theory-lab[torch]'")


def test_settings_that_a_claim_refuses_name_the_entry(tmp_path: Path) -> None:
    bad = 'settings = { noise = "gaussien", length = [64] }'
    with pytest.raises(InputError, match=r"statement 's', key 'check\.settings': .*gauss"):
        decide(tmp_path, f"{CLAIM.format('HOLDS')}, {bad}", None)


def test_rows_without_a_verdict_are_refused() -> None:
    with pytest.raises(InputError, match=r"rows: .*'verdict'"):
        audit("tda", pd.DataFrame({"claim": ["tda-4.3"]}))


def test_what_nothing_can_measure_says_what_it_needs(tmp_path: Path) -> None:
    row = decide(tmp_path, 'kind = "measured", needs = "a trained model"')
    assert (row.verdict, row.note) == ("NOT MEASURED", "needs a trained model")


# --- measured: measurements ---

EXAMPLE = {
    "query": [0.5, -0.2, 0.8],
    "projection": [0.1, 0.3, -0.2],
    "bias": 0.1,
    "scores": [0.9, 0.3, 0.7, 0.1, 0.85, 0.4],
    "slope": 10.0,
}


def run(name: str, **arguments: object) -> object:
    return MEASUREMENTS[name].run(**arguments)


def test_worked_example_against_independent_values() -> None:
    def measure(want: str, reading: str = "weight", **more: object) -> object:
        return run("eta-worked-example", want=want, reading=reading, **EXAMPLE, **more)

    assert measure("threshold") == pytest.approx(0.482507, abs=5e-7)
    assert measure("mask") == pytest.approx([0.985, 0.139, 0.898, 0.021, 0.975, 0.305], abs=5e-4)
    by_weight = [0.3375, 0.0261, 0.2519, 0.0033, 0.3179, 0.0633]
    by_logit = [0.2484, 0.1067, 0.1920, 0.1026, 0.2346, 0.1157]
    assert measure("weight") == pytest.approx(by_weight, abs=5e-5)
    assert measure("weight", "logit") == pytest.approx(by_logit, abs=5e-5)
    assert measure("floor-ratio") == pytest.approx(0.0633 / 0.0033, rel=0.02)
    assert measure("floor-ratio", "logit") == pytest.approx(0.1157 / 0.1026, rel=1e-3)
    assert measure("suppressed-mass") == pytest.approx(0.0261 + 0.0033 + 0.0633, abs=2e-4)
    assert measure("survives") == ["yes", "no", "yes", "no", "yes", "no"]
    assert measure("block-kept", block=2) == ["yes"] * 3
    assert measure("blocks-kept-share", block=1) == 0.5
    with pytest.raises(ValueError, match="want is one of"):
        measure("anything")


def test_support_grows_with_a_divisor_and_shrinks_with_a_factor() -> None:
    thetas = [0.25, 0.5, 1.0, 2.0]
    assert run("entmax-support-trend", alpha=1.5, temperatures=thetas) == "larger"
    assert run("entmax-support-trend", alpha=1.0, temperatures=thetas) == "neither"  # softmax is always dense
    with pytest.raises(ValueError, match="must rise"):
        run("entmax-support-trend", alpha=1.5, temperatures=thetas[::-1])


def test_entmax_gap_sees_a_wrong_alpha() -> None:
    for alpha, to in ((1.0, "softmax"), (2.0, "sparsemax")):
        assert run("entmax-largest-gap", alpha=alpha, to=to) < 1e-12
        assert run("entmax-largest-gap", alpha=alpha + 0.01, to=to) > 1e-4


def test_fisher_p_value() -> None:
    assert run("fisher-p-value", first=15.0, second=6.0, trials=100) == pytest.approx(0.0629, abs=1e-4)
    assert run("fisher-p-value", first=30.0, second=6.0, trials=100) < 1e-4


def test_consensus_over_bound_has_the_known_values() -> None:
    assert run("consensus-over-bound", rho=0.1231, length=10**6) == pytest.approx(0.140, abs=5e-4)
    assert run("consensus-over-bound", rho=0.5, length=10**4) == pytest.approx(8.62, abs=5e-3)


def test_features_need_torch_and_say_so(tmp_path: Path, no_torch: None) -> None:
    with pytest.raises(CannotMeasure, match="PyTorch"):
        run("mechanism-features", mechanism="tda")
    row = decide(tmp_path, 'kind = "measured", measurement = "mechanisms-with-all-features", '
                 'arguments = { mechanisms = ["tra"] }, right = 0')  # fmt: skip
    assert row.verdict == "NOT MEASURED"
    assert "PyTorch" in row.note


def test_features_with_torch() -> None:
    pytest.importorskip("torch")
    assert run("mechanism-features", mechanism="tda") == ["yes"] * 4


FISHER = ('kind = "measured", measurement = "fisher-p-value", arguments = { '
          'first = { table = "t", row = "C", column = "score" }, second = 6, trials = 100 }, ')  # fmt: skip


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        (FISHER + 'op = "<", right = 0.01', "AGREES"),
        (FISHER + 'op = ">", right = 0.01', "CONTRADICTS"),
        (FISHER + 'op = "<", right = "0.0"', "UNDECIDED"),
    ],
)
def test_measurement_against_a_number(tmp_path: Path, check: str, verdict: str) -> None:
    row = decide(tmp_path, check)
    assert row.verdict == verdict
    assert "C, score: 30" in row.printed


# --- Bad data ---

GOOD = 'kind = "every", table = "t", column = "score", op = ">", value = 9'
BAD_CHECKS = [
    (GOOD.replace("every", "each"), "check.kind"),
    (GOOD.replace('"t"', '"tt"'), "check.table"),
    (GOOD.replace('"score"', '"scores"'), "check.column"),
    (GOOD + ', rows = ["A", "Z"]', "check.rows"),
    (GOOD + ', rows = ["A", "A"]', "check.rows"),
    (GOOD + ", rows = 3", "check.rows"),
    (GOOD + ", extra = 3", "check.extra"),
    (GOOD.replace('">"', '"=>"'), "check.op"),
    (GOOD.replace("value = 9", "value = true"), "check.value"),
    (GOOD.replace("value = 9", 'value = "nine"'), "check.value"),
    (GOOD.replace("value = 9", "value = { sum = [] }"), "check.value.sum"),
    (GOOD.replace("value = 9", "value = { sum = [1], mean = [1] }"), "check.value"),
    (GOOD.replace("value = 9", "value = { eval = '1 + 1' }"), "check.value"),
    (GOOD.replace("value = 9", "value = { ratio = [1, 2, 3] }"), "check.value.ratio"),
    (GOOD.replace("value = 9", "value = { ratio = [1, '0.0'] }"), "check.value.ratio"),
    (GOOD.replace("value = 9", 'value = { table = "t", row = "D", column = "loss" }'), "check.value.row"),
    (GOOD.replace("value = 9", 'value = { mean = { table = "t", column = "loss" } }'), "check.value.mean"),
    (GOOD.replace('"score"', '"word"'), "check"),
    (GOOD.replace('column = "score"', 'column = "score", row = "A"'), "check.column"),
    (GOOD.replace(', column = "score"', ""), "check.column"),
    (GOOD.replace(", value = 9", ""), "check.value"),
    ('kind = "extremum", table = "t", columns = "loss", which = "least", is = "A"', "check.which"),
    ('kind = "extremum", table = "t", columns = "loss", which = "min", is = "D"', "check.is"),
    ('kind = "extremum", table = "t", columns = "loss", which = "min", is = "A", rank = 0', "check.rank"),
    ('kind = "compare", left = 1, op = "<", right = 2', "check.left"),
    ('kind = "wins", table = "t", row = "A", over = "E", which = "max", op = ">", value = 0', "check.over"),
    ('kind = "measured", needs = 5', "check.needs"),
    ('kind = "measured"', "check.needs"),
    ('kind = "measured", claim = "tda-4.3", expect = "TRUE"', "check.expect"),
    ('kind = "measured", claim = "tda-4.3", expect = "HOLDS", settings = { lenght = 5 }', "check.settings.lenght"),
    ('kind = "measured", claim = "tda-4.3", expect = "HOLDS", settings = { length = "5" }', "check.settings.length"),
    ('kind = "measured", claim = "tda-4.3", measurement = "fisher-p-value"', "check.claim"),
    (FISHER.replace("fisher-p-value", "os.system") + "right = 1", "check.measurement"),
    (FISHER.replace("second = 6, ", "") + "right = 1", "check.arguments.second"),
    (FISHER.replace("second", "third = 3, second") + "right = 1", "check.arguments.third"),
    (FISHER + 'right = { table = "t", column = "word", rows = "A" }', "check.right"),
    (FISHER + 'right = { table = "t", column = "word" }', "check.right"),
]


@pytest.mark.parametrize(("check", "key"), BAD_CHECKS)
def test_bad_check_names_file_entry_and_key(tmp_path: Path, check: str, key: str) -> None:
    with pytest.raises(InputError) as caught:
        decide(tmp_path, check)
    message = str(caught.value)
    assert message.startswith(f"experiments/x/tables.toml, statement 's', key '{key}':")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ('"A" = ["1.50", "10", "yes"]', '"A" = ["1.50", "10"]', "table 't', key 'rows.A'"),
        ('"1.50"', "1.50", "table 't', key 'rows.A'"),
        ('"1.50"', '"1.5 nats"', "table 't', key 'rows.A'"),
        ('"1.50"', '""', "table 't', key 'rows.A'"),
        ('"1.50"', "true", "table 't', key 'rows.A'"),
        ('id = "u"', 'id = "t"', "table 't', key 'id'"),
        ('id = "u"', 'name = "u"', "table 2, key 'id'"),
        ('unit = "nats"', "unit = 3", "table 't', key 'columns[0].unit'"),
        ('unit = "nats"', 'units = "nats"', "table 't', key 'columns[0].units'"),
        ('{ name = "word" }', '{ name = "loss" }', "table 't', key 'columns[2].name'"),
        ('title = "A paper"', 'name = "A paper"', "paper, key 'title'"),
        ('title = "A paper"', 'title = "A paper"\nyear = 2026', "paper, key 'year'"),
        ("[paper]", "[papers]", "top level, key 'paper'"),
        ('text = "So it is."', "", "statement 's', key 'text'"),
        ('text = "So it is."', 'text = " "', "statement 's', key 'text'"),
        ('text = "So it is."', 'text = "So."\nverdict = "CONTRADICTS"', "statement 's', key 'verdict'"),
        ("[[statement]]", "[[statements]]", "top level, key 'statement'"),
    ],
)
def test_bad_file_names_file_entry_and_key(tmp_path: Path, old: str, new: str, where: str) -> None:
    text = TABLES + statement(GOOD)
    assert old in text
    with pytest.raises(InputError) as caught:
        load("x", write(tmp_path, text.replace(old, new, 1)))
    assert str(caught.value).startswith(f"experiments/x/tables.toml, {where}")


def test_bad_toml_and_double_rows_are_one_line(tmp_path: Path) -> None:
    for text in ("paper = ", TABLES.replace('"B" = ["2.5"', '"A" = ["2.5"') + statement(GOOD)):
        with pytest.raises(InputError, match=r"tables\.toml; not valid TOML: [^\n]+$"):
            load("x", write(tmp_path, text))


def test_two_statements_of_one_id(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="an id of its own"):
        load("x", write(tmp_path, TABLES + statement(GOOD) * 2))


def test_unknown_paper_gets_a_hint() -> None:
    with pytest.raises(InputError, match="did you mean 'asentmax'"):
        load("asentmx")
