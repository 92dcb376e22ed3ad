"""Grammars of llama.cpp, translated to Lark."""

import re
import time
from contextlib import suppress
from itertools import islice, pairwise, product
from string import ascii_lowercase

import pytest

from shared.grammars.gbnf import MAX_DEPTH, is_gbnf, to_lark
from shared.messages import Constraint
from tests.support.models.grammars import matches

_MAX_CPU_S = 1.0
"""For the longest grammars that a request may contain. They take 0.2 s at most (AMD EPYC Milan)."""
RECURSIVE = r"""
# Lists with "quotes" and ::= in a comment
root      ::= item-list "."
item-list ::= item (comma item)*
item      ::= letter+
            | "(" item-list ")"
comma     ::= "," space?
space     ::= " "
letter    ::= [a-z]
"""


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (r'root ::= "\u00e9"', "é", "e"),
        (r"root ::= [\u00e0-\u00ff]", "é", "e"),
        (r'root ::= "\U0001F600"', "😀", "x"),
        (r'root ::= "\u65e5"', "日", "x"),
        (r'root ::= "\x41\n\t\r\"\\\[\]"', 'A\n\t\r"\\[]', "x"),
        ('root ::= [^"\\\\\\n] [-a] [b-] [\\]\\-c]', "x-b-", 'x-a"'),
        ('root ::= "^" [\\^a-c] [a^]', "^^^", "^^b"),
        ("root ::= .", "\n", ""),
        ("root ::= start\nstart ::= 's'".replace("'", '"'), "s", "start"),
        ('root ::= A a\nA ::= "X"\na ::= "y"', "Xy", "XX"),
        ('root ::= r1 R1\nr1 ::= "X"\nR1 ::= "y"', "Xy", "XX"),
        ('root ::= my-rule my_rule\nmy-rule ::= "a"\nmy_rule ::= "b"', "ab", "aa"),
        ('root ::= 1st -\n1st ::= "a"\n- ::= "b"', "ab", "a"),
        ('root ::= import\nimport ::= "a" # "b"', "a", "b"),
        ('root ::= [a-z]+ "ing"', "going", "go"),
        ('root ::= "(" root ")" | word "ing"\nword ::= [a-z]+', "((going))", "((go))"),
        ('root ::= root "a" | "b"', "baa", "aa"),
        ('root ::= "a"{2} "b"{1,} "c"{,2} "d"{0,1}', "aabbcd", "abc"),
        ('root ::= "a" | ( "b"\n | \n)', "", "ab"),
        ('root ::= "a" (("b" | "c") "d")* "e"?', "abdcde", "abc"),
        ('root ::= "it\'s # ::= |"', "it's # ::= |", "it's"),
        (RECURSIVE, "a, (bc,(cd)), e.", "a, (b,(cd), e."),
    ],
)
def test_what_is_translated_allows_the_same(grammar: str, good: str, bad: str) -> None:
    constraint = Constraint(kind="lark", source=to_lark(grammar))

    assert is_gbnf(grammar)
    assert matches(constraint, good)
    assert not matches(constraint, bad)


def test_tokens_are_those_of_lark() -> None:
    lark = to_lark("root ::= <think> text </think> <[5]> <[^7-9]>\ntext ::= [a-z]*")

    assert lark.splitlines()[1:] == [
        "start: <think> TEXT </think> <[5]> <[^7-9]>",
        "TEXT: (/[a-z]/)*",
    ]


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('root ::= "a', "line 1: '\"a' cannot be read"),
        ("root ::= [a", "line 1: '[a' cannot be read"),
        ('root ::= "a"\n("b"', "line 2: expected the name of a rule"),
        ('root ::= (\n"a"', "line 2: a group is not closed"),
        ("root ::= )", "line 1: ')' is not expected here"),
        ('root ::= "a" b ::= "c"', "line 1: '::=' is not expected here"),
        ('root\n::= "a"', "line 1: expected ::= after the name of a rule"),
        ('rule ::= "a"', "there is no rule named root"),
        ("root ::=\n\nb\nc", "line 4: expected ::= after the name of a rule"),
        ('root ::= "a"\n\nroot ::= "b"', "line 3: the rule 'root' is defined twice"),
        ('root ::= "a"\nb ::= c', "line 2: the rule 'c' is not defined"),
        (r'root ::= "\q"', r"line 1: \q is not an escape sequence"),
        (r'root ::= "\u12"', r"line 1: \u is not an escape sequence"),
        (r'root ::= "\ud800"', r"line 1: \ud800 is not a character"),
        (r'root ::= "\U00110000"', r"line 1: \U00110000 is not a character"),
        ("root ::= [z-a]", "line 1: a range of characters ends before it begins"),
        ("root ::= [^]", "line 1: a class of characters is empty"),
        ("root ::= *", "line 1: '*' has nothing to repeat"),
        ('root ::= "a"+*', "line 1: '*' has nothing to repeat"),
        ('root ::= "a"{}', "line 1: expected a number of repetitions"),
        ('root ::= "a"{3,2}', "line 1: the maximum of repetitions is below the minimum"),
        ('root ::= "a"{65537}', "line 1: more than 65536 repetitions"),
        ("root ::= " + "(" * (MAX_DEPTH + 1), "line 1: groups are nested more than 64 levels deep"),
    ],
)
def test_a_mistake_is_named_with_its_line(grammar: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
        to_lark(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" "::=" "b"',
        'start: rule\nrule: "x ::= y" // root ::= "a"',
        'start: rule # root ::= "a"\nrule: /a ::= b/\n  | "c" "::="',
    ],
)
def test_a_lark_grammar_that_contains_the_sign_is_none_of_llama_cpp(grammar: str) -> None:
    assert not is_gbnf(grammar)
    assert matches(Constraint(kind="lark", source='start: "a" "::=" "b"'), "a::=b")


def chained(length: int) -> str:
    """Rules that precede what they need."""
    names = ["".join(letters) for letters in islice(product(ascii_lowercase, repeat=3), length)]
    steps = (f"{name}::={needed}" for name, needed in pairwise(["root", *names]))
    return "\n".join([*steps, f'{names[-1]}::="x"'])


WORST = [
    "root ::= " + "(" * 64_000,
    "root ::= " + "(" * MAX_DEPTH + '"a"' * 20_000 + ")" * MAX_DEPTH,
    "root ::= " + "(" * MAX_DEPTH + '"a"' * 20_000 + ")" * MAX_DEPTH + " root",
    "root ::= " + '("a")' * 13_000,
    "root ::= " + '("a"|' * MAX_DEPTH + '"b"' + ")*" * MAX_DEPTH + '("a"|"b")' * 7_000,
    "root ::= [" + "a-z" * 21_000 + "]",
    'root ::= "' + r"\x41" * 16_000 + '"',
    'root ::= "' + "a" * 65_000,
    "root ::= [" + "a" * 65_000,
    "root ::= <" + "a" * 65_000,
    'root ::= "a"{' + " " * 65_000,
    'root ::= "a"' + "*" * 65_000,
    "root ::= " + "#\n" * 32_000,
    "a" * 65_000,
    "a " * 32_000,
    " " * 65_000,
    'root ::= "a"\n' + "\n".join(f'{"-" * k}a{"_" * (40 - k)} ::= ""' for k in range(40)) * 20,
    chained(6_000),
]


@pytest.mark.parametrize("grammar", WORST, ids=lambda grammar: grammar[:24])
def test_the_worst_grammars_take_linear_time(grammar: str) -> None:
    began = time.process_time()

    is_gbnf(grammar)
    with suppress(ValueError):
        to_lark(grammar)

    assert time.process_time() - began < _MAX_CPU_S


def test_names_that_lark_does_not_tell_apart_take_linear_time() -> None:
    names = ["a" + "".join(signs) + "b" for signs in product("-_", repeat=11)]
    rules = "\n".join(f'{name} ::= "x"' for name in names)
    began = time.process_time()

    lark = to_lark(f"root ::= {' '.join(names)}\n{rules}")

    assert time.process_time() - began < _MAX_CPU_S
    written = {line.split(":")[0].lower() for line in lark.splitlines()}
    assert len(written) == len(names) + len(["%llguidance {}", "start", "part"])
